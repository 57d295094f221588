"""DeepSeek-V2 and V3, and what is built like V3: Moonlight and Kimi-K2. Latent attention, dense layers first, then experts."""

from __future__ import annotations

from typing import Any, ClassVar

from areal_mega.core.errors import UserError
from areal_mega.models import blocks, sigmoid_moe
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, field, only
from areal_mega.models.rope import Rope, check_keys, rope_settings, yarn
from areal_mega.models.table import Param


class DeepseekV3(Family):
    """Files name ``deepseek_v3`` (DeepSeek-V3 and R1, Moonlight) or ``kimi_k2``."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2")
    group_score_experts = 2
    """Best experts of a group whose scores add up to the group's."""
    correction_bias = True

    def check(self, hf: HFConfig) -> None:
        check_latent(hf)
        sigmoid_moe.check_sigmoid_router(hf)

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        return latent(hf) | sigmoid_moe.sigmoid_router(hf)

    def config_attributes(self, hf: HFConfig) -> dict[str, Any]:
        return {"group_score_experts": self.group_score_experts} if sigmoid_moe.groups(hf) else {}

    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        attention = blocks.latent_attention(layer, hidden=field(hf, "hidden_size"), **_sizes(hf))
        if layer < field(hf, "first_k_dense_replace"):
            return attention + self.dense_mlp(hf, layer)
        return attention + sigmoid_moe.experts(hf, layer, correction_bias=self.correction_bias)

    def _rope(self, hf: HFConfig) -> Rope:
        # Latent attention has its own rotary module, which reads the TransformerConfig: GPTModel builds none.
        rope = latent_rope(hf)
        return Rope({"position_embedding_type": "rope", "rotary_base": rope["rotary_base"], "rotary_percent": 1.0})


class DeepseekV2(DeepseekV3):
    """Softmax scores, not renormalised, and no correction bias."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    group_score_experts = 1
    correction_bias = False

    def check(self, hf: HFConfig) -> None:
        check_latent(hf)
        sigmoid_moe.check_sparse_layers(hf)
        only(hf, "scoring_func", "softmax", default="softmax", why="the family's router scores with a softmax")
        only(hf, "norm_topk_prob", False, default=False, why="the family weighs experts by their scores as they are")
        only(hf, "mlp_bias", False, default=False, why="the family's MLPs are built without biases")
        only(hf, "topk_method", "greedy", "group_limited_greedy", default="greedy", why="no other choice of experts is built")
        sigmoid_moe.check_groups(_grouped(hf), at_least=1)

    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        softmax = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
        return latent(hf) | sigmoid_moe.sparse_layers(_grouped(hf)) | softmax

    def config_attributes(self, hf: HFConfig) -> dict[str, Any]:
        return super().config_attributes(_grouped(hf))


def _grouped(hf: HFConfig) -> HFConfig:
    """The config, without groups where the method does not look at them."""
    if field(hf, "topk_method", default="greedy") == "group_limited_greedy":
        return hf
    return {**hf, "n_group": None, "topk_group": None}


def check_latent(hf: HFConfig) -> None:
    if "q_lora_rank" not in hf:
        raise UserError("config.json lacks q_lora_rank; add it (null where queries are projected at full rank)")
    if field(hf, "quantization_config", default=None) is not None:
        raise UserError("config.json: quantization_config cannot be honoured: quantised weights are not trained; save the model in bf16")
    heads = field(hf, "num_attention_heads")
    only(hf, "num_key_value_heads", heads, default=heads, why="latent attention makes keys and values for every head")
    only(hf, "attention_bias", False, default=False, why="Megatron-Core's latent attention has no biases")
    only(hf, "rope_interleave", True, default=True, why="Megatron-Core's latent attention rotates neighbouring pairs")


def latent(hf: HFConfig) -> dict[str, Any]:
    """MLATransformerConfig keywords of the attention, its rotary embedding included."""
    sizes = _sizes(hf)
    return {
        "multi_latent_attention": True,
        "num_query_groups": sizes["heads"],
        "kv_channels": sizes["nope"],
        "q_lora_rank": sizes["q_rank"],
        "kv_lora_rank": sizes["kv_rank"],
        "qk_head_dim": sizes["nope"],
        "qk_pos_emb_head_dim": sizes["rope"],
        "v_head_dim": sizes["value"],
        "qk_layernorm": True,
        **latent_rope(hf),
    }


def latent_rope(hf: HFConfig) -> dict[str, Any]:
    """Rotary settings as latent attention takes them, which also scales its softmax by ``mscale_all_dim``.

    Raises:
        UserError: for a kind or a value that would not reach the model.
    """
    settings = rope_settings(hf, theta=10000.0, partial=1.0)
    kind, theta, partial = settings.pop("rope_type"), settings.pop("rope_theta"), settings.pop("partial_rotary_factor")
    if kind not in ("default", "yarn") or partial != 1.0:
        raise UserError(
            f"config.json: rope type '{kind}' with partial_rotary_factor {partial} cannot be honoured in latent attention; "
            "supported: default and yarn, of whole rotary heads"
        )
    check_keys(kind, settings)
    base: dict[str, Any] = {"rotary_base": float(theta), "rotary_percent": 1.0}
    if kind == "default":
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if settings.get("mscale_all_dim") and not settings.get("mscale"):
        raise UserError("config.json: yarn with mscale_all_dim and no mscale cannot be honoured in latent attention; give both")
    chosen = yarn(settings, hf)
    if not chosen.pop("correction_range_round_to_int"):
        raise UserError("config.json: yarn with truncate=false cannot be honoured in latent attention: Megatron-Core rounds there")
    # transformers scales angles by YaRN's own factor where the pair is not given: mscale 1 over nothing.
    pair = {"mscale": chosen["mscale"] or 1.0, "mscale_all_dim": chosen["mscale_all_dim"] or 0.0}
    return base | chosen | pair | {"rope_type": "yarn"}


def _sizes(hf: HFConfig) -> dict[str, Any]:
    return {
        "heads": field(hf, "num_attention_heads"),
        "q_rank": hf["q_lora_rank"],
        "kv_rank": field(hf, "kv_lora_rank"),
        "nope": field(hf, "qk_nope_head_dim"),
        "rope": field(hf, "qk_rope_head_dim"),
        "value": field(hf, "v_head_dim"),
    }
