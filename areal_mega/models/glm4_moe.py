"""GLM-4-MoE (GLM-4.5, 4.6): grouped-query attention with biases, optional norms per head and half-rotary heads; V3-like experts."""

from __future__ import annotations

from typing import Any, ClassVar

from areal_mega.models import sigmoid_moe
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, field
from areal_mega.models.table import Param


class Glm4Moe(Family):
    model_types = ("glm4_moe",)
    default_rotary_percent: ClassVar[float] = 0.5

    def has_qk_norm(self, hf: HFConfig) -> bool:
        return bool(field(hf, "use_qk_norm", default=False))

    def check(self, hf: HFConfig) -> None:
        sigmoid_moe.check_sigmoid_router(hf)

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        return {"add_qkv_bias": _biased(hf)} | sigmoid_moe.sigmoid_router(hf)

    def config_attributes(self, hf: HFConfig) -> dict[str, Any]:
        groups = {"group_score_experts": 2} if sigmoid_moe.groups(hf) else {}
        return super().config_attributes(hf) | groups

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        attention = self.attention(hf, layer, qkv_bias=_biased(hf))
        if layer < field(hf, "first_k_dense_replace"):
            return attention + self.dense_mlp(hf, layer)
        return attention + sigmoid_moe.experts(hf, layer, correction_bias=True)


def _biased(hf: HFConfig) -> bool:
    """Of query, key and value; the output projection has none."""
    return bool(field(hf, "attention_bias", default=False))
