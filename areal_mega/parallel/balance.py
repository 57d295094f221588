"""Balance samples over data-parallel ranks and pack them into micro-batches under a token budget. Pure.

Invariants, each with a test:

1. every sample stands in exactly one micro-batch of exactly one rank;
2. all ranks have the same number of micro-batches (some may be empty: the engine runs those on a dummy token of weight zero);
3. no micro-batch exceeds the token budget, with every sample padded to a multiple of ``sequence_multiple`` (context parallelism cuts each
   into 2·cp equal chunks, and a sample may be of one token);
4. the number of micro-batches is a multiple of ``multiple_of`` (interleaved pipelines need the pipeline size);
5. the result depends on lengths and their order only, so that every process that computes it gets the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from areal_mega.core.errors import UserError

Microbatches = tuple[tuple[int, ...], ...]
"""Sample indices of each micro-batch of one rank."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative cost of one packed sequence of n tokens: ``n + attention * n²``.

    ``attention`` is the ratio of causal attention's FLOPs per token pair to the linear layers' FLOPs per token,
    ``hidden_per_layer · layers · 2 / (2 · active parameters)``; 0 balances tokens alone.
    """

    attention: float = 0.0

    def __call__(self, length: int) -> float:
        return length + self.attention * length * length


def split_balanced(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Longest-processing-time assignment of items to ``parts`` bins; each bin lists its items in ascending order."""
    bins: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(heap)
        bins[part].append(item)
        heapq.heappush(heap, (load + costs[item], part))
    return [sorted(items) for items in bins]


def split_even(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Assign items to ``parts`` bins of equal size (one apart where they do not divide), as balanced in cost as that allows: items are
    dealt in rounds from the most costly down, in each round the most costly one to the bin with the least."""
    bins: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for start in range(0, len(order), parts):
        for item, part in zip(order[start : start + parts], sorted(range(parts), key=lambda p: (loads[p], p)), strict=False):
            bins[part].append(item)
            loads[part] += costs[item]
    return [sorted(items) for items in bins]


def _fill(indices: Sequence[int], lengths: Sequence[int], cost: CostModel, count: int, max_tokens: int) -> Microbatches | None:
    """Spread ``indices`` over ``count`` micro-batches, the least costly with room first; None if they do not fit."""
    loads, tokens = [0.0] * count, [0] * count
    out: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        room = [m for m in range(count) if tokens[m] + lengths[i] <= max_tokens]
        if not room:
            return None
        m = min(room, key=lambda m: (loads[m], m))
        out[m].append(i)
        loads[m] += cost(lengths[i])
        tokens[m] += lengths[i]
    return tuple(tuple(sorted(items)) for items in out)


def plan_microbatches(
    lengths: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    cost: CostModel | None = None,
    multiple_of: int = 1,
    sequence_multiple: int = 1,
) -> list[Microbatches]:
    """Plan one optimizer update.

    Args:
        lengths: tokens of each sample.
        ranks: data-parallel size.
        max_tokens: token budget of one micro-batch.
        cost: relative cost of a sequence.
        multiple_of: the number of micro-batches is a multiple of this.
        sequence_multiple: each sample's place is a multiple of this.

    Returns:
        For each data-parallel rank its micro-batches, each a tuple of indices into ``lengths``.

    Raises:
        UserError: a sample is longer than the budget.
    """
    cost = cost or CostModel()
    longest = max(lengths, default=0)
    lengths = [-(-n // sequence_multiple) * sequence_multiple for n in lengths]
    needed = max(lengths, default=0)
    if needed > max_tokens:
        padded = f" (padded to {needed} for context parallelism)" if needed > longest else ""
        raise UserError(
            f"a sample of {longest} tokens{padded} exceeds train.microbatch_tokens={max_tokens}; set it to at least {needed} "
            "(data.max_prompt_tokens + rollout.max_new_tokens bounds it)"
        )
    shares = split_balanced([cost(n) for n in lengths], ranks)
    most = max((sum(lengths[i] for i in share) for share in shares), default=0)
    count = max(1, -(-most // max_tokens))
    while True:
        count = -(-count // multiple_of) * multiple_of
        plans = [_fill(share, lengths, cost, count, max_tokens) for share in shares]
        if all(plan is not None for plan in plans):
            return [plan for plan in plans if plan is not None]
        count += 1
