"""Qwen2 and Qwen2.5: a bias on query, key and value alone."""

from __future__ import annotations

from typing import Any

from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, no_sliding_window
from areal_mega.models.table import Param


class Qwen2(Family):
    model_types = ("qwen2",)

    def check(self, hf: HFConfig) -> None:
        no_sliding_window(hf)

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        return {"add_qkv_bias": True}

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        return self.attention(hf, layer, qkv_bias=True) + self.dense_mlp(hf, layer)
