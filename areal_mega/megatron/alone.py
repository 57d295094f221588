"""What Megatron-Core does between ranks, where there is but one: copies of a whole model, or of all tokens, onto themselves.

Each function here takes Megatron-Core's own and returns one that calls it wherever it has something to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def collective(plain: Callable[..., Any]) -> Callable[..., Any]:
    """An all-gather or a reduce-scatter of sums ``(output, input, *, group, ...)``, nothing where the one rank's share is the whole.

    gloo copies the input and then the output: the distributed optimizer would copy all parameters and all gradients, each twice, in
    every update.
    """

    def run(output: Tensor, input: Tensor, *args: Any, group: Any, async_op: bool = False, **kwargs: Any) -> Any:
        is_itself = output.data_ptr() == input.data_ptr() and output.numel() == input.numel()
        if group.size() == 1 and is_itself and not async_op:  # who overlaps waits for a handle
            return None
        return plain(output, input, *args, group=group, async_op=async_op, **kwargs)

    return run


def sort_chunks(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``sort_chunks_by_idxs``, nothing where the chunks are in order: tokens of one rank have been sorted by expert when it was asked."""

    def run(input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False) -> Any:
        order = sorted_idxs.tolist()
        if order == sorted(order):
            return input, probs
        return plain(input, split_sizes, sorted_idxs, probs=probs, fused=fused)

    return run
