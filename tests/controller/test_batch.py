"""From groups to work orders: every sample once, weights as the aggregation says, whatever the split."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import group

from areal_mega.algorithms.registry import Algorithm, resolve_algorithm
from areal_mega.config.schema import AlgorithmSection
from areal_mega.controller.batch import StepBatch, batch_metrics, loss_scalars, plan_step, trained_tokens, work_order
from areal_mega.core.metrics import results
from areal_mega.core.types import Group
from areal_mega.parallel.balance import CostModel
from areal_mega.rollout.staleness import apply_bound_to_groups, oldest_allowed

BUDGET = 200
AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")

members = st.fixed_dictionaries(
    {
        "versions": st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1, max_size=3),
        "reward": st.sampled_from([0.0, 0.5, 1.0]),
        "finish_reason": st.sampled_from(["stop", "length"]),
    }
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Group], int]:
    """Ragged groups, and a number of minibatches that they can make."""
    groups = [group(f"g{i}", draw(st.lists(members, min_size=1, max_size=5))) for i in range(draw(st.integers(1, 8)))]
    return groups, draw(st.integers(1, len(groups)))


def algorithm(**changes: Any) -> Algorithm:
    section = AlgorithmSection(correction="decoupled", singleton="reward", **changes)
    return resolve_algorithm(section, max_staleness=1, minibatches=1, has_reference="kl" in changes)


def planned(groups: list[Group], minibatches: int = 1, dp: int = 1, **changes: Any) -> StepBatch:
    settings = {"min_version": 0, "mask_truncated": False, "microbatch_tokens": BUDGET, **changes}
    return plan_step(groups, dp=dp, minibatches=minibatches, **settings)


@given(batches(), st.integers(1, 5), st.sampled_from([0.0, 0.1]), st.integers(1, 3))
def test_every_sample_is_planned_once_and_groups_stay_whole(
    batch: tuple[list[Group], int], dp: int, attention: float, multiple_of: int
) -> None:
    groups, minibatches = batch
    plan = planned(groups, minibatches, dp, cost=CostModel(attention), multiple_of=multiple_of)
    assert plan.samples == tuple(s for g in groups for s in g.samples)
    assert len(plan.minibatches) == minibatches
    assert Counter(i for mb in plan.minibatches for i in mb.samples) == Counter(range(len(plan.samples)))
    for mb in plan.minibatches:
        assert Counter(i for rank in mb.ranks for micro in rank for i in micro) == Counter(mb.samples)
        assert len({len(rank) for rank in mb.ranks}) == 1  # all ranks run the same number of micro-batches
        assert all(sum(plan.samples[i].length for i in micro) <= BUDGET for rank in mb.ranks for micro in rank)
    home = {i: number for number, mb in enumerate(plan.minibatches) for i in mb.samples}
    for g in groups:
        assert len({home[i] for i, s in enumerate(plan.samples) if s.id.group_id == g.id}) == 1
    sizes = Counter(home[i] for g in groups for i, s in enumerate(plan.samples) if s is g.samples[0])
    assert max(sizes.values()) - min(sizes.values()) <= 1  # equally many groups to an update
    assert sorted(i for rank in range(dp) for i in plan.rank_samples(rank)) == list(range(len(plan.samples)))


@given(batches(), st.integers(1, 4), st.sampled_from(AGGREGATIONS), st.booleans())
def test_weights_sum_as_the_aggregation_says(batch: tuple[list[Group], int], dp: int, aggregation: str, mask: bool) -> None:
    groups, minibatches = batch
    plan = planned(groups, minibatches, dp, mask_truncated=mask)
    _, weights = loss_scalars(plan, algorithm(aggregation=aggregation, mask_truncated=mask), fixed_length=16)
    assert weights.keys() == set(range(len(plan.samples)))
    for mb in plan.minibatches:
        tokens = {i: plan.trained_tokens[i] for i in mb.samples}
        trained = [i for i in mb.samples if tokens[i]]
        total = math.fsum(weights[i] * tokens[i] for i in mb.samples)
        if not trained:
            assert total == 0.0
        elif aggregation == "fixed_length":
            assert total == pytest.approx(sum(tokens.values()) / (16 * len(trained)))
        else:
            assert total == pytest.approx(1.0)
        if aggregation == "sequence_mean":
            assert all(weights[i] * tokens[i] == pytest.approx(1 / len(trained)) for i in trained)
        if aggregation == "token_mean" and trained:
            assert len({weights[i] for i in trained}) == 1
        assert all(weights[i] == 0.0 for i in mb.samples if not tokens[i])


@given(batches(), st.sampled_from(AGGREGATIONS))
def test_no_split_changes_advantages_or_the_weights_of_one_update(batch: tuple[list[Group], int], aggregation: str) -> None:
    groups, minibatches = batch
    chosen = algorithm(aggregation=aggregation)
    plain = loss_scalars(planned(groups), chosen, fixed_length=16)
    for dp, budget in ((2, BUDGET), (3, 60)):
        assert loss_scalars(planned(groups, dp=dp, microbatch_tokens=budget), chosen, fixed_length=16) == plain
    # Minibatches are updates of their own, with denominators of their own; advantages are still over the whole batch.
    assert loss_scalars(planned(groups, minibatches), chosen, fixed_length=16)[0] == plain[0]


@given(batches())
def test_advantages_are_of_groups_and_sum_to_zero(batch: tuple[list[Group], int]) -> None:
    groups, minibatches = batch
    plan = planned(groups, minibatches)
    advantages, _ = loss_scalars(plan, algorithm(), fixed_length=16)
    for g in groups:
        mine = [advantages[i] for i, s in enumerate(plan.samples) if s.id.group_id == g.id]
        rewards = [s.reward for s in g.samples]
        if len(mine) == 1:
            assert mine == rewards  # singleton: reward
        else:
            assert math.fsum(mine) == pytest.approx(0.0, abs=1e-4)
            assert all((a > 0) == (r > np.mean(rewards)) for a, r in zip(mine, rewards, strict=True) if max(rewards) > min(rewards))


def test_kl_in_the_reward_moves_advantages() -> None:
    groups = [group("g", [{"reward": 1.0}, {"reward": 1.0}])]
    kl = {"coef": 0.5, "where": "reward"}
    equal, _ = loss_scalars(planned(groups), algorithm(kl=kl), fixed_length=16, kl_s={0: 1.0, 1: 1.0})
    assert equal == {0: 0.0, 1: 0.0}
    moved, _ = loss_scalars(planned(groups), algorithm(kl=kl, advantage="group_mean"), fixed_length=16, kl_s={0: 0.0, 1: 2.0})
    assert moved == {0: 0.5, 1: -0.5}


def test_truncated_answers_leave_the_loss_and_not_the_advantages() -> None:
    groups = [group("g", [{"reward": 1.0}, {"reward": 0.0, "finish_reason": "length"}])]
    plan = planned(groups, mask_truncated=True)
    assert plan.trained_tokens == (2, 0)
    advantages, weights = loss_scalars(plan, algorithm(aggregation="token_mean", mask_truncated=True), fixed_length=16)
    assert advantages[0] == pytest.approx(1.0, abs=1e-4)
    assert weights == {0: 0.5, 1: 0.0}
    assert trained_tokens(plan.samples[1], mask_truncated=False) == 2


@given(batches(), st.integers(1, 4), st.integers(0, 3))
def test_orders_hold_what_their_rank_needs_and_count_only_fresh_tokens(batch: tuple[list[Group], int], dp: int, eta: int) -> None:
    groups, minibatches = batch
    version = 4
    kept = list(apply_bound_to_groups(groups, version, eta, "mask_token").groups)
    if len(kept) < minibatches:
        return
    plan = planned(kept, minibatches, dp, min_version=oldest_allowed(version, eta))
    original = {(s.id.group_id, s.id.member): s for g in groups for s in g.samples}
    for rank in range(dp):
        order = work_order(plan, rank, version)
        assert order["min_version"] == version - eta and order["version"] == version
        named = {i for minibatch in order["minibatches"] for micro in minibatch for i in micro}
        assert named == order["samples"].keys() == order["trained_tokens"].keys()
        assert len(order["minibatches"]) == minibatches
        for i, s in order["samples"].items():
            fresh = sum(v.tokens for v in original[s.id.group_id, s.id.member].versions if v.version >= version - eta)
            assert order["trained_tokens"][i] == fresh == s.loss_tokens


def test_metrics() -> None:
    groups = [
        group("a", [{"reward": 1.0, "versions": {1: 2, 2: 1}, "scores": {"parsed": 1.0}}, {"reward": 0.0, "versions": {2: 4}}]),
        group("b", [{"reward": 0.5, "versions": {2: 2}, "finish_reason": "length", "scores": {"parsed": 0.0}}] * 2),
    ]
    plan = planned(groups, mask_truncated=True)
    shown = results(batch_metrics(groups, plan, 2, {0: 9, 1: 2, 2: 1}, stale_tokens=1))
    assert shown["reward/mean"] == 0.5
    assert shown["reward/std"] == pytest.approx(np.std([1.0, 0.0, 0.5, 0.5]))
    assert (shown["reward/min"], shown["reward/max"], shown["batch/uniform_groups"]) == (0.0, 1.0, 0.5)
    assert (shown["batch/groups"], shown["batch/samples"], shown["batch/tokens"], shown["batch/trained_tokens"]) == (2, 4, 23, 7)
    assert (shown["batch/response_tokens"], shown["batch/truncated"]) == (11 / 4, 0.5)
    assert (shown["staleness/mean"], shown["staleness/max"], shown["staleness/stale_tokens"]) == (4 / 12, 2, 1)
    assert shown["staleness/trained_max"] == 1
    assert shown["reward/parsed"] == pytest.approx(1 / 3)  # over the samples that have the score


def test_a_score_named_like_a_metric_of_ours_stands_beside_it() -> None:
    groups = [group("a", [{"reward": 1.0, "scores": {"mean": 7.0, "format": 0.5}}])]
    shown = results(batch_metrics(groups, planned(groups), 0, {0: 2}, stale_tokens=0))
    assert (shown["reward/mean"], shown["reward/score/mean"], shown["reward/format"]) == (1.0, 7.0, 0.5)


def test_fewer_groups_than_minibatches_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="1 groups do not make 2 minibatches"):
        planned([group("g", [{}])], 2)
