"""The learning rate as a function of the train step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.config.schema import OptimizerSection
from areal_mega.megatron.optimizer import learning_rate


def test_shapes() -> None:
    constant = OptimizerSection(lr=1.0, warmup_steps=4)
    assert [learning_rate(s, constant, 10) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = OptimizerSection(lr=1.0, min_lr=0.0, schedule="linear")
    assert [learning_rate(s, linear, 5) for s in range(7)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0])
    cosine = OptimizerSection(lr=1.0, min_lr=0.1, schedule="cosine")
    assert [learning_rate(s, cosine, 3) for s in range(3)] == pytest.approx([1.0, 0.55, 0.1])


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 40), st.floats(1e-8, 1.0), st.floats(0.0, 1.0))
def test_bounds_and_direction(schedule: str, warmup: int, total: int, lr: float, fraction: float) -> None:
    section = OptimizerSection(lr=lr, min_lr=lr * fraction, schedule=schedule, warmup_steps=warmup)
    rates = [learning_rate(s, section, total) for s in range(total + 3)]
    assert all(0 < r <= lr * (1 + 1e-9) for r in rates[:warmup])
    after = rates[warmup:]
    assert all(lr * fraction * (1 - 1e-9) - 1e-12 <= r <= lr * (1 + 1e-9) for r in after)
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    if total > warmup + 1:
        assert after[0] == pytest.approx(lr), "after warm-up comes the peak"
