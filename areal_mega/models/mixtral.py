"""Mixtral: Llama's attention, every layer sparse; its files name the parts of an expert w1, w3 and w2."""

from __future__ import annotations

from typing import Any, ClassVar

from areal_mega.models import blocks
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, field, only
from areal_mega.models.table import Param


class Mixtral(Family):
    model_types = ("mixtral",)
    default_rope_theta: ClassVar[float] = 1e6

    def check(self, hf: HFConfig) -> None:
        only(hf, "sliding_window", None, default=None, why="sliding-window attention is not built")
        only(hf, "router_jitter_noise", 0.0, default=0.0, why="log-probabilities that are compared must come from the same function")

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        # Softmax over all experts, top-k, renormalise: the same as a softmax over the k chosen ones.
        return {
            "num_moe_experts": _experts(hf),
            "moe_ffn_hidden_size": field(hf, "intermediate_size"),
            "moe_router_topk": field(hf, "num_experts_per_tok"),
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,
            "moe_layer_freq": 1,
        }

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        return self.attention(hf, layer) + blocks.moe(
            layer,
            hidden=field(hf, "hidden_size"),
            ffn=field(hf, "intermediate_size"),
            experts=_experts(hf),
            hf_block="block_sparse_moe.",
            hf_names=("w1", "w3", "w2"),
        )


def _experts(hf: HFConfig) -> int:
    return int(field(hf, "num_local_experts", "num_experts"))
