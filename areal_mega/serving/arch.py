"""What the server needs to know of an architecture, read from ``config.json`` with the trainer's own readers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from areal_mega.models.deepseek import latent, latent_rope
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, field, head_dim, only, tied
from areal_mega.models.registry import FAMILIES, family_for

if TYPE_CHECKING:
    from torch import Tensor

    from areal_mega.models.table import Param

SERVED = tuple(name for family in FAMILIES for name in family.model_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sparse layers: which they are, their sizes and their router."""

    layers: tuple[bool, ...]
    count: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    normalise: bool
    """Whether the k weights of a token are scaled to a sum of one."""
    scale: float
    """Factor on the weights after that."""
    groups: int
    """Groups of experts of which ``group_top`` are chosen first; 1: no groups."""
    group_top: int
    group_score: int
    """Best experts of a group whose scores add up to the group's."""
    fp32: bool
    """Whether the router's product is in float32 whatever the model is in, as transformers has it for the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434): ranks, and sizes of a head's parts without and with positions."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary embedding of the first ``dim`` elements of a head. ``settings``: of the kind, by Megatron-Core's names."""

    dim: int
    base: float
    kind: Literal["default", "linear", "llama3", "yarn"]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """A decoder-only transformer of the Llama kind: pre-norm RMSNorm, rotary positions, SiLU-gated MLP; attention with grouped queries
    or latent; dense layers, sparse ones, or both."""

    model_type: str
    architectures: tuple[str, ...]
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of the cache: latent attention keeps one, shared by all queries."""
    key_dim: int
    """Size of a cached key."""
    value_dim: int
    """Size of a cached value; in latent attention the first so many elements of the key."""
    scale: float
    """Factor on attention's scores."""
    eps: float
    tied: bool
    rotary: Rotary
    max_positions: int
    experts: Experts | None
    latent: Latent | None

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def read_arch(hf: HFConfig) -> Arch:
    """The architecture of a ``config.json``.

    Raises:
        UserError: for an unknown family, or a setting of it that would change the outputs and is not built.
    """
    family = family_for(hf)
    only(hf, "hidden_act", "silu", default="silu", why="the gated MLP is built with SiLU")
    only(hf, "quantization_config", None, default=None, why="quantised checkpoints are not served; de-quantise it first")
    family.check(hf)
    heads, config = int(field(hf, "num_attention_heads")), family.architecture(hf)
    mla = _latent(hf) if config.get("multi_latent_attention") else None
    rotary = _rotary(hf, family, mla)
    size = head_dim(hf, family.default_head_dim) if mla is None else mla.nope + mla.rope
    scale = size**-0.5
    if mla is not None and rotary.kind == "yarn" and rotary.settings["mscale_all_dim"]:
        scale *= _mscale(rotary.settings["rotary_scaling_factor"], rotary.settings["mscale_all_dim"]) ** 2
    return Arch(
        model_type=str(field(hf, "model_type")),
        architectures=tuple(field(hf, "architectures", default=())),
        vocab=int(field(hf, "vocab_size")),
        hidden=int(field(hf, "hidden_size")),
        layers=int(field(hf, "num_hidden_layers")),
        heads=heads,
        kv_heads=family.query_groups(hf) if mla is None else 1,
        key_dim=size if mla is None else mla.kv_rank + mla.rope,
        value_dim=size if mla is None else mla.kv_rank,
        scale=scale,
        eps=float(field(hf, "rms_norm_eps")),
        tied=tied(hf),
        rotary=rotary,
        max_positions=int(field(hf, "max_position_embeddings")),
        experts=_experts(hf, family, config) if config.get("num_moe_experts") else None,
        latent=mla,
    )


def parameters(hf: HFConfig) -> tuple[Param, ...]:
    """The entries of the family's parameter table that a server holds: all but copies."""
    return tuple(p for p in family_for(hf).parameters(hf) if not p.copy)


def _latent(hf: HFConfig) -> Latent:
    sizes = latent(hf)
    return Latent(
        q_rank=sizes["q_lora_rank"],
        kv_rank=sizes["kv_lora_rank"],
        nope=sizes["qk_head_dim"],
        rope=sizes["qk_pos_emb_head_dim"],
        value=sizes["v_head_dim"],
    )


def _experts(hf: HFConfig, family: Family, config: dict[str, Any]) -> Experts:
    """From the keywords that Megatron-Core's router is built with."""
    layers, frequency = int(field(hf, "num_hidden_layers")), config["moe_layer_freq"]
    groups = int(config.get("moe_router_num_groups") or 1)
    sigmoid = config["moe_router_score_function"] == "sigmoid"
    top_k = int(config["moe_router_topk"])
    return Experts(
        layers=tuple(bool(f) for f in frequency) if isinstance(frequency, list) else (True,) * layers,
        count=int(config["num_moe_experts"]),
        top_k=top_k,
        score="sigmoid" if sigmoid else "softmax",
        # Softmax after the choice is the same as softmax before it and scaling to a sum of one.
        normalise=top_k > 1 if sigmoid else not config["moe_router_pre_softmax"],
        scale=float(config.get("moe_router_topk_scaling_factor") or 1.0),
        groups=groups,
        group_top=int(config.get("moe_router_group_topk") or groups),
        group_score=int(family.config_attributes(hf).get("group_score_experts", 1)),
        fp32=sigmoid or bool(config.get("multi_latent_attention")),
    )


def _rotary(hf: HFConfig, family: Family, mla: Latent | None) -> Rotary:
    if mla is not None:
        settings = latent_rope(hf)
        kind: Literal["default", "yarn"] = "yarn" if settings["rope_type"] == "yarn" else "default"
        return Rotary(dim=mla.rope, base=settings["rotary_base"], kind=kind, settings=settings if kind == "yarn" else {})
    gpt, attributes = family.gpt_kwargs(hf), family.config_attributes(hf)
    dim = int(head_dim(hf, family.default_head_dim) * gpt["rotary_percent"])
    if gpt["position_embedding_type"] == "yarn":
        yarn = {name.removeprefix("yarn_"): value for name, value in attributes.items() if name.startswith("yarn_")}
        return Rotary(dim=dim, base=gpt["rotary_base"], kind="yarn", settings=yarn)
    if "seq_len_interpolation_factor" in gpt:
        return Rotary(dim=dim, base=gpt["rotary_base"], kind="linear", settings={"factor": gpt["seq_len_interpolation_factor"]})
    if gpt.get("rope_scaling"):
        return Rotary(dim=dim, base=gpt["rotary_base"], kind="llama3", settings={"factor": gpt["rope_scaling_factor"]})
    return Rotary(dim=dim, base=gpt["rotary_base"], kind="default", settings={})


def rope_frequencies(rotary: Rotary) -> tuple[Tensor, float]:
    """Angle per position of each rotary pair, float32 [dim / 2], and a factor on cosines and sines.

    Plain; linearly interpolated; Llama 3.1's scaling, where wavelengths beyond the original context are slowed by ``factor``, those well
    inside it stay, those between are blended (the "llama3" rope type of transformers); or YaRN (arXiv:2309.00071).
    """
    import torch

    dim, settings = rotary.dim, rotary.settings
    frequencies = 1.0 / (rotary.base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rotary.kind == "linear":
        return frequencies / settings["factor"], 1.0
    if rotary.kind == "llama3":
        factor, low, high, original = settings["factor"], 1.0, 4.0, 8192
        wavelength = 2 * math.pi / frequencies
        blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * frequencies / factor + blend * frequencies, 1.0
    if rotary.kind == "yarn":
        return _yarn(rotary, frequencies)
    return frequencies, 1.0


def _yarn(rotary: Rotary, frequencies: Tensor) -> tuple[Tensor, float]:
    """Slow pairs are interpolated, fast ones stay, a ramp between (section 3.2); angles are scaled by the attention temperature."""
    import torch

    s, dim = rotary.settings, rotary.dim

    def pair_of(rotations: float) -> float:
        """The pair that turns so often within the original context."""
        return dim * math.log(s["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(rotary.base))

    low, high = pair_of(s["beta_fast"]), pair_of(s["beta_slow"])
    if s.get("correction_range_round_to_int", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = s["rotary_scaling_factor"]
    angles = _mscale(factor, s["mscale"] or 1.0) / _mscale(factor, s["mscale_all_dim"] or 0.0)
    return frequencies / factor * ramp + frequencies * (1 - ramp), angles


def _mscale(factor: float, mscale: float) -> float:
    """Attention temperature of YaRN (arXiv:2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
