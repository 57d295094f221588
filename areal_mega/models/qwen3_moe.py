"""Qwen3-MoE: Qwen3's attention, softmax router, experts in all layers or some."""

from __future__ import annotations

from typing import Any, ClassVar

from areal_mega.core.errors import UserError
from areal_mega.models import blocks
from areal_mega.models.hf_config import HFConfig, field
from areal_mega.models.qwen3 import Qwen3
from areal_mega.models.table import Param


class Qwen3Moe(Qwen3):
    model_types = ("qwen3_moe",)
    default_head_dim: ClassVar[int | None] = None

    def check(self, hf: HFConfig) -> None:
        super().check(hf)
        check_sparse(hf, dense_family="qwen3")

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        return softmax_router(hf)

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        if not moe_layers(hf)[layer]:
            return self.attention(hf, layer) + self.dense_mlp(hf, layer)
        sizes = {"hidden": field(hf, "hidden_size"), "ffn": field(hf, "moe_intermediate_size"), "experts": _experts(hf)}
        return self.attention(hf, layer) + blocks.moe(layer, **sizes)


def softmax_router(hf: HFConfig) -> dict[str, Any]:
    """TransformerConfig keywords of Qwen's experts and router."""
    # Softmax over all experts, top-k, renormalise equals top-k, then softmax over those k; without renormalising it does not.
    return {
        "num_moe_experts": _experts(hf),
        "moe_ffn_hidden_size": field(hf, "moe_intermediate_size"),
        "moe_router_topk": field(hf, "num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not field(hf, "norm_topk_prob", default=False),
        "moe_layer_freq": [int(sparse) for sparse in moe_layers(hf)],
    }


def check_sparse(hf: HFConfig, *, dense_family: str) -> None:
    if not any(moe_layers(hf)):
        raise UserError(f"config.json: mlp_only_layers and decoder_sparse_step leave no layer with experts; use model_type {dense_family}")


def moe_layers(hf: HFConfig) -> list[bool]:
    """For every layer, whether it has experts."""
    dense, step = set(field(hf, "mlp_only_layers", default=[])), field(hf, "decoder_sparse_step", default=1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(field(hf, "num_hidden_layers"))]


def _experts(hf: HFConfig) -> int:
    """transformers 5 writes ``num_local_experts`` where the hub's files say ``num_experts``."""
    return int(field(hf, "num_experts", "num_local_experts"))
