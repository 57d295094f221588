"""Which rank of a layout holds which shard of which parameter. Pure: no process group, no weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areal_mega.core.errors import UserError
from areal_mega.models.table import Param, Table
from areal_mega.parallel.layout import RankCoords, RankLayout


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` of a parameter."""

    param: Param
    size: int
    rank: int


def layer_stages(num_layers: int, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Pipeline stage of every global layer, as Megatron-Core deals layers out (interleaved where ``vpp`` > 1).

    Raises:
        UserError: when the layers do not divide.
    """
    if num_layers % (pp * vpp):
        legal = [n for n in range(1, num_layers + 1) if num_layers % (n * vpp) == 0]
        product = f"pipeline parallelism {pp}" + (f" x {vpp} virtual stages" if vpp > 1 else "")
        raise UserError(
            f"the model has {num_layers} layers, which do not divide by {product}; "
            + (f"pipeline parallelism of {', '.join(map(str, legal))} would" if legal else "use fewer virtual stages")
        )
    per_chunk = num_layers // (pp * vpp)
    return tuple(layer // per_chunk % pp for layer in range(num_layers))


class Ownership:
    """A table laid out over ranks.

    Raises:
        UserError: where layers or experts do not divide over the layout.
    """

    def __init__(self, table: Table, layout: RankLayout) -> None:
        self.table, self.layout = table, layout
        strategy = layout.strategy
        self._stages = layer_stages(table.num_layers, strategy.pp, strategy.vpp)
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
