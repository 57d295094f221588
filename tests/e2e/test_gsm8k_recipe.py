"""The recipe for GSM8K on GPUs, in its CPU form: every setting of it at work on a chat model and questions of GSM8K's kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import REPO, Running
from tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_gsm8k_recipe_runs_on_a_cpu(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "llama", vocab_size=320)
    questions = REPO / "tests/data/questions.jsonl"
    overrides = [
        f"run.root={tmp_path / 'runs'}",
        "run.name=e2e",
        f"model.path={model}",
        f"data.train.path={questions}",
        f"data.valid.path={questions}",
        "rollout.max_new_tokens=32",
        "data.max_prompt_tokens=480",  # with the answer, what the tiny model takes
        # Only the last answer of a run of random text is ever right, so the format is what rewards can differ in.
        "reward.kwargs={format_reward: 0.1}",
        "observe.console=plain",
        "observe.mlflow=false",
        "observe.report=false",
    ]
    argv = [sys.executable, "-m", "areal_mega", "train", "recipes/gsm8k_smollm2_cpu.yaml", *overrides]
    running = Running(argv, tmp_path / "runs" / "e2e", REPO, {})
    try:
        run = running.finish()
        running.until_gone(10.0)
    finally:
        running.clean_up()
    assert run.code == 0, run.explain()
    start, *trained = run.metrics
    assert len(trained) == 3 and list(run.synced) == [0, 1, 2, 3]  # every version acknowledged with its digest
    assert start["rollout/eval_prompts"] == 3
    for m in trained:
        assert m["batch/groups"] == 4 and m["batch/samples"] == 16
        assert m["staleness/max"] <= 2
        assert {"reward/correct", "reward/format", "reward/parsed"} <= m.keys()
    fresh = [m["mismatch/fresh_abs_mean"] for m in trained if "mismatch/fresh_abs_mean" in m]
    assert fresh and max(fresh) < 1e-3
