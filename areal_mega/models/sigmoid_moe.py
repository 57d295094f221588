"""Experts as DeepSeek-V3 has them and GLM-4-MoE after it: sigmoid scores, a correction bias that chooses, shared experts, and dense
layers before the sparse ones (arXiv:2412.19437, section 2.1.2)."""

from __future__ import annotations

from typing import Any

from areal_mega.core.errors import UserError
from areal_mega.models import blocks
from areal_mega.models.hf_config import HFConfig, field, only
from areal_mega.models.table import Param


def check_sigmoid_router(hf: HFConfig) -> None:
    check_sparse_layers(hf)
    check_groups(hf, at_least=2)
    only(hf, "scoring_func", "sigmoid", default="sigmoid", why="the family's router scores with a sigmoid")
    only(hf, "topk_method", "noaux_tc", default="noaux_tc", why="the family chooses experts by scores and a correction bias")
    several = field(hf, "num_experts_per_tok") > 1
    only(hf, "norm_topk_prob", several, default=True, why="Megatron-Core divides sigmoid scores by their sum where experts are several")


def sigmoid_router(hf: HFConfig) -> dict[str, Any]:
    """TransformerConfig keywords of experts and router."""
    return sparse_layers(hf) | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def sparse_layers(hf: HFConfig) -> dict[str, Any]:
    """TransformerConfig keywords that hold for any scoring."""
    dense = field(hf, "first_k_dense_replace")
    return {
        "num_moe_experts": field(hf, "n_routed_experts", "num_local_experts", "num_experts"),
        "moe_ffn_hidden_size": field(hf, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": _shared_size(hf),
        "moe_router_topk": field(hf, "num_experts_per_tok"),
        "moe_router_topk_scaling_factor": float(field(hf, "routed_scaling_factor")),
        "moe_layer_freq": [int(layer >= dense) for layer in range(field(hf, "num_hidden_layers"))],
        **groups(hf),
    }


def check_sparse_layers(hf: HFConfig) -> None:
    layers, dense = field(hf, "num_hidden_layers"), field(hf, "first_k_dense_replace")
    only(hf, "moe_layer_freq", 1, default=1, why="every layer behind the first dense ones has experts")
    if dense >= layers:
        raise UserError(
            f"config.json: first_k_dense_replace {dense} leaves none of {layers} layers with experts; a dense model is another family"
        )


def groups(hf: HFConfig) -> dict[str, Any]:
    """Keywords of group-limited routing; none where every group may be chosen."""
    count, chosen = _groups(hf)
    return {"moe_router_num_groups": count, "moe_router_group_topk": chosen} if chosen < count else {}


def check_groups(hf: HFConfig, *, at_least: int) -> None:
    """``at_least``: experts of a group that its score is made of."""
    count, chosen = _groups(hf)
    experts = field(hf, "n_routed_experts", "num_local_experts", "num_experts")
    if chosen >= count:
        return
    if experts % count or experts // count < at_least:
        raise UserError(
            f"config.json: {experts} experts in n_group {count} groups; a group needs the same number of experts, at least {at_least}"
        )
    if chosen * (experts // count) < field(hf, "num_experts_per_tok"):
        raise UserError(
            f"config.json: topk_group {chosen} groups of {experts // count} experts hold fewer than num_experts_per_tok experts"
        )


def _groups(hf: HFConfig) -> tuple[int, int]:
    count = int(field(hf, "n_group", default=1))
    return count, int(field(hf, "topk_group", default=count))


def _shared_size(hf: HFConfig) -> int:
    return int(field(hf, "n_shared_experts") * field(hf, "moe_intermediate_size"))


def experts(hf: HFConfig, layer: int, *, correction_bias: bool) -> list[Param]:
    """Table entries of a sparse layer's MLP."""
    return blocks.moe(
        layer,
        hidden=field(hf, "hidden_size"),
        ffn=field(hf, "moe_intermediate_size"),
        experts=field(hf, "n_routed_experts", "num_local_experts", "num_experts"),
        correction_bias=correction_bias,
        shared=blocks.Shared(ffn=_shared_size(hf), hf="shared_experts"),
    )
