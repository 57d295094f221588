"""The layout of ranks must be Megatron-Core's, for both views, or shards would be read by the wrong ranks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import ParallelStrategy

ORDER = "tp-cp-ep-dp-pp"
DIMS = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")


@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    sizes = {name: draw(st.integers(1, 3)) for name in ("tp", "cp", "dp", "pp")}
    per_stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = draw(st.sampled_from([n for n in range(1, per_stage + 1) if per_stage % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, per_stage // ep + 1) if (per_stage // ep) % n == 0]))
    return RankLayout(ParallelStrategy("megatron", **sizes, ep=ep, etp=etp))


def groups(layout: RankLayout, *free: str, view: tuple[str, ...]) -> list[list[int]]:
    """Groups of ranks that differ in the ``free`` coordinates of a view only, as Megatron forms them."""
    fixed = [name for name in view if name not in free]
    found: dict[tuple[int, ...], list[int]] = {}
    for c in layout:
        found.setdefault(tuple(getattr(c, name) for name in fixed), []).append(c.rank)
    return sorted(found.values())


@given(layouts())
@settings(deadline=None)
def test_groups_are_those_of_megatron_core(layout: RankLayout) -> None:
    from megatron.core.parallel_state import RankGenerator

    s = layout.strategy
    dense = RankGenerator(tp=s.tp, ep=1, dp=s.dp, pp=s.pp, cp=s.cp, order=ORDER)
    for token in ("tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp", "tp-cp-dp"):
        ours = groups(layout, *token.split("-"), view=("tp", "cp", "dp", "pp"))
        assert ours == sorted(dense.get_ranks(token)), token
    expert = RankGenerator(tp=s.etp, ep=s.ep, dp=s.edp, pp=s.pp, cp=1, order=ORDER)
    names = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
    for token in ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp"):
        ours = groups(layout, *(names[t] for t in token.split("-")), view=("etp", "ep", "edp", "pp"))
        assert ours == sorted(expert.get_ranks(token)), token


@given(layouts())
@settings(deadline=None)
def test_order_within_groups_is_that_of_megatron_core(layout: RankLayout) -> None:
    from megatron.core.parallel_state import RankGenerator

    s = layout.strategy
    dense = RankGenerator(tp=s.tp, ep=1, dp=s.dp, pp=s.pp, cp=s.cp, order=ORDER)
    expert = RankGenerator(tp=s.etp, ep=s.ep, dp=s.edp, pp=s.pp, cp=1, order=ORDER)
    for generator, token, name in [(dense, t, t) for t in ("tp", "cp", "dp", "pp")] + [
        (expert, "tp", "etp"),
        (expert, "ep", "ep"),
        (expert, "dp", "edp"),
    ]:
        for ranks in generator.get_ranks(token):
            assert [getattr(layout.coords(rank), name) for rank in ranks] == list(range(len(ranks)))


@given(layouts())
def test_coordinates_are_a_bijection_in_both_views(layout: RankLayout) -> None:
    s = layout.strategy
    for c in layout:
        assert c.rank == c.tp + s.tp * (c.cp + s.cp * (c.dp + s.dp * c.pp))
        assert c.rank == c.etp + s.etp * (c.ep + s.ep * (c.edp + s.edp * c.pp))
        assert layout.ranks(tp=c.tp, cp=c.cp, dp=c.dp, pp=c.pp) == (c.rank,)
        assert layout.ranks(etp=c.etp, ep=c.ep, edp=c.edp, pp=c.pp) == (c.rank,)
    assert layout.ranks() == tuple(range(layout.world_size))


@given(layouts(), st.sampled_from(DIMS))
def test_each_coordinate_partitions_the_ranks(layout: RankLayout, name: str) -> None:
    size = getattr(layout.strategy, name)
    parts = [layout.ranks(**{name: value}) for value in range(size)]
    assert {len(part) for part in parts} == {layout.world_size // size}
    assert sorted(rank for part in parts for rank in part) == list(range(layout.world_size))
