"""Weights and optimizer state through a recover checkpoint: bit-equal under the same strategy, equal to rounding under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recover_cases as cases
from ranks import run_ranks
from tiny_models import tiny_model

from areal_mega.checkpoint.model import Checkpoint
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
