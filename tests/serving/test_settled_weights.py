"""Buckets that are received into the place of the parameters: what layers compute with moves along, whatever the order of buckets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Driven, sequence
from tiny_models import tiny_model

from areal_mega.models.table import HFTensor, Param, Replicated
from areal_mega.serving.ops import Ops
from areal_mega.serving.weights import Weights

FAMILIES = ["qwen2", "qwen3_moe", "deepseek_v3"]


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one family."""
    return tuple(tiny_model(tmp_path_factory.mktemp(f"{request.param}-{seed}"), request.param, seed) for seed in (1, 2))  # type: ignore[return-value]


def receive(weights: Weights, names: tuple[str, ...], source: Weights) -> bool:
    """As a bucket comes; whether into its place."""
    place = weights.settle(names, [source.hf[name].dtype for name in names])
    if place is not None:
        place.copy_(torch.cat([source.hf[name].reshape(-1).view(torch.uint8) for name in names]))
    else:
        for name in names:
            weights.load(name, source.hf[name])
    weights.refresh(names)
    return place is not None


def buckets(weights: Weights, count: int) -> Iterator[tuple[str, ...]]:
    """So many neighbouring parameters of one dtype at a time."""
    names: tuple[str, ...] = ()
    for number, own in enumerate(weights._names.values()):
        if names and (number % count == 0 or weights.hf[own[0]].dtype != weights.hf[names[0]].dtype):
            yield names
            names = ()
        names += own
    yield names


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_computes_with_what_came_into_its_place(folders: tuple[Path, Path], dtype: str) -> None:
    driven, other = Driven(folders[0], dtype=dtype), Driven(folders[1], dtype=dtype)
    weights, source = driven.engine.model.weights, other.engine.model.weights
    before, after = (greedy(each) for each in (driven, other))
    assert greedy(driven) == before != after
    assert all(receive(weights, names, source) for names in buckets(weights, 3))
    assert weights.digests() == source.digests() and greedy(driven) == after
    homes = {names: weights.settle(names, [weights.hf[name].dtype for name in names]) for names in buckets(weights, 3)}
    old = Driven(folders[0], dtype=dtype).engine.model.weights
    for names in buckets(weights, 3):
        receive(weights, names, old)
        assert weights.settle(names, [weights.hf[name].dtype for name in names]) is homes[names], "the same bucket has the same place"
    assert weights.digests() == old.digests() and greedy(driven) == before


def test_what_cannot_be_received_into_its_place(folders: tuple[Path, Path]) -> None:
    weights, source = (Driven(folder).engine.model.weights for folder in folders)
    fused = next(names for names in weights._names.values() if len(names) > 1)
    assert not receive(weights, fused[:1], source), "a part of a fused parameter"
    assert not receive(weights, (*fused[1:], fused[0]), source), "in another order"
    assert weights.settle(fused, [torch.bfloat16] * len(fused)) is None, "in another dtype"
    first, second, third = list(buckets(weights, 2))[:3]
    assert receive(weights, (*first, *second), source)
    assert not receive(weights, first, source) and not receive(weights, (*second, *third), source), "some of those that lie together"
    assert receive(weights, (*first, *second, *third), source), "all of them, and others"


def test_what_has_a_place_and_comes_in_another_dtype_is_cast(folders: tuple[Path, Path]) -> None:
    weights, source = (Driven(folder).engine.model.weights for folder in folders)
    names = next(buckets(weights, 3))
    assert receive(weights, names, source)
    assert weights.settle(names, [torch.bfloat16] * len(names)) is None
    for name in names:
        weights.load(name, source.hf[name].bfloat16())
    weights.refresh(names)
    assert all(torch.equal(weights.hf[name], source.hf[name].bfloat16().float()) for name in names)
    assert receive(weights, names, source), "its place is still there"


def test_a_tensor_that_would_begin_within_an_item_gets_no_place() -> None:
    params = [
        Param(role="odd", mapping=Replicated(), hf=(HFTensor("odd", (3,)),), stage="first"),
        Param(role="island", mapping=Replicated(), hf=(HFTensor("island", (2,)),), stage="last", fp32=True),
    ]
    weights = Weights(None, torch.bfloat16, params, Ops())  # type: ignore[arg-type]
    before = {name: view.data_ptr() for name, view in weights.hf.items()}
    dtypes = [torch.bfloat16, torch.float32]
    assert weights.settle(("odd", "island"), dtypes) is None
    assert before == {name: view.data_ptr() for name, view in weights.hf.items()}, "nothing was moved"
    assert weights.settle(("island", "odd"), dtypes[::-1]) is not None


def test_memory_that_may_still_be_written_is_left(folders: tuple[Path, Path]) -> None:
    weights, source = (Driven(folder).engine.model.weights for folder in folders)
    names = next(buckets(weights, 3))
    dtypes = [weights.hf[name].dtype for name in names]
    old = weights.settle(names, dtypes)
    assert old is not None
    weights.unsettle(names)
    for name in names:
        weights.load(name, source.hf[name])
    old.fill_(7)
    assert all(torch.equal(weights.hf[name], source.hf[name]) for name in names)
    assert weights.settle(names, dtypes) is not old


def greedy(driven: Driven) -> list[int]:
    asked = sequence("r", range(5, 25), temperature=0.0, max_new_tokens=8)
    driven.engine.flush_cache()
    driven.submit(asked)
    driven.run()
    return asked.output_ids.tolist()
