"""Weights and optimizer state through a recover checkpoint: bit-equal under the same strategy, equal to rounding under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recover_cases as cases
from ranks import run_ranks
from tiny_models import tiny_model

from areal_mega.checkpoint.host_memory import available, check_host_memory
from areal_mega.checkpoint.model import Checkpoint
from areal_mega.core.errors import UserError
from areal_mega.parallel.strategy import parse

ADAM = {"lr": 1e-2, "warmup_steps": 1, "schedule": "linear", "weight_decay": 0.1, "clip_grad": 0.5, "eps": 1e-3}


def ran(case: Any, strategy: str, **kwargs: Any) -> list[dict[str, Any]]:
    return run_ranks(parse(strategy).world_size, case, strategy=strategy, **kwargs)


@pytest.mark.parametrize(
    ("model", "saved", "loaded", "dtype", "distributed"),
    [
        ("qwen3_moe", "megatron:d2e2", "megatron:d2e2", "fp32", True),
        ("qwen3", "megatron:d2", "megatron:d2", "bf16", True),
        ("qwen3", "megatron:d1t2", "megatron:d2p2", "fp32", True),
        ("qwen3_moe", "megatron:d1t2p2e2", "megatron:d2e2", "fp32", True),
        ("deepseek_v3", "megatron:d2p2e2", "megatron:d1t2", "fp32", True),
        ("qwen3", "megatron:d2", "megatron:d1t2", "bf16", False),
    ],
)
def test_a_recovered_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, model: str, saved: str, loaded: str, dtype: str, distributed: bool
) -> None:
    folder = str(tiny_model(tmp_path / "model", model))
    place = tmp_path / "recover" / "step-2"
    common = {"folder": folder, "place": str(place), "dtype": dtype, "optimizer": ADAM | {"distributed": distributed}}
    before = ran(cases.save_and_go_on, saved, **common)
    after = ran(cases.recover, loaded, counters=before[0]["counters"], **common)
    assert before[0]["counters"] == {"optimizer_steps": 2, "updates": 2}
    for name, weight in before[0]["at_save"].items():
        assert np.array_equal(after[0]["at_load"][name], weight), name
    if saved == loaded:
        assert [rank["digest"] for rank in after] == [rank["digest"] for rank in before]
    exact = saved == loaded
    np.testing.assert_allclose(after[0]["norms"], before[0]["norms"], rtol=0 if exact else 1e-5 if dtype == "fp32" else 2e-2)
    for name, weight in before[0]["weights"].items():
        if exact:
            assert np.array_equal(after[0]["weights"][name], weight), name
        else:
            np.testing.assert_allclose(after[0]["weights"][name], weight, atol=2e-5 if dtype == "fp32" else 2e-2, err_msg=name)
    # The weights are a checkpoint as any other.
    assert Checkpoint(place / "weights").hf_config["model_type"] == model


@pytest.mark.parametrize("distributed", [True, False])
def test_a_run_that_made_no_update_goes_on_too(tmp_path: Path, distributed: bool) -> None:
    folder = str(tiny_model(tmp_path / "model", "qwen3"))
    common = {"folder": folder, "place": str(tmp_path / "step-0"), "optimizer": ADAM | {"distributed": distributed}}
    before = ran(cases.save_and_go_on, "megatron:d1", updates=0, **common)
    after = ran(cases.recover, "megatron:d1", counters=before[0]["counters"], **common)
    assert before[0]["counters"] == {"optimizer_steps": 0, "updates": 0}
    assert after[0]["digest"] == before[0]["digest"] and after[0]["norms"] == before[0]["norms"]
    for name, weight in before[0]["weights"].items():
        assert np.array_equal(after[0]["weights"][name], weight), name


def test_copies_that_do_not_fit_into_memory_are_refused_on_every_rank(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model", "qwen3"))
    ranks = ran(cases.short_of_memory, "megatron:d2", folder=folder, place=str(tmp_path))
    total = sum(rank["nbytes"] for rank in ranks)
    for rank in ranks:
        assert rank["message"].startswith(f"a recover checkpoint copies {total / 1e9:.2f} GB of 2 ranks to the memory of ")
        assert "set checkpoint.recover_every_steps=0" in rank["message"] and "\n" not in rank["message"]


def test_free_memory_is_read_and_summed_by_machine() -> None:
    free = available()
    assert free is not None and 10**6 < free < 10**15
    shares = [("here", 60), ("there", 1000), ("here", 40)]
    check_host_memory(shares, "here", 100)
    check_host_memory(shares, "here", None)
    with pytest.raises(UserError, match="of 2 ranks"):
        check_host_memory(shares, "here", 99)


def test_host_copies_are_made_once_and_what_goes_wrong_has_a_rank_and_a_place(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model", "qwen3"))
    [rank] = ran(cases.copies_and_errors, "megatron:d1", folder=folder, place=str(tmp_path))
    first, second = rank["made"]
    assert first - second == rank["buffers"] > 0, "a second save allocates none of them"
    memory, storage, user = rank["messages"]
    assert memory.startswith(f"train rank 0 could not write its part of {tmp_path / 'fails-0'}: MemoryError; see that")
    assert ": ValueError: RESOURCE_EXHAUSTED; " in storage and "\n" not in storage and "run.resume=true" in storage
    assert user == "the disk is full"


def test_parameters_are_read_at_once_and_proved_first(tmp_path: Path) -> None:
    folder, place = str(tiny_model(tmp_path / "model", "qwen3")), str(tmp_path / "step-1")
    before = ran(cases.save_and_go_on, "megatron:d1", updates=1, folder=folder, place=place)
    [rank] = ran(cases.load_at_once, "megatron:d1", folder=folder, place=place)
    assert f"expects {rank['lost']}, which the model lacks" in rank["message"]
    assert before[0]["counters"] == {"optimizer_steps": 1, "updates": 1}


def test_a_checkpoint_is_completed_beside_a_step(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model", "qwen3"))
    [rank] = ran(cases.commit_beside_a_step, "megatron:d1", folder=folder, place=str(tmp_path / "step-0"))
    assert rank == {"found": [True], "errors": []}
