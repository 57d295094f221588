"""The embedded inference server: continuous batching on a CPU, SGLang's HTTP protocol.

One request's way: ``http`` reads it, ``protocol`` checks it and makes sequences, ``engine`` admits them to rows of the batch (``rows``),
computes them (``model``, ``attention``, ``kv``) and samples (``sampling``), and ``answers`` writes what came out.
"""
