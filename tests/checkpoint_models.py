"""HuggingFace folders with random weights made from a family's table alone (no transformers), and their shards under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import _COMMON, _FAMILY
from torch import Tensor

from areal_mega.models.hf_io import HFSource, HFTensorSpec, HFWriter
from areal_mega.models.loading import load_hf_weights
from areal_mega.models.ownership import Ownership
from areal_mega.models.registry import family_for, load_hf_config
from areal_mega.models.table import LOCAL, Naming
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse

FILES = {
    "generation_config.json": b'{"temperature":   0.6}\n',
    "tokenizer.json": b'{"not": "really", "but": "bytes"}',
    "chat_template.jinja": "{{ messages }} é\r\n".encode(),
}


def write_model(folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    """A model folder; the same arguments give the same bytes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shard_bytes = overrides.pop("shard_bytes", 100_000)
    config = {"model_type": family, **_COMMON, **_FAMILY[family], **overrides}
    table = family_for(config).table(config)
    generator = torch.Generator().manual_seed(seed)
    plan = [HFTensorSpec(t.name, t.shape, torch.float32 if p.fp32 else dtype) for p in table.exported for t in p.hf]
    files = {"config.json": (json.dumps(config, indent=2) + "\n").encode(), **FILES}
    with HFWriter(folder, plan, source=files, shard_bytes=shard_bytes) as writer:
        for spec in plan:
            writer.write(spec.name, torch.randn(spec.shape, generator=generator).to(spec.dtype))
    return folder


def model_bytes(folder: Path) -> dict[str, Any]:
    """Every tensor, as bits, and every other file of a folder."""
    from safetensors.torch import load_file

    out: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            for name, tensor in load_file(path).items():
                out[name] = (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        elif "safetensors" not in path.name:
            out[path.name] = path.read_bytes()
    return out


def layout_of(text: str) -> RankLayout:
    return RankLayout(parse(text))


def blank_shards(folder: Path, strategy: str, rank: int, dtype: torch.dtype = torch.bfloat16, naming: Naming = LOCAL) -> dict[str, Tensor]:
    """What a built model of that rank would have, uninitialised."""
    config = load_hf_config(str(folder))
    out = {}
    for shard in Ownership(family_for(config).table(config), layout_of(strategy)).shards(rank):
        island = torch.float32 if shard.param.fp32 else dtype
        out[naming.name(shard.param)] = torch.empty(shard.param.shard_shape(shard.size, shard.rank), dtype=island)
    return out


def loaded_shards(folder: Path, strategy: str, rank: int, dtype: torch.dtype = torch.bfloat16, naming: Naming = LOCAL) -> dict[str, Tensor]:
    """A rank's shards as the engine loads them from the HuggingFace files."""
    named, config = blank_shards(folder, strategy, rank, dtype, naming), load_hf_config(str(folder))
    with HFSource(folder) as source:
        load_hf_weights(named, source, family_for(config), config, layout_of(strategy), rank, naming=naming)
    return named
