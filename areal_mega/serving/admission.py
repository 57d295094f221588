"""Which waiting sequences start in a step. Pure: knows sizes, keys and limits, nothing of tensors.

Invariants, each with a test: nobody overtakes within a key; limits of rows and tokens hold; at most one pick is partial, and it is the
last; equal contexts are computed once; the head of the queue is never starved by what stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence: ``length`` tokens of context, equal ``key`` for equal prompts, equal ``context`` for equal contexts.

    ``stored`` first tokens of it are kept from sequences that have ended.
    """

    length: int
    key: bytes
    context: bytes
    prompt_length: int
    stored: int = 0


@dataclass(frozen=True, slots=True)
class Pick:
    """``index`` into the candidates; ``cached`` positions come from the row of a live sequence, of the ``leader`` pick, or from the store.

    A follower (``leader`` not None) has the whole context of an earlier pick of the same step and computes nothing.
    """

    index: int
    cached: int
    count: int
    leader: int | None = None


def admit(
    candidates: Iterable[Candidate],
    *,
    budget: int,
    fits: Callable[[int, int], bool],
    shared: Callable[[bytes], int],
) -> list[Pick]:
    """Choose in queue order.

    Args:
        candidates: the queue's head; read only as far as anything fits.
        budget: tokens that may be computed.
        fits: whether so many more rows, the longest of them so long, can be added.
        shared: cached positions that a live row offers for a prompt key; 0 if none.
    """
    picks: list[Pick] = []
    leaders: dict[bytes, int] = {}
    computing: set[bytes] = set()
    longest = 0
    for index, candidate in enumerate(candidates):
        longest = max(longest, candidate.length + 1)
        if not fits(len(picks) + 1, longest):
            break
        leader = leaders.get(candidate.context)
        if leader is not None:
            picks.append(Pick(index, candidate.length, 0, leader))
            continue
        cached = min(max(min(shared(candidate.key), candidate.prompt_length), candidate.stored), candidate.length - 1)
        if candidate.key in computing and cached < max(1, min(candidate.prompt_length, candidate.length - 1)):
            continue  # its prompt is being computed in this step; the next step copies it
        if budget <= 0:
            break
        count = min(candidate.length - cached, budget)
        picks.append(Pick(index, cached, count))
        budget -= count
        if cached + count < candidate.length:
            break
        leaders[candidate.context] = len(picks) - 1
        computing.add(candidate.key)
    return picks
