"""Llama 2 and 3, and whatever is saved with ``model_type: llama`` (SmolLM2, …)."""

from __future__ import annotations

from typing import Any

from areal_mega.core.errors import UserError
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, field
from areal_mega.models.table import Param


class Llama(Family):
    model_types = ("llama",)

    def check(self, hf: HFConfig) -> None:
        attention, mlp = (bool(field(hf, name, default=False)) for name in ("attention_bias", "mlp_bias"))
        if attention != mlp:
            raise UserError(
                f"config.json: attention_bias={attention} with mlp_bias={mlp} cannot be honoured: Megatron-Core has one switch for both"
            )

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        return {"add_bias_linear": _biased(hf)}

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        biased = _biased(hf)
        return self.attention(hf, layer, qkv_bias=biased, proj_bias=biased) + self.dense_mlp(hf, layer, bias=biased)


def _biased(hf: HFConfig) -> bool:
    return bool(field(hf, "attention_bias", default=False))
