"""Advantages: formulas, ragged groups, exact invariance to order, degenerate groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.algorithms.advantages import compute_advantages, is_uniform, members_by_group, shape_rewards
from areal_mega.algorithms.registry import resolve_algorithm
from areal_mega.config.schema import AlgorithmSection
from areal_mega.core.errors import UserError

RULES = ["group_norm", "group_mean", "leave_one_out", "group_mean_batch_std"]
rewards = st.floats(-10, 10, allow_nan=False, width=32)


@st.composite
def batches(draw: st.DrawFn, min_group: int = 2) -> tuple[np.ndarray, list[str]]:
    """Ragged groups, interleaved."""
    sizes = draw(st.lists(st.integers(min_group, 5), min_size=1, max_size=6))
    ids = [f"g{g}" for g, size in enumerate(sizes) for _ in range(size)]
    ids = draw(st.permutations(ids))
    return np.array(draw(st.lists(rewards, min_size=len(ids), max_size=len(ids)))), ids


def expected(rule: str, values: np.ndarray, batch: np.ndarray) -> np.ndarray:
    match rule:
        case "group_norm":
            return (values - values.mean()) / (values.std() + 1e-6)
        case "group_mean":
            return values - values.mean()
        case "leave_one_out":
            return np.array([v - np.delete(values, i).mean() for i, v in enumerate(values)])
        case _:
            return (values - values.mean()) / (batch.std() + 1e-6)


@pytest.mark.parametrize("rule", RULES)
@given(batch=batches())
def test_each_rule_is_its_formula_on_every_group(rule: str, batch: tuple[np.ndarray, list[str]]) -> None:
    values, ids = batch
    got = compute_advantages(rule, values, ids, "error")
    assert got.dtype == np.float32 and got.shape == values.shape
    for members in members_by_group(ids).values():
        np.testing.assert_allclose(got[members], expected(rule, values[members], values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("singleton", ["batch_mean", "reward"])
@given(batch=batches(min_group=1), data=st.data())
def test_a_permutation_of_samples_permutes_the_advantages_exactly(rule: str, singleton: str, batch, data: st.DataObject) -> None:
    values, ids = batch
    if len(values) == 1:
        return
    order = np.array(data.draw(st.permutations(range(len(ids)))))
    plain = compute_advantages(rule, values, ids, singleton)
    permuted = compute_advantages(rule, values[order], [ids[i] for i in order], singleton)
    assert (permuted == plain[order]).all()


@pytest.mark.parametrize("rule", RULES)
@given(value=rewards, size=st.integers(2, 9), other=st.lists(rewards, min_size=2, max_size=4))
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(rule: str, value: float, size: int, other: list[float]) -> None:
    values = np.array([value] * size + other)
    got = compute_advantages(rule, values, ["same"] * size + ["other"] * len(other), "error")
    assert (got[:size] == 0).all()
    assert is_uniform(values[:size])


@given(batch=batches())
def test_group_norm_does_not_depend_on_scale_or_shift_of_rewards(batch: tuple[np.ndarray, list[str]]) -> None:
    values, ids = batch
    spread = min((values[m].std() for m in members_by_group(ids).values() if not is_uniform(values[m])), default=1.0)
    if spread < 1e-2:  # there epsilon is felt, and so is the rounding of the shifted rewards
        return
    np.testing.assert_allclose(
        compute_advantages("group_norm", 4 * values + 3, ids, "error"), compute_advantages("group_norm", values, ids, "error"), atol=2e-3
    )


@pytest.mark.parametrize("rule", RULES)
def test_a_group_of_one_is_an_error_or_a_named_fallback(rule: str) -> None:
    values, ids = [1.0, 0.0, 3.0], ["a", "a", "alone"]
    with pytest.raises(UserError, match="group alone has one sample"):
        compute_advantages(rule, values, ids, "error")
    assert compute_advantages(rule, values, ids, "reward")[2] == 3.0
    centred = 3.0 - 4.0 / 3.0
    scaled = rule in ("group_norm", "group_mean_batch_std")
    assert compute_advantages(rule, values, ids, "batch_mean")[2] == pytest.approx(
        centred / np.std(values) if scaled else centred, rel=1e-4
    )


def test_a_batch_of_one_sample_has_no_batch_mean() -> None:
    with pytest.raises(UserError, match="only sample of the batch"):
        compute_advantages("group_norm", [1.0], ["a"], "batch_mean")
    assert compute_advantages("group_norm", [1.0], ["a"], "reward")[0] == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(UserError, match="group b is"):
        compute_advantages("group_norm", [0.0, 1.0, bad, 1.0], ["a", "a", "b", "b"], "error")


def test_rewards_are_scaled_shifted_and_penalised() -> None:
    plain = resolve_algorithm(AlgorithmSection(reward_scale=2.0, reward_shift=-0.5), max_staleness=0, minibatches=1, has_reference=False)
    np.testing.assert_allclose(shape_rewards([1.0, 0.0], plain), [1.0, -1.0])
    section = AlgorithmSection.model_validate({"kl": {"coef": 0.1, "where": "reward", "estimator": "k1"}})
    penalised = resolve_algorithm(section, max_staleness=0, minibatches=1, has_reference=True)
    np.testing.assert_allclose(shape_rewards([1.0, 0.0], penalised, np.array([2.0, -1.0])), [0.8, 0.1])
    with pytest.raises(AssertionError):
        shape_rewards([1.0], penalised)


# --- several turns of one member


@st.composite
def conversations(draw: st.DrawFn) -> tuple[np.ndarray, list[str], list[int]]:
    """Groups whose members have one to four turns: member rewards, group ids and members, one entry per member."""
    values, ids = draw(batches())
    return values, ids, draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))


@pytest.mark.parametrize("rule", RULES)
@given(batch=conversations())
def test_a_member_counts_once_however_many_turns_it_has(rule: str, batch: tuple[np.ndarray, list[str], list[int]]) -> None:
    """Turns that carry their member's reward get the advantage that the member has among members."""
    values, ids, turns = batch
    members = list(range(len(ids)))
    whole = compute_advantages(rule, values, ids, "error", members)
    assert (whole == compute_advantages(rule, values, ids, "error")).all()
    spread = [i for i, n in enumerate(turns) for _ in range(n)]
    got = compute_advantages(rule, values[spread], [ids[i] for i in spread], "error", [members[i] for i in spread])
    np.testing.assert_allclose(got, whole[spread], rtol=1e-3, atol=1e-4)


def test_turns_with_rewards_of_their_own_are_measured_against_the_mean_of_members() -> None:
    rewards_s, ids, members = [1.0, 0.0, 0.0, 2.0], ["g"] * 4, [0, 0, 0, 1]  # member means 1/3 and 2
    mean = (1 / 3 + 2) / 2
    got = compute_advantages("group_mean", rewards_s, ids, "error", members)
    np.testing.assert_allclose(got, np.array(rewards_s) - mean, rtol=1e-6)
    others = compute_advantages("leave_one_out", rewards_s, ids, "error", members)
    np.testing.assert_allclose(others, [1 - 2, -2, -2, 2 - 1 / 3], rtol=1e-6)
    std = np.sqrt(np.average((np.array(rewards_s) - mean) ** 2, weights=[1 / 3, 1 / 3, 1 / 3, 1]))
    np.testing.assert_allclose(
        compute_advantages("group_norm", rewards_s, ids, "error", members), (np.array(rewards_s) - mean) / std, rtol=1e-4
    )


def test_several_turns_of_one_member_are_no_group() -> None:
    with pytest.raises(UserError, match="group g has one sample"):
        compute_advantages("group_norm", [1.0, 0.0], ["g", "g"], "error", [3, 3])
    assert compute_advantages("group_norm", [1.0, 0.5], ["g", "g"], "reward", [3, 3]).tolist() == [1.0, 0.5]
