"""Which train ranks send which weights, and from which ranks each of them gathers. Pure: every rank computes the same.

The ranks of a pipeline stage stand in *blocks*: the fewest neighbours among which every tensor-parallel group and every
expert-tensor-parallel group that has a rank there is complete. A block thus holds every tensor of its stage but experts whole, and of the
experts its own. The first blocks that together hold all experts send, each by its first rank, which gathers from its block alone; experts
never leave their block, and what all blocks hold is dealt out so that all send about equally many bytes. Other data-parallel replicas send
nothing: servers take one bucket at a time, so more senders than that gain nothing, and every sender is a communicator on every server.

Invariants, each with a test: every exported parameter is in exactly one share, and the share's ranks hold all of it; no rank is in two
shares; tensors that a server fuses are in one share; a stage has at most ``most`` shares.
"""

from __future__ import annotations

from itertools import pairwise
from math import lcm, prod

from areal_mega.models.ownership import Ownership, Share
from areal_mega.models.table import HFTensor, Param
from areal_mega.sync.plan import fused_groups


def shares(ownership: Ownership, most: int) -> tuple[Share, ...]:
    """The shares of all senders, ascending in their root; see the module's text.

    Args:
        most: shares of one pipeline stage. Where there are more blocks to send, neighbours are joined, which then gather experts from
            each other.
    """
    out: list[Share] = []
    groups = _groups(ownership)
    for stage in range(ownership.layout.strategy.pp):
        cells = _cells(ownership, stage, most)
        names: list[list[str]] = [[] for _ in cells]
        weight = [0] * len(cells)
        here = [group for group in groups if ownership.stage(group[0]) == stage]
        # What only some can send first, so that the rest evens it out.
        for group in sorted(here, key=lambda group: group[0].expert is None):
            able = [number for number, ranks in enumerate(cells) if all(_holds(ownership, param, ranks) for param in group)]
            assert able, f"no sender's ranks hold {group[0].hf[0].name}"
            to = min(able, key=lambda number: weight[number])
            names[to] += [hf.name for param in group for hf in param.hf]
            weight[to] += sum(prod(hf.shape) for param in group for hf in param.hf)
        out += [Share(ranks[0], ranks, frozenset(chosen)) for ranks, chosen in zip(cells, names, strict=True) if chosen]
    return tuple(out)


def share_of(rank: int, among: tuple[Share, ...]) -> Share:
    """The share that a rank takes part in; an empty one of its own where there is none."""
    return next((share for share in among if rank in share.ranks), Share(rank, (rank,), frozenset()))


def _cells(ownership: Ownership, stage: int, most: int) -> list[tuple[int, ...]]:
    """Ranks of each sender of a stage."""
    strategy = ownership.layout.strategy
    ranks = ownership.layout.ranks(pp=stage)
    size = lcm(strategy.tp, strategy.etp)
    experts = strategy.ep * strategy.etp if ownership.table.num_experts else 1
    blocks = -(-experts // size)
    cells = min(most, blocks)
    bounds = [blocks * number // cells * size for number in range(cells + 1)]
    return [ranks[start:end] for start, end in pairwise(bounds)]


def _holds(ownership: Ownership, param: Param, ranks: tuple[int, ...]) -> bool:
    return all(set(ownership.holders(param, part)) & set(ranks) for part in range(ownership.sources(param)))


def _groups(ownership: Ownership) -> list[list[Param]]:
    """Exported parameters in table order, those together whose tensors a server fuses."""
    tensors: list[HFTensor] = []
    owner: dict[str, Param] = {}
    for param in ownership.table.exported:
        tensors += param.hf
        owner |= {hf.name: param for hf in param.hf}
    out: list[list[Param]] = []
    for group in fused_groups(tensors):
        params = list({id(owner[hf.name]): owner[hf.name] for hf in group}.values())
        if out and out[-1][-1] is params[0]:  # a parameter of tensors that no server fuses
            params = out.pop() + params[1:]
        out.append(params)
    return out
