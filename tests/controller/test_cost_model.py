"""The relative cost of attention, as configs of published models give it."""

from __future__ import annotations

from areal_mega.controller.cluster import cost_model

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def test_mixtral_names_the_width_of_an_expert_like_that_of_a_dense_layer() -> None:
    active = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 * 2
    assert cost_model(MIXTRAL).attention == 4096 / active


def test_a_dense_model() -> None:
    dense = {name: value for name, value in MIXTRAL.items() if name not in ("num_experts_per_tok", "num_local_experts")}
    active = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert cost_model(dense).attention == 4096 / active
