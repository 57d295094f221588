"""From a model folder to a model ready to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from areal_mega.core.errors import UserError
from areal_mega.models.hf_config import load_hf_config
from areal_mega.models.hf_io import HFSource, resolve_folder
from areal_mega.models.registry import family_for
from areal_mega.serving.arch import Arch, parameters, read_arch
from areal_mega.serving.native import choose
from areal_mega.serving.ops import make_ops
from areal_mega.serving.weights import Weights, load_all

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}


def choose_dtype(name: str, hf: dict[str, Any]) -> torch.dtype:
    """``auto``: as config.json says, else float32.

    Raises:
        UserError: for a dtype that is not served.
    """
    wanted = str(hf.get("dtype") or hf.get("torch_dtype") or "float32") if name == "auto" else name
    if wanted == "float16" and name == "auto":
        return torch.bfloat16
    if wanted not in DTYPES:
        raise UserError(f"dtype {wanted!r} is not served on a CPU; use {', '.join(sorted(DTYPES))} or auto")
    return DTYPES[wanted]


def load_weights(path: str, dtype: str, kernels: str = "auto") -> tuple[Weights, dict[str, Any]]:
    """Read config.json and all weights of a folder or hub name. ``kernels``: auto, native or torch, see ``native.choose``.

    Raises:
        UserError: missing folder, unknown architecture, missing or superfluous tensors; kernels that cannot be built.
    """
    hf = load_hf_config(path)
    arch = read_arch(hf)
    chosen = choose_dtype(dtype, hf)
    weights = Weights(arch, chosen, parameters(hf), make_ops(choose(kernels), chosen))
    fill_from(weights, path, hf)
    return weights, hf


class Unchanged(UserError):
    """A checkpoint cannot be opened or does not fit, found before anything was loaded."""


def fill_from(weights: Weights, path: str, hf: dict[str, Any]) -> None:
    """Load a checkpoint of the same architecture into ``weights``; names and shapes are checked before anything changes.

    Raises:
        Unchanged: the files cannot be opened, or names or shapes do not fit; the weights are as before.
        UserError: reading failed midway.
    """
    ignorable = family_for(hf).table(hf).ignorable
    try:
        opened = HFSource(path)
    except (UserError, OSError) as error:
        raise Unchanged(str(error)) from error
    with opened as source:
        names = [name for name in source.names() if name in weights.hf or name not in ignorable]
        for name in names:
            try:
                weights.check(name, tuple(source.spec(name).shape))
            except UserError as error:
                raise Unchanged(f"{path}: {error}") from None
        missing = sorted(weights.hf.keys() - set(names))
        if missing:
            raise Unchanged(f"{path} lacks {len(missing)} tensors of this model: {', '.join(missing[:4])}{', ...' * (len(missing) > 4)}")
        load_all(weights, ((name, source.read(name)) for name in names), source=path)


def check_same_arch(arch: Arch, path: str) -> dict[str, Any]:
    """The config of another folder, which must be of the served architecture.

    Raises:
        UserError: naming the first field that differs.
    """
    hf = load_hf_config(path)
    other = read_arch(hf)
    for name in Arch.__slots__:
        if name not in ("architectures", "max_positions") and getattr(arch, name) != getattr(other, name):
            raise UserError(f"{path} has {name} {getattr(other, name)}, the served model has {getattr(arch, name)}")
    return hf


def stop_tokens(path: str, hf: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json and config.json, in that order."""
    found: list[int] = []
    file = Path(resolve_folder(path)) / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for config in (generation, hf):
        value = config.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(int(v) for v in found))
