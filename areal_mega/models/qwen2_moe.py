"""Qwen2-MoE (and Qwen1.5-MoE): Qwen2's attention, softmax router, one shared expert behind a sigmoid gate."""

from __future__ import annotations

from typing import Any

from areal_mega.models import blocks
from areal_mega.models.hf_config import HFConfig, field, only
from areal_mega.models.qwen2 import Qwen2
from areal_mega.models.qwen3_moe import check_sparse, moe_layers, softmax_router
from areal_mega.models.table import Param


class Qwen2Moe(Qwen2):
    model_types = ("qwen2_moe",)

    def check(self, hf: HFConfig) -> None:
        super().check(hf)
        only(hf, "qkv_bias", True, default=True, why="the family's attention is built with a bias on query, key and value")
        check_sparse(hf, dense_family="qwen2")

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        return {
            **super().architecture(hf),
            **softmax_router(hf),
            "moe_shared_expert_intermediate_size": field(hf, "shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        if not moe_layers(hf)[layer]:
            return super().layer(hf, layer)
        return self.attention(hf, layer, qkv_bias=True) + blocks.moe(
            layer,
            hidden=field(hf, "hidden_size"),
            ffn=field(hf, "moe_intermediate_size"),
            experts=int(field(hf, "num_experts", "num_local_experts")),
            shared=blocks.Shared(ffn=field(hf, "shared_expert_intermediate_size"), hf="shared_expert", gate="shared_expert_gate"),
        )
