"""Rotary position embeddings: HuggingFace's fields, wherever they sit, as Megatron-Core's settings.

transformers 5 writes ``rope_parameters`` (with ``rope_theta`` in it); older files have ``rope_theta`` at the top level and
``rope_scaling`` (``type`` or ``rope_type``). What Megatron-Core cannot express is an error, never ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from areal_mega.core.errors import UserError
from areal_mega.models.hf_config import HFConfig
from areal_mega.models.hf_config import field as hf_field

_KNOWN = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    },
}
_LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants inside megatron.core RotaryEmbedding._apply_scaling (0.19); only the factor is a parameter there."""


@dataclass(frozen=True)
class Rope:
    """``gpt_kwargs`` go to GPTModel; ``config_attributes`` are set on the TransformerConfig, which GPTModel reads for YaRN."""

    gpt_kwargs: dict[str, Any]
    config_attributes: dict[str, Any] = field(default_factory=dict)


def rope_of(hf: HFConfig, *, theta: float = 10000.0, partial: float = 1.0) -> Rope:
    """Read the rotary settings of a config.

    Args:
        theta, partial: what transformers gives the family where the file names no ``rope_theta``, no ``partial_rotary_factor``.

    Raises:
        UserError: for a kind, a key or a value that would not reach the model.
    """
    settings = rope_settings(hf, theta=theta, partial=partial)
    kind = settings.pop("rope_type")
    theta = float(settings.pop("rope_theta"))
    partial = float(settings.pop("partial_rotary_factor"))
    if kind not in _KNOWN:
        raise UserError(f"config.json: rope type '{kind}' cannot be honoured; supported: {', '.join(_KNOWN)}")
    check_keys(kind, settings)
    base = {"position_embedding_type": "rope", "rotary_base": theta, "rotary_percent": partial}
    match kind:
        case "default":
            return Rope(base)
        case "linear":
            return Rope(base | {"seq_len_interpolation_factor": float(settings["factor"])})
        case "llama3":
            return Rope(base | _llama3(settings))
    if partial != 1.0:
        raise UserError(f"config.json: yarn with partial_rotary_factor {partial} cannot be honoured; supported: 1.0")
    return Rope(base | {"position_embedding_type": "yarn"}, {f"yarn_{key}": value for key, value in yarn(settings, hf).items()})


def check_keys(kind: str, settings: dict[str, Any]) -> None:
    """Refuse keys that the kind does not have, and a kind without its factor."""
    unknown = sorted(settings.keys() - _KNOWN[kind])
    if unknown:
        raise UserError(f"config.json: rope type '{kind}' with {', '.join(unknown)} cannot be honoured; known: {sorted(_KNOWN[kind])}")
    if kind != "default" and "factor" not in settings:
        raise UserError(f"config.json: rope type '{kind}' lacks factor; add it")


def rope_settings(hf: HFConfig, *, theta: float, partial: float) -> dict[str, Any]:
    """``rope_type``, ``rope_theta``, ``partial_rotary_factor`` and the kind's own keys, from whichever place has them."""
    new, old = hf_field(hf, "rope_parameters", default=None), hf_field(hf, "rope_scaling", default=None)
    if new is not None and old is not None and {**new, **old} != new:
        raise UserError("config.json has rope_parameters and another rope_scaling; keep one")
    merged = {key: value for key, value in (new or old or {}).items() if value is not None}
    if any(isinstance(value, dict) for value in merged.values()):
        raise UserError("config.json: rope settings per layer type cannot be honoured; supported: one setting for all layers")
    kind = merged.pop("rope_type", None) or merged.get("type") or "default"
    merged.pop("type", None)
    for key, default in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        top = hf_field(hf, key, default=None)
        inner = merged.get(key)
        if top is not None and inner is not None and float(top) != float(inner):
            raise UserError(f"config.json: {key} is {top} at top level and {inner} in the rope settings; keep one")
        merged[key] = next((value for value in (inner, top) if value is not None), default)
    return {"rope_type": kind, **merged}


def _llama3(settings: dict[str, Any]) -> dict[str, Any]:
    for key, fixed in _LLAMA3_FIXED.items():
        value = settings.get(key, fixed)
        if float(value) != float(fixed):
            raise UserError(f"config.json: llama3 rope with {key}={value} cannot be honoured: Megatron-Core fixes it at {fixed}")
    return {"rope_scaling": True, "rope_scaling_factor": float(settings["factor"])}


def yarn(settings: dict[str, Any], hf: HFConfig) -> dict[str, Any]:
    """YaRN's settings by the names of Megatron-Core's own rotary module."""
    factor, mscale, mscale_all = float(settings["factor"]), settings.get("mscale"), settings.get("mscale_all_dim")
    if not (mscale and mscale_all):  # transformers uses the pair only where both are set and not zero
        mscale = mscale_all = None
    attention = settings.get("attention_factor")
    implied = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1.0)
    if attention is not None and not math.isclose(attention, implied, rel_tol=1e-6):
        raise UserError(
            f"config.json: yarn attention_factor={attention} cannot be honoured: Megatron-Core derives {implied:.6g} here; drop it"
        )
    original = settings.get("original_max_position_embeddings") or hf_field(hf, "max_position_embeddings")
    return {
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": int(original),
        "beta_fast": float(settings.get("beta_fast") or 32.0),
        "beta_slow": float(settings.get("beta_slow") or 1.0),
        "mscale": mscale,
        "mscale_all_dim": mscale_all,
        "correction_range_round_to_int": bool(settings.get("truncate", True)),
    }


def _mscale(scale: float, mscale: float) -> float:
    """Attention temperature of YaRN (arXiv 2309.00071, equation 22)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
