"""The meter attributes tokens and time to the number of sequences that ran."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.rollout.lengths import histogram, length_bin, mean_length
from areal_mega.rollout.meter import DecodeMeter


def test_members_end_before_the_request_is_answered() -> None:
    meter = DecodeMeter()
    request = meter.started(10.0)
    meter.ended(request, 14.0, [40, 20])  # ten tokens a second each; one alone from 12 on
    assert meter.take() == ({2: 40, 1: 20}, {2: 2000, 1: 2000})
    assert meter.take() == ({}, {})


def test_what_ran_beside_a_request_under_way_is_counted_when_that_has_ended() -> None:
    meter = DecodeMeter()
    first, second = meter.started(0.0), meter.started(1.0)
    meter.ended(second, 2.0, [10])
    assert meter.take() == ({}, {})
    meter.ended(first, 3.0, [30])
    assert meter.take() == ({1: 20, 2: 20}, {1: 2000, 2: 1000})


def test_a_failed_request_leaves_nothing() -> None:
    meter = DecodeMeter()
    meter.ended(meter.started(0.0), 2.0, [])
    assert meter.take() == ({}, {})


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20), st.lists(st.integers(1, 500), min_size=1, max_size=4)), max_size=20))
def test_no_token_is_lost(requests: list[tuple[float, float, list[int]]]) -> None:
    meter = DecodeMeter()
    numbers = [meter.started(start) for start, _, _ in requests]
    for number, (start, seconds, lengths) in zip(numbers, requests, strict=True):
        meter.ended(number, start + seconds, lengths)
    tokens, ms = meter.take()
    assert sum(tokens.values()) == pytest.approx(sum(sum(lengths) for *_, lengths in requests), abs=0.01 * sum(tokens.values()) + 40)
    assert tokens.keys() == ms.keys() and all(n >= 1 for n in tokens)


@given(st.integers(1, 1_000_000))
def test_bins_are_narrow(length: int) -> None:
    edge = length_bin(length)
    assert edge <= length < edge + max(1, edge / 16) + 1e-9
    assert length_bin(edge) == edge


@given(st.lists(st.integers(1, 50_000), min_size=1))
def test_a_histogram_keeps_the_mean_within_a_few_percent(lengths: list[int]) -> None:
    mean = mean_length(histogram(lengths))
    assert mean == pytest.approx(sum(lengths) / len(lengths), rel=0.035)
