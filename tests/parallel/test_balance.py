"""Every invariant of balancing, over any lengths, ranks and budgets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.core.errors import UserError
from areal_mega.parallel.balance import CostModel, plan_microbatches, split_balanced, split_even

lengths = st.lists(st.integers(1, 60), min_size=0, max_size=40)
costs = st.lists(st.floats(0.0, 1e6), max_size=40)
models = st.sampled_from([CostModel(), CostModel(0.05), CostModel(3.0)])


def covered(plans: list[tuple[tuple[int, ...], ...]]) -> Counter[int]:
    return Counter(i for rank in plans for micro in rank for i in micro)


@given(lengths, st.integers(1, 6), st.integers(64, 200), models, st.integers(1, 4), st.sampled_from([1, 4, 8, 16]))
def test_micro_batches(lengths: list[int], ranks: int, max_tokens: int, cost: CostModel, multiple_of: int, unit: int) -> None:
    settings: dict[str, Any] = {"ranks": ranks, "max_tokens": max_tokens, "multiple_of": multiple_of, "sequence_multiple": unit}
    plans = plan_microbatches(lengths, cost=cost, **settings)
    assert len(plans) == ranks
    assert covered(plans) == Counter(range(len(lengths)))  # each sample once, and nothing else
    counts = {len(rank) for rank in plans}
    assert len(counts) == 1
    assert counts.pop() % multiple_of == 0
    assert all(sum(-(-lengths[i] // unit) * unit for i in micro) <= max_tokens for rank in plans for micro in rank)
    again = plan_microbatches(tuple(lengths), cost=CostModel(cost.attention), **settings)
    assert plans == again


@given(lengths, st.integers(1, 6), st.integers(60, 200))
def test_no_more_micro_batches_than_needed(lengths: list[int], ranks: int, max_tokens: int) -> None:
    """Twice the fewest that could hold a rank's tokens, at most: two half-empty ones would have been one."""
    plans = plan_microbatches(lengths, ranks=ranks, max_tokens=max_tokens)
    most = max(sum(lengths[i] for micro in rank for i in micro) for rank in plans)
    assert len(plans[0]) <= max(1, 2 * -(-most // max_tokens))


@given(lengths.filter(bool), st.integers(1, 6), models)
def test_every_rank_works_where_samples_suffice(lengths: list[int], ranks: int, cost: CostModel) -> None:
    plans = plan_microbatches(lengths, ranks=ranks, max_tokens=sum(lengths), cost=cost)
    busy = sum(any(rank) for rank in plans)
    assert busy == min(ranks, len(lengths))


@given(costs, st.integers(1, 6))
def test_balanced_split(costs: list[float], parts: int) -> None:
    bins = split_balanced(costs, parts)
    assert len(bins) == parts
    assert sorted(i for items in bins for i in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in bins)
    loads = [sum(costs[i] for i in items) for items in bins]
    # Whoever got an item had the least at that moment: no bin is above the mean by more than its own costliest item.
    assert max(loads) <= sum(costs) / parts + max(costs, default=0.0) + 1e-6 * sum(costs)


@given(costs, st.integers(1, 6))
def test_even_split(costs: list[float], parts: int) -> None:
    bins = split_even(costs, parts)
    assert len(bins) == parts
    assert sorted(i for items in bins for i in items) == list(range(len(costs)))
    sizes = [len(items) for items in bins]
    assert max(sizes) - min(sizes) <= 1
    loads = [sum(costs[i] for i in items) for items in bins]
    if len(costs) % parts == 0:
        assert max(loads) - min(loads) <= max(costs, default=0.0) + 1e-6 * sum(costs)


def test_attention_makes_one_long_sequence_dearer_than_two_halves() -> None:
    assert CostModel()(100) == 2 * CostModel()(50)
    assert CostModel(0.1)(100) > 2 * CostModel(0.1)(50)
    # 1 of 40 against 4 of 10: equal in tokens, and unequal once attention counts.
    plans = plan_microbatches([40, 10, 10, 10, 10, 10], ranks=2, max_tokens=100, cost=CostModel(1.0))
    assert [sorted(i for micro in rank for i in micro) for rank in plans] == [[0], [1, 2, 3, 4, 5]]


def test_a_sample_beyond_the_budget_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"a sample of 11 tokens exceeds train\.microbatch_tokens=10; set it to at least 11") as caught:
        plan_microbatches([3, 11], ranks=1, max_tokens=10)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"of 9 tokens \(padded to 12 for context parallelism\) exceeds .*=10; set it to at least 12"):
        plan_microbatches([3, 9], ranks=1, max_tokens=10, sequence_multiple=4)


def test_nothing_to_train_is_one_empty_micro_batch_each() -> None:
    assert plan_microbatches([], ranks=2, max_tokens=10) == [((),), ((),)]
    assert plan_microbatches([], ranks=1, max_tokens=10, multiple_of=4) == [((), (), (), ())]
