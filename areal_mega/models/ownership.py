"""Which rank of a layout holds which shard of which parameter. Pure: no process group, no weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from areal_mega.core.errors import UserError
from areal_mega.models.table import Param, Table
from areal_mega.parallel.layout import RankCoords, RankLayout
from areal_mega.parallel.strategy import ParallelStrategy, even_layers


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` of a parameter."""

    param: Param
    size: int
    rank: int


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the model that one rank gathers: ``root`` gets the parameters with these HuggingFace names from ``ranks``, itself one of
    them."""

    root: int
    ranks: tuple[int, ...]
    names: frozenset[str]


def stage_layers(num_layers: int, strategy: ParallelStrategy) -> tuple[int, ...]:
    """Layers of each virtual pipeline stage, in the order of the layers: as the strategy says, or the same number each.

    Raises:
        UserError: when the counts do not add up to the layers, or there are none and the layers do not divide.
    """
    given, stages = strategy.stage_layers, strategy.pp * strategy.vpp
    if given:
        if sum(given) != num_layers:
            total = " + ".join(map(str, given))
            raise UserError(
                f"strategy {strategy} has {total} = {sum(given)} layers, but the model has {num_layers}; {_remedy(num_layers, strategy)}"
            )
        return given
    if num_layers % stages:
        product = f"pipeline parallelism {strategy.pp}" + (f" x {strategy.vpp} virtual stages" if strategy.vpp > 1 else "")
        raise UserError(
            f"the model has {num_layers} layers, which do not divide by {product}: {num_layers}/{stages} is not a whole number; "
            + _remedy(num_layers, strategy)
        )
    return (num_layers // stages,) * stages


def _remedy(num_layers: int, strategy: ParallelStrategy) -> str:
    """A strategy with counts that add up; another pipeline where there are fewer layers than stages."""
    stages = strategy.pp * strategy.vpp
    if stages <= num_layers:
        return f"give the layers of each stage, for example {replace(strategy, stage_layers=even_layers(num_layers, stages))}"
    legal = [n for n in range(1, num_layers + 1) if num_layers % (n * strategy.vpp) == 0]
    return f"use pipeline parallelism of {' or '.join(map(str, legal))}" if legal else "use fewer virtual stages"


def layer_stages(num_layers: int, strategy: ParallelStrategy) -> tuple[int, ...]:
    """Pipeline stage of every global layer, as Megatron-Core deals layers out (interleaved where there are virtual stages).

    Raises:
        UserError: as ``stage_layers``.
    """
    counts = stage_layers(num_layers, strategy)
    return tuple(virtual % strategy.pp for virtual, count in enumerate(counts) for _ in range(count))


class Ownership:
    """A table laid out over ranks.

    Raises:
        UserError: where layers or experts do not divide over the layout.
    """

    def __init__(self, table: Table, layout: RankLayout) -> None:
        self.table, self.layout = table, layout
        strategy = layout.strategy
        self._stages = layer_stages(table.num_layers, strategy)
        experts = table.num_experts
        if experts % strategy.ep:
            legal = [n for n in range(1, experts + 1) if experts % n == 0]
            raise UserError(
                f"the model has {experts} experts, which do not divide by expert parallelism {strategy.ep}; "
                f"{', '.join(map(str, legal))} would"
            )
        if strategy.ep * strategy.etp > 1 and not experts:
            raise UserError(f"strategy {strategy} has expert parallelism, but the model has no experts; remove e and the ffn part")
        self._experts_per_rank = experts // strategy.ep
        self._holders: dict[tuple[tuple[str, int], ...], tuple[int, ...]] = {}
        # The tied output layer is a parameter of its own only where the embedding lives in another stage.
        self._params = tuple(p for p in table.params if not (p.copy and strategy.pp == 1))

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters that exist somewhere in this layout."""
        return self._params

    def stage(self, param: Param) -> int:
        if param.layer is not None:
            return self._stages[param.layer]
        return 0 if param.stage == "first" else self.layout.strategy.pp - 1

    def parts(self, param: Param) -> int:
        """Tensor-parallel size that the parameter is split by."""
        return self.layout.strategy.tp if param.expert is None else self.layout.strategy.etp

    def part_of(self, param: Param, coords: RankCoords) -> int | None:
        """Which part a rank holds; None where it holds none."""
        if coords.pp != self.stage(param):
            return None
        if param.expert is None:
            return coords.tp
        return coords.etp if coords.ep == param.expert // self._experts_per_rank else None

    def shards(self, rank: int) -> Iterator[Shard]:
        """Everything that a rank's model consists of, in table order."""
        coords = self.layout.coords(rank)
        for param in self._params:
            part = self.part_of(param, coords)
            if part is not None:
                yield Shard(param, self.parts(param), part)

    def holders(self, param: Param, part: int) -> tuple[int, ...]:
        """All ranks that hold a part, ascending; replicated parameters are held by every tensor-parallel rank."""
        where = {"pp": self.stage(param)}
        if param.expert is not None:
            where["ep"] = param.expert // self._experts_per_rank
        if not param.mapping.replicated:
            where["tp" if param.expert is None else "etp"] = part
        key = tuple(where.items())
        if key not in self._holders:
            self._holders[key] = self.layout.ranks(**where)
        return self._holders[key]

    def sources(self, param: Param) -> int:
        """Parts that together are the whole parameter: one where it is replicated."""
        return 1 if param.mapping.replicated else self.parts(param)
