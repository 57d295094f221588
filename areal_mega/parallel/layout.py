"""Which coordinates each rank has, in Megatron-Core's default order ``tp-cp-ep-dp-pp``.

Dense view: ``rank = tp + TP*(cp + CP*(dp + DP*pp))``. Expert view of the same ranks: ``rank = etp + ETP*(ep + EP*(edp + EDP*pp))``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from areal_mega.parallel.strategy import ParallelStrategy


@dataclass(frozen=True, slots=True)
class RankCoords:
    """One rank's place in both views."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class RankLayout:
    """The ranks of one strategy. ``coords(rank)`` and ``ranks(tp=0, pp=1)`` are inverse to each other."""

    strategy: ParallelStrategy

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    def coords(self, rank: int) -> RankCoords:
        assert 0 <= rank < self.world_size, f"rank {rank} of a layout of {self.world_size}"
        s = self.strategy
        dense, tp = divmod(rank, s.tp)
        dense, cp = divmod(dense, s.cp)
        pp, dp = divmod(dense, s.dp)
        expert, etp = divmod(rank, s.etp)
        expert, ep = divmod(expert, s.ep)
        expert_pp, edp = divmod(expert, s.edp)
        assert pp == expert_pp, "both views share their pipeline stages"
        return RankCoords(rank=rank, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, edp=edp)

    @cached_property
    def _all(self) -> tuple[RankCoords, ...]:
        return tuple(self.coords(rank) for rank in range(self.world_size))

    def __iter__(self) -> Iterator[RankCoords]:
        return iter(self._all)

    def ranks(self, **fixed: int) -> tuple[int, ...]:
        """All ranks that have the given coordinates, ascending; all ranks where none is given."""
        assert fixed.keys() <= {"tp", "cp", "dp", "pp", "ep", "etp", "edp"}, f"not coordinates: {sorted(fixed)}"
        return tuple(c.rank for c in self._all if all(getattr(c, name) == value for name, value in fixed.items()))
