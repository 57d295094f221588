"""Experts with a capacity: what is beyond it is dropped, counted, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_cases as cases
import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import tiny_model

from areal_mega.parallel.strategy import parse

TOKENS, EXPERTS, TOPK = sum(cases.LENGTHS), 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    # One layer: what reaches its router does not depend on what another one dropped.
    return str(tiny_model(Path(tmp_path_factory.mktemp("one")), "qwen3_moe", num_hidden_layers=1))


def measured(rank: int, world_size: int, *, folder: str, strategy: str, router: dict) -> dict:
    """Of one update with every sample in one micro-batch per rank."""
    engine = cases.make_engine(rank, folder, strategy, router=router)
    result = engine.train_minibatch(cases.my_batches(engine, 1), cases.weighted_loss, 1.0)
    assert engine._expert_load is not None
    counts = engine._expert_load._counts_le[0].clone()
    engine.close()
    dropped = result.metrics.get("experts/dropped_fraction")
    return {
        "grad_norm": result.grad_norm,
        "counts": counts,
        "dropped": None if dropped is None else [dropped.reduction, dropped.value / dropped.weight, dropped.weight],
    }


def run(folder: str, strategy: str = "megatron:d1", **router: Any) -> dict[str, Any]:
    return run_ranks(parse(strategy).world_size, measured, folder=folder, strategy=strategy, router=router)[0]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_what_is_beyond_capacity_is_dropped_and_counted(folder: str, policy: str) -> None:
    without = run(folder)
    assert without["dropped"] is None, "not measured is absent, not 0"
    limited = run(folder, capacity_factor=0.5, drop_policy=policy)
    capacity = int(np.ceil(TOKENS * TOPK / EXPERTS * 0.5))
    np.testing.assert_array_equal(limited["counts"], np.minimum(without["counts"], capacity))
    reduction, fraction, chosen = limited["dropped"]
    assert (reduction, chosen) == ("mean", TOKENS * TOPK)
    assert fraction == pytest.approx(1 - limited["counts"].sum() / without["counts"].sum())
    assert fraction > 0.3
    assert abs(limited["grad_norm"] / without["grad_norm"] - 1) > 1e-3


def test_policies_keep_other_tokens(folder: str) -> None:
    first, likeliest = (run(folder, capacity_factor=0.5, drop_policy=policy) for policy in ("position", "probs"))
    assert first["dropped"] == likeliest["dropped"]
    assert abs(first["grad_norm"] / likeliest["grad_norm"] - 1) > 1e-4


@pytest.mark.parametrize("strategy", ["megatron:d1", "megatron:d2e2"])
def test_room_for_all_changes_nothing(folder: str, strategy: str) -> None:
    roomy = run(folder, strategy, capacity_factor=float(EXPERTS))
    assert roomy["dropped"][1] == 0.0
    assert roomy["grad_norm"] == pytest.approx(run(folder, strategy)["grad_norm"], rel=1e-6)


def test_dropping_is_per_rank_and_micro_batch(folder: str) -> None:
    # The one thing that depends on the split: each rank's experts are filled from its own tokens.
    alone, apart = (run(folder, strategy, capacity_factor=0.75) for strategy in ("megatron:d1", "megatron:d2e2"))
    assert apart["dropped"][1] > 0
    assert apart["dropped"][2] == alone["dropped"][2], "choices, of all ranks together"
    assert apart["grad_norm"] != pytest.approx(alone["grad_norm"], rel=1e-5)


def test_settings_that_do_nothing_are_refused(folder: str) -> None:
    (lines,) = run_ranks(1, refusals, folder=folder)
    assert lines[0].startswith("router.drop_policy is position, but nothing is dropped: set router.capacity_factor")
    assert lines[1].startswith("router.capacity_factor is 1.0, but router.dispatcher allgather pads micro-batches")


def refusals(rank: int, world_size: int, *, folder: str) -> list[str]:
    from areal_mega.core.errors import UserError

    lines = []
    for router in ({"drop_policy": "position"}, {"capacity_factor": 1.0, "dispatcher": "allgather"}):
        try:
            cases.make_engine(rank, folder, "megatron:d1", router=router)
        except UserError as error:
            lines.append(str(error))
    return lines
