"""Multi-head latent attention (arXiv:2405.04434) out of Megatron-Core's, with the norms where the published models have them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

LATENT_NORM_EPS = 1e-6
"""Of the norms between down and up projections: the published code fixes it, whatever ``rms_norm_eps`` says."""


class ReplicatedLinear(nn.Module):
    """A projection that every tensor-parallel rank holds whole and applies to its own tokens."""

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Under sequence parallelism each TP rank sees other tokens: Megatron-Core then sums these gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """``MLASelfAttention`` that norms both latents and nothing else."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        fused = isinstance(self.kv_layernorm, IdentityOp)
        for which in ("q", "kv"):
            if which == "kv" or config.q_lora_rank is not None:
                holder = getattr(self, f"linear_{which}_up_proj" if fused else f"{which}_layernorm")
                assert hasattr(holder, "eps"), f"{type(holder).__name__} keeps its epsilon elsewhere"
                holder.eps = LATENT_NORM_EPS

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        # Megatron-Core 0.19 would norm a full-rank query's input too, which no published model does.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class PyTorchLatentAttention(LatentAttention):
    """With whole down projections: Megatron-Core would split them, whose gradient of the rotary key is then a part only."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)


def latent_attention_spec(backend: BackendSpecProvider, build_norm: Any) -> ModuleSpec:
    """Spec of the attention in PyTorch modules; ``build_norm`` builds the norms of both latents."""
    linear = backend.column_parallel_linear()
    return ModuleSpec(
        module=PyTorchLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=linear,
            linear_q_down_proj=linear,
            linear_q_up_proj=linear,
            linear_kv_down_proj=linear,
            linear_kv_up_proj=linear,
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=build_norm,
            kv_layernorm=build_norm,
        ),
    )


def norm_latents_alone(block_spec: Any) -> Any:
    """The same for Transformer Engine's spec, whose up projections carry the norms."""
    for layer in block_spec.layer_specs:
        attention = layer.submodules.self_attention
        assert attention.module is MLASelfAttention, f"{attention.module} is not the attention that is replaced here"
        attention.module = LatentAttention
    return block_spec
