"""The prompt stream: the right multiset of prompts, and a cursor that resumes anywhere as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.core.errors import UserError
from areal_mega.data.stream import PromptStream


def rows(n: int) -> list[dict[str, Any]]:
    return [{"id": f"row-{i}", "prompt": f"{i}", "answer": f"{i}"} for i in range(n)]


def stream(n: int, seed: int = 0, shuffle: bool = True) -> PromptStream:
    return PromptStream(rows(n), seed=seed, shuffle=shuffle)


def keys(prompts: list[Any]) -> list[tuple[str, int]]:
    return [(p.id, p.epoch) for p in prompts]


@given(n=st.integers(1, 20), takes=st.lists(st.integers(0, 13), max_size=20), seed=st.integers(0, 3), shuffle=st.booleans())
def test_every_row_once_per_epoch_whatever_the_batches(n: int, takes: list[int], seed: int, shuffle: bool) -> None:
    source = stream(n, seed, shuffle)
    batches = [source.next(take) for take in takes]
    assert [len(batch) for batch in batches] == takes, "a batch is never short"
    served = [key for batch in batches for key in keys(batch)]
    for epoch in range(len(served) // n):
        part = served[epoch * n : (epoch + 1) * n]
        assert Counter(part) == Counter((f"row-{i}", epoch) for i in range(n))


@settings(deadline=None)
@given(
    n=st.integers(1, 12),
    actions=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12),
    stop=st.integers(0, 11),
    shuffle=st.booleans(),
)
def test_resume_at_any_cursor_equals_the_uninterrupted_stream(n: int, actions: list[tuple[int, int]], stop: int, shuffle: bool) -> None:
    """Each action takes some prompts and puts some of the last ones back."""
    whole, first = stream(n, 1, shuffle), stream(n, 1, shuffle)

    def act(source: PromptStream, take: int, back: int) -> list[tuple[str, int]]:
        taken = source.next(take)
        source.put_back(taken[:back])
        return keys(taken)

    expected = [act(whole, *action) for action in actions]
    stop %= len(actions)
    got = [act(first, *action) for action in actions[:stop]]
    resumed = stream(n, 1, shuffle)
    resumed.restore(json.loads(json.dumps(first.state())))
    got += [act(resumed, *action) for action in actions[stop:]]
    assert got == expected
    assert keys(resumed.next(3 * n)) == keys(whole.next(3 * n))


@given(n=st.integers(2, 12), k=st.integers(1, 12))
def test_prompts_put_back_are_served_once_more_and_first(n: int, k: int) -> None:
    source = stream(n)
    taken = source.next(k)
    source.put_back(taken[::2])
    again = source.next(len(taken[::2]) + n)
    assert keys(again[: len(taken[::2])]) == keys(taken[::2])
    assert keys(again[len(taken[::2]) :]) == keys(stream(n).next(k + n)[k:])


def test_epochs_are_shuffled_apart_and_do_not_depend_on_the_order_of_the_file() -> None:
    source = stream(50)
    first, second = source.next(50), source.next(50)
    assert [p.id for p in first] != [p.id for p in second] != [p.id for p in rows_in_order()]
    assert keys(PromptStream(rows(50)[::-1], seed=0, shuffle=True).next(50)) == keys(first)
    assert keys(stream(50, seed=1).next(50)) != keys(first)


def rows_in_order() -> list[Any]:
    return PromptStream(rows(50), seed=0, shuffle=False).next(50)


def test_without_shuffling_the_order_is_the_files() -> None:
    assert [p.id for p in rows_in_order()] == [f"row-{i}" for i in range(50)]


@pytest.mark.parametrize("other", [stream(6), stream(5, seed=1), stream(5, shuffle=False)])
def test_a_cursor_into_other_data_is_refused(other: PromptStream) -> None:
    with pytest.raises(UserError, match="changed since the checkpoint"):
        stream(5).restore(other.state())


def test_a_cursor_into_data_with_other_rows_is_refused() -> None:
    changed = [*rows(4), {"id": "another", "prompt": "x", "answer": "x"}]
    with pytest.raises(UserError, match="dataset"):
        stream(5).restore(PromptStream(changed, seed=0, shuffle=True).state())
