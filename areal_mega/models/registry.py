"""Which family a model belongs to."""

from __future__ import annotations

from areal_mega.core.errors import UserError
from areal_mega.models.deepseek import DeepseekV2, DeepseekV3
from areal_mega.models.family import Family
from areal_mega.models.glm4_moe import Glm4Moe
from areal_mega.models.hf_config import HFConfig, load_hf_config
from areal_mega.models.llama import Llama
from areal_mega.models.mixtral import Mixtral
from areal_mega.models.qwen2 import Qwen2
from areal_mega.models.qwen2_moe import Qwen2Moe
from areal_mega.models.qwen3 import Qwen3
from areal_mega.models.qwen3_moe import Qwen3Moe

__all__ = ["FAMILIES", "family_for", "load_hf_config"]

FAMILIES: tuple[Family, ...] = (Llama(), Qwen2(), Qwen3(), Mixtral(), Qwen2Moe(), Qwen3Moe(), DeepseekV2(), DeepseekV3(), Glm4Moe())


def family_for(hf_config: HFConfig) -> Family:
    """The family of a ``config.json``, by its ``model_type``.

    Raises:
        UserError: for an unknown or missing ``model_type``, listing those supported.
    """
    model_type = hf_config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(name for family in FAMILIES for name in family.model_types)
    raise UserError(
        f"config.json: model_type '{model_type}' is not supported; supported: {', '.join(known)} (to add one: docs/add-a-family.md)"
    )
