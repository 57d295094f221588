"""Weights made at random from a ``config.json``, as transformers initialises them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from areal_mega.models.hf_config import load_hf_config
from areal_mega.models.hf_io import HFSource, HFWriter, resolve_folder
from areal_mega.models.proof import prove_source
from areal_mega.models.registry import family_for


def make_random_model(source_folder: str | Path, out_folder: str | Path, seed: int) -> None:
    """Make a model folder with random weights: same seed, same weights.

    Everything but weights is copied from ``source_folder`` byte for byte; weights have the dtype that its config names (fp32 where it
    names none).

    Raises:
        UserError: if the source has no usable ``config.json`` or ``out_folder`` exists.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    folder = resolve_folder(str(source_folder))
    hf_config = load_hf_config(str(folder))
    table = family_for(hf_config).table(hf_config)
    config = AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    with tempfile.TemporaryDirectory(dir=Path(out_folder).absolute().parent, prefix=".random-") as aside:
        # transformers knows how its modules are spelled in files (experts are fused in memory); our writer copies the rest verbatim.
        model.save_pretrained(aside)
        with HFSource(aside) as made:
            prove_source(made.names(), table, str(folder))
            plan = [made.spec(tensor.name) for tensor in table.hf_tensors]
            with HFWriter(out_folder, plan, source=folder) as writer:
                for spec in plan:
                    writer.write(spec.name, made.read(spec.name))
