"""Megatron-Core's ShardedTensors through our strategies and functions, over real ranks, into another sharding."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from areal_mega.core.errors import UserError


def state_of(rank: int, world: int, *, fill: bool) -> dict[str, Any]:
    """A column-split, a row-split, a replicated, a stacked (prepended axis) and an uneven tensor, objects, and plain values."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory

    def part(whole: torch.Tensor, axis: int) -> torch.Tensor:
        piece = whole.chunk(world, axis)[rank].contiguous()
        return piece if fill else torch.full_like(piece, -1)

    whole = whole_tensors()
    rows = whole["uneven"].shape[0]
    cut = [0, 5, rows] if world == 2 else [0, rows] if world == 1 else [0, 1, 2, 3, rows]
    uneven = whole["uneven"][cut[rank] : cut[rank + 1]].clone()
    norm = whole["norm"].clone()
    experts = 4 // world
    stacked = [
        ShardedTensor.from_rank_offsets(
            "experts.weight",
            whole["experts.weight"][e].clone() if fill else torch.zeros(6, 2, dtype=torch.bfloat16),
            (0, e, 4),
            prepend_axis_num=1,
        )
        for e in range(rank * experts, (rank + 1) * experts)
    ]

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
        halves = tensor.chunk(2)
        return {
            n: ShardedTensor.from_rank_offsets(f"{key}.{n}", h, (0, rank, world), replica_id=replica_id)
            for n, h in zip("ab", halves, strict=True)
        }

    return {
        "model": {
            "column": ShardedTensor.from_rank_offsets("column.weight", part(whole["column.weight"], 0), (0, rank, world)),
            "row": ShardedTensor.from_rank_offsets("row.weight", part(whole["row.weight"], 1), (1, rank, world)),
            "norm": ShardedTensor.from_rank_offsets("norm", norm if fill else norm * 0, replica_id=rank),
            "experts": stacked,
            "uneven": ShardedTensor(
                "uneven",
                uneven if fill else uneven * 0,
                uneven.dtype,
                tuple(uneven.shape),
                tuple(whole["uneven"].shape),
                (cut[rank], 0),
                None,
            ),
            "count": ShardedTensor.from_rank_offsets("count", torch.tensor(7) if fill else torch.tensor(0), replica_id=rank),
            "factory": ShardedTensorFactory("glu", part(whole["glu"], 0), build, lambda sub: torch.cat([sub["a"], sub["b"]])),
            "extra": ShardedObject(
                "extra", {"stream": io.BytesIO(b"te"), "t": torch.arange(3)} if fill else None, (1,), (0,), replica_id=rank
            ),
        },
        "step": 12 if fill else 0,
        "groups": [{"lr": 0.5, "betas": (0.9, 0.95), "name": None}],
        "local": LocalNonpersistentObject(f"rank {rank}"),
    }


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"column.weight": (8, 3), "row.weight": (3, 16), "norm": (5,), "experts.weight": (4, 6, 2), "uneven": (7, 2), "glu": (16, 3)}
    return {
        key: torch.randn(shape, generator=generator).to(torch.bfloat16 if "weight" in key else torch.float32)
        for key, shape in shapes.items()
    }


def check_loaded(loaded: dict[str, Any], rank: int, world: int) -> None:
    want, model = state_of(rank, world, fill=True), loaded["model"]
    for name in ("column", "row", "norm", "uneven", "count"):
        assert torch.equal(model[name], want["model"][name].data), name
    for mine, theirs in zip(model["experts"], want["model"]["experts"], strict=True):
        assert torch.equal(mine, theirs.data)
    assert model["extra"]["stream"].getvalue() == b"te"
    assert model["extra"]["t"].tolist() == [0, 1, 2]
    assert loaded["local"] == f"rank {rank}"
    assert loaded["step"] == 12
    assert loaded["groups"] == [{"lr": 0.5, "betas": (0.9, 0.95), "name": None}]


def save_ours(rank: int, world_size: int, *, place: str) -> Any:
    from areal_mega.checkpoint.megatron_state import load_state, save_state

    save_state(state_of(rank, world_size, fill=True), place)
    loaded = load_state(state_of(rank, world_size, fill=False), place)
    check_loaded(loaded, rank, world_size)
    return loaded["model"]["factory"]


def load_ours(rank: int, world_size: int, *, place: str) -> Any:
    from areal_mega.checkpoint.megatron_state import check_state, load_state

    assert check_state(place).keys() == whole_tensors().keys() - {"glu"} | {"count", "glu.a", "glu.b"}
    loaded = load_state(state_of(rank, world_size, fill=False), place)
    check_loaded(loaded, rank, world_size)
    return loaded["model"]["factory"]


def save_theirs(rank: int, world_size: int, *, place: str, parallel: bool, asynchronous: bool) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from areal_mega.checkpoint.megatron_state import BACKEND, TensorstoreSaveStrategy

    strategy: Any = TensorstoreSaveStrategy()
    if parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, backend=BACKEND)
    request = dist_checkpointing.save(
        state_of(rank, world_size, fill=True), place, sharded_strategy=strategy, async_sharded_save=asynchronous
    )
    if asynchronous:
        request.execute_sync()


def load_theirs(rank: int, world_size: int, *, place: str) -> None:
    from megatron.core import dist_checkpointing

    from areal_mega.checkpoint.megatron_state import TensorstoreLoadStrategy

    strategy = TensorstoreLoadStrategy()
    metadata = dist_checkpointing.load_tensors_metadata(place, strategy)
    assert metadata["experts.weight"].global_shape == (4, 6, 2)
    loaded, missing, unexpected = dist_checkpointing.load(
        state_of(rank, world_size, fill=False), place, sharded_strategy=strategy, strict="return_all"
    )
    assert (missing, unexpected) == (set(), set())
    check_loaded(loaded, rank, world_size)


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("world", [2, 4])
def test_our_functions_save_once_and_load_resharded(world: int, tmp_path: Path) -> None:
    place = tmp_path / "ck"
    run_ranks(world, save_ours, place=str(place))
    assert {"arrays/norm/c/0", "arrays/experts.weight/c/3/0/0", "arrays/count/c", f"arrays/column.weight/c/{world - 1}/0"} <= files_of(
        place
    )
    assert not any(name.endswith((".pt", ".distcp")) for name in files_of(place)), "nothing of ours is pickled"
    glued = run_ranks(1, load_ours, place=str(place))[0]
    halves = [part.chunk(2) for part in whole_tensors()["glu"].chunk(world)]
    assert torch.equal(torch.from_numpy(glued), torch.cat([h[0] for h in halves] + [h[1] for h in halves]))
    run_ranks(6 - world, load_ours, place=str(place))


@pytest.mark.parametrize(("parallel", "asynchronous"), [(False, False), (True, True)])
def test_megatrons_own_entry_points(parallel: bool, asynchronous: bool, tmp_path: Path) -> None:
    place = tmp_path / "ck"
    place.mkdir()
    run_ranks(4, save_theirs, place=str(place), parallel=parallel, asynchronous=asynchronous)
    files = files_of(place)
    assert {"metadata.json", "common.pt", "checkpoint.json"} <= files
    assert not any(name.endswith(".distcp") for name in files), "the strategy was not replaced by Megatron-Core's own"
    run_ranks(2, load_theirs, place=str(place))


def through_memory(rank: int, world_size: int) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from areal_mega.checkpoint.megatron_state import load_state, save_state

    place = "memory://bucket/state"
    save_state(state_of(rank, world_size, fill=True), place)
    check_loaded(load_state(state_of(rank, world_size, fill=False), place), rank, world_size)
    for asked, message in (
        ({"a": ShardedTensor.from_rank_offsets("other", torch.zeros(2))}, "lacks tensor other"),
        ({"a": ShardedTensor.from_rank_offsets("norm", torch.zeros(2))}, "of different models"),
    ):
        with pytest.raises(UserError, match=message):
            load_state(asked, place)
    longer = ShardedTensor.from_rank_offsets("norm", torch.full((8,), 9.0), allow_shape_mismatch=True)
    padded = load_state({"a": longer}, place)["a"]
    assert torch.equal(padded, torch.cat([whole_tensors()["norm"], torch.full((3,), 9.0)]))
    with pytest.raises(UserError, match="cannot be stored"):
        save_state({"x": object(), "t": ShardedTensor.from_rank_offsets("t", torch.zeros(2))}, "memory://bucket/bad")
    with pytest.raises(UserError, match="exists"):
        save_state(state_of(rank, world_size, fill=True), place)


def test_object_stores_and_what_is_refused() -> None:
    run_ranks(1, through_memory)


def remove(rank: int, world_size: int, *, place: str) -> list[str]:
    from areal_mega.checkpoint.megatron_state import TensorstoreLoadStrategy, check_state

    TensorstoreLoadStrategy().remove_sharded_tensors(place, "experts")
    return sorted(check_state(place))


def test_tensors_can_be_removed(tmp_path: Path) -> None:
    place = tmp_path / "ck"
    run_ranks(2, save_ours, place=str(place))
    assert "experts.weight" not in run_ranks(1, remove, place=str(place))[0]
    assert not any("experts" in name for name in files_of(place))
