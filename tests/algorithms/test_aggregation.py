"""Weights per token with one global denominator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.algorithms.aggregation import sample_weights

counts = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(lambda c: sum(c) > 0)


@given(tokens=counts, data=st.data())
def test_token_and_sequence_means_sum_to_one(tokens: list[int], data: st.DataObject) -> None:
    n = np.array(tokens)
    for rule in ("token_mean", "sequence_mean"):
        weights = sample_weights(rule, n)
        assert (weights * n).sum() == pytest.approx(1.0)
        order = np.array(data.draw(st.permutations(range(len(n)))))
        np.testing.assert_array_equal(sample_weights(rule, n[order]), weights[order])
    per_sample = sample_weights("sequence_mean", n) * n
    np.testing.assert_allclose(per_sample[n > 0], 1 / (n > 0).sum())


@given(tokens=counts, length=st.integers(1, 100))
def test_fixed_length_ignores_the_lengths(tokens: list[int], length: int) -> None:
    weights = sample_weights("fixed_length", tokens, length)
    trained = np.array(tokens) > 0
    np.testing.assert_allclose(weights[trained], 1 / (trained.sum() * length))
    assert (weights[~trained] == 0).all()


def test_a_sample_masked_whole_neither_pushes_nor_dilutes() -> None:
    for rule, length in (("token_mean", None), ("sequence_mean", None), ("fixed_length", 8)):
        with_masked = sample_weights(rule, [3, 0, 5], length)
        np.testing.assert_array_equal(with_masked[[0, 2]], sample_weights(rule, [3, 5], length))
        assert with_masked[1] == 0


def test_nothing_trained_means_no_weight_at_all() -> None:
    assert (sample_weights("token_mean", [0, 0]) == 0).all()


def test_the_length_is_given_exactly_where_it_is_used() -> None:
    with pytest.raises(AssertionError):
        sample_weights("token_mean", [1], 8)
    with pytest.raises(AssertionError):
        sample_weights("fixed_length", [1])
