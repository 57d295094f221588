"""What is left out on one rank is what would have changed nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from torch import Tensor

from areal_mega.megatron import alone


class Called(Exception):
    pass


def called(*args: Any, **kwargs: Any) -> Any:
    raise Called


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 0, 2, 1]])
def test_chunks_are_sorted_as_by_megatron_core(order: list[int]) -> None:
    tokens, probs, sizes = torch.randn(11, 3), torch.rand(11), torch.tensor([4, 0, 5, 2])
    expected = sort_chunks_by_idxs(tokens, sizes, torch.tensor(order), probs=probs)
    found = alone.sort_chunks(sort_chunks_by_idxs)(tokens, sizes, torch.tensor(order), probs=probs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_chunks_in_order_are_not_copied() -> None:
    tokens = torch.randn(5, 3)
    assert alone.sort_chunks(called)(tokens, torch.tensor([3, 2]), torch.arange(2))[0] is tokens


def test_one_rank_gathers_nothing_from_itself() -> None:
    whole, group = torch.randn(6), SimpleNamespace(size=lambda: 1)
    assert alone.collective(called)(whole, whole[:], group=group) is None


@pytest.mark.parametrize(
    ("ranks", "start", "end", "async_op"),
    [(2, 0, 6, False), (1, 0, 3, False), (1, 6, 12, False), (1, 0, 6, True)],
    ids=["two ranks", "a part", "other memory", "a handle is waited for"],
)
def test_a_collective_with_something_to_do_runs(ranks: int, start: int, end: int, async_op: bool) -> None:
    memory: Tensor = torch.randn(12)
    with pytest.raises(Called):
        alone.collective(called)(memory[:6], memory[start:end], group=SimpleNamespace(size=lambda: ranks), async_op=async_op)
