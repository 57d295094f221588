"""Qwen3 dense: RMSNorm on each query and key head, explicit head size."""

from __future__ import annotations

from typing import Any, ClassVar

from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, no_sliding_window, only
from areal_mega.models.table import Param


class Qwen3(Family):
    model_types = ("qwen3",)
    default_head_dim: ClassVar[int | None] = 128
    qk_norm = True

    def check(self, hf: HFConfig) -> None:
        no_sliding_window(hf)
        only(hf, "attention_bias", False, default=False, why="Megatron-Core has no bias on attention's output projection alone")

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        return {}

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        return self.attention(hf, layer) + self.dense_mlp(hf, layer)
