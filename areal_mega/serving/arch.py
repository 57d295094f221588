"""What the server needs to know of an architecture, read from ``config.json`` with the trainer's own readers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_mega.core.errors import UserError
from areal_mega.models.hf_config import HFConfig, field, head_dim, no_sliding_window, only, tied
from areal_mega.models.qwen3_moe import moe_layers
from areal_mega.models.registry import family_for
from areal_mega.models.rope import rope_of

if TYPE_CHECKING:
    from torch import Tensor


SERVED = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sparse layers: which they are, and their sizes."""

    layers: tuple[bool, ...]
    count: int
    top_k: int
    hidden: int
    normalise: bool
    """Whether the k probabilities of a token are scaled to a sum of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """A decoder-only transformer of the Llama kind: pre-norm RMSNorm, rotary positions, grouped-query attention, SiLU-gated MLP."""

    model_type: str
    architectures: tuple[str, ...]
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: dict[str, Any]
    max_positions: int
    experts: Experts | None

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def read_arch(hf: HFConfig) -> Arch:
    """The architecture of a ``config.json``.

    Raises:
        UserError: for a family that is not served, or a setting of it that would change the outputs and is not built.
    """
    family = family_for(hf)
    if hf["model_type"] not in SERVED:
        raise UserError(f"the embedded server does not serve model_type '{hf['model_type']}', only {', '.join(SERVED)}; use SGLang")
    only(hf, "hidden_act", "silu", default="silu", why="the gated MLP is built with SiLU")
    only(hf, "quantization_config", None, default=None, why="quantised checkpoints are not served; de-quantise it first")
    no_sliding_window(hf)
    model_type = str(field(hf, "model_type"))
    heads = int(field(hf, "num_attention_heads"))
    attention_bias = bool(field(hf, "attention_bias", default=False)) and model_type != "qwen2"
    experts = None
    if model_type == "qwen3_moe":
        experts = Experts(
            layers=tuple(moe_layers(hf)),
            count=int(field(hf, "num_experts", "num_local_experts")),
            top_k=int(field(hf, "num_experts_per_tok")),
            hidden=int(field(hf, "moe_intermediate_size")),
            normalise=bool(field(hf, "norm_topk_prob", default=False)),
        )
    return Arch(
        model_type=model_type,
        architectures=tuple(field(hf, "architectures", default=())),
        vocab=int(field(hf, "vocab_size")),
        hidden=int(field(hf, "hidden_size")),
        intermediate=int(field(hf, "intermediate_size")),
        layers=int(field(hf, "num_hidden_layers")),
        heads=heads,
        kv_heads=int(field(hf, "num_key_value_heads", default=heads)),
        head_dim=head_dim(hf, family.default_head_dim),
        eps=float(field(hf, "rms_norm_eps")),
        tied=tied(hf),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(field(hf, "mlp_bias", default=False)) and model_type == "llama",
        qk_norm=family.qk_norm,
        rope=_rope(hf),
        max_positions=int(field(hf, "max_position_embeddings")),
        experts=experts,
    )


def _rope(hf: HFConfig) -> dict[str, Any]:
    settings = rope_of(hf).gpt_kwargs
    if settings["position_embedding_type"] != "rope" or settings["rotary_percent"] != 1.0:
        raise UserError("config.json: yarn and partial rotary embeddings are not served by the embedded server; use SGLang")
    return settings


def rope_frequencies(arch: Arch) -> Tensor:
    """Angle per position of each rotary pair, float32 [head_dim / 2]: plain, linearly interpolated, or Llama 3.1's scaling.

    Llama 3.1: wavelengths beyond the original context are slowed by ``factor``, those well inside it stay, those between are blended
    (the "llama3" rope type of transformers).
    """
    import torch

    dim = arch.head_dim
    frequencies = 1.0 / (arch.rope["rotary_base"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if "seq_len_interpolation_factor" in arch.rope:
        frequencies = frequencies / arch.rope["seq_len_interpolation_factor"]
    if arch.rope.get("rope_scaling"):
        factor, low, high, original = arch.rope["rope_scaling_factor"], 1.0, 4.0, 8192
        wavelength = 2 * math.pi / frequencies
        blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = (1 - blend) * frequencies / factor + blend * frequencies
    return frequencies
