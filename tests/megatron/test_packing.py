"""Packing and unpacking, and the plans made from a packed layout: pure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.megatron.layers import group_by_length
from areal_mega.megatron.packing import lengthen, pack, unpack, unzigzag_index, zigzag_index

lengths_st = st.lists(st.integers(1, 40), min_size=0, max_size=8)


def samples_of(lengths: list[int]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(sum(lengths))
    return [
        {"input_ids": rng.integers(0, 99, n).astype(np.int32), "loss_mask": rng.random(n) > 0.5, "logprobs": rng.normal(size=n)}
        for n in lengths
    ]


@given(lengths_st, st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 8]))
def test_pack_and_unpack(lengths: list[int], tp: int, sequence_multiple: int) -> None:
    samples = samples_of(lengths)
    batch = pack(samples, list(range(10, 10 + len(lengths))), tp * sequence_multiple, sequence_multiple)
    total = len(batch.input_ids_t)
    assert total > 0 and total % (tp * sequence_multiple) == 0
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == total
    assert batch.num_tokens == sum(lengths)
    assert batch.sample_index == tuple(range(10, 10 + len(lengths)))
    sizes = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()
    assert all(size > 0 and size % sequence_multiple == 0 for size in sizes)
    assert batch.max_seqlen == max(sizes)
    assert len(sizes) - len(lengths) in (0, 1), "padding is one sequence at most"
    assert int(batch.padding_t.sum()) == total - sum(lengths)
    for name, array in batch.fields.items():
        assert not array[batch.padding_t].any()
        for sample, back in zip(samples, unpack(array, batch), strict=True):
            np.testing.assert_allclose(back, sample[name], rtol=1e-6)
    for sample, back in zip(samples, unpack(batch.input_ids_t, batch), strict=True):
        np.testing.assert_array_equal(back, sample["input_ids"])
    for i, size in enumerate(sizes):
        row = batch.sequence_t == i
        assert batch.position_ids_t[row].tolist() == list(range(size))


@given(lengths_st, st.sampled_from([1, 4, 8]), st.integers(0, 600))
def test_lengthening_adds_padding_and_nothing_else(lengths: list[int], sequence_multiple: int, extra: int) -> None:
    batch = pack(samples_of(lengths), list(range(len(lengths))), sequence_multiple, sequence_multiple)
    have, total = len(batch.input_ids_t), len(batch.input_ids_t) + extra * sequence_multiple
    longer = lengthen(batch, total, sequence_multiple)
    assert len(longer.input_ids_t) == len(longer.position_ids_t) == longer.cu_seqlens[-1] == total
    assert longer.cu_seqlens.dtype == torch.int32
    assert torch.equal(longer.input_ids_t[:have], batch.input_ids_t) and not longer.input_ids_t[have:].any()
    assert (longer.sample_index, longer.lengths) == (batch.sample_index, batch.lengths)
    assert torch.equal(longer.padding_t, torch.cat([batch.padding_t, torch.ones(total - have, dtype=torch.bool)]))
    sizes = (longer.cu_seqlens[1:] - longer.cu_seqlens[:-1]).tolist()
    assert sizes[: batch.num_sequences] == (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()
    assert all(size > 0 and size % sequence_multiple == 0 for size in sizes)
    assert longer.max_seqlen == max(sizes) <= max(batch.max_seqlen, 128)
    assert longer.position_ids_t.tolist() == [position for size in sizes for position in range(size)]
    for name, values in longer.fields.items():
        assert values.dtype == batch.fields[name].dtype
        assert torch.equal(values[:have], batch.fields[name]) and not values[have:].any()


def test_a_field_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"field 'logprobs' has shape \(3,\), the sample 4 tokens"):
        pack([{"input_ids": np.arange(4), "logprobs": np.zeros(3)}], [0])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([2, 4]))
def test_zigzag_splits_every_sequence_evenly(chunks: list[int], cp: int) -> None:
    lengths = [2 * cp * c for c in chunks]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    held = [zigzag_index(cu_seqlens, cp, r) for r in range(cp)]
    assert len({len(h) for h in held}) == 1
    values = torch.arange(sum(lengths)) * 3
    gathered = torch.cat([values[h] for h in held])
    assert torch.equal(gathered[unzigzag_index(cu_seqlens, cp)], values)
    # Causal work is balanced: positions add up to the same on every rank.
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1])
    work = [int((h - starts[h]).sum()) for h in held]
    assert len(set(work)) == 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_groups_waste_less_than_half(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert lengths[group[0]] == max(lengths[i] for i in group)
        assert 2 * min(lengths[i] for i in group) >= lengths[group[0]]
    assert len(groups) <= 10
