"""Model families: what a HuggingFace ``config.json`` means to Megatron-Core, and where every weight goes.

One declarative table per family (``Family.table``) drives load, export and weight sync. A new family is one small file that composes
the blocks of ``blocks.py`` and a line in ``registry.py``.
"""
