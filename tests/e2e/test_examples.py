"""The example script of the documentation, as it stands there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import REPO, Running

EXAMPLES = REPO / "docs/examples"


def test_the_page_shows_the_module_that_runs() -> None:
    code = (EXAMPLES / "my_module.py").read_text()
    assert code[code.index("import asyncio") :] in (REPO / "docs/workflow-and-reward.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_script_trains_with_its_own_rows_and_workflow(tmp_path: Path) -> None:
    overrides = [
        f"run.root={tmp_path}", "run.steps=2", "warmup.steps=2", "eval.samples=1", "eval.every_steps=0", "train.strategy=megatron:d1",
        "train.batch_size=4", "rollout.group_size=4", "observe.console=plain", "observe.mlflow=false", "observe.report=false",
    ]  # fmt: skip
    # Not from the script's own folder: the workflow beside it is found all the same.
    running = Running([sys.executable, str(EXAMPLES / "train.py"), *overrides], tmp_path / "second-try", REPO, {"PYTHONPATH": str(REPO)})
    try:
        run = running.finish()
        running.until_gone(10.0)
    finally:
        running.clean_up()
    assert run.code == 0, run.explain()
    assert run.err == ""
    assert run.out.splitlines()[-1].endswith(f"after; the model is in {tmp_path}/second-try/export/final")
    assert (tmp_path / "second-try/export/final/model.safetensors").is_file() or any(
        (tmp_path / "second-try/export/final").glob("*.index.json")
    )
    start, *trained = run.metrics
    assert start["rollout/eval_prompts"] == 200
    assert len(trained) == 2 and all(m["batch/samples"] == 16 for m in trained)
    # Wrong answers of a fresh model are tried again: beside the prompt's 6 tokens there is the hint, which is not trained either.
    assert all(m["batch/tokens"] / 16 - m["batch/response_tokens"] > 6.5 for m in trained)
    assert all(m["mismatch/fresh_abs_mean"] < 1e-3 for m in trained if "mismatch/fresh_abs_mean" in m)
    assert (tmp_path / "second-try/data/train.jsonl").read_text().count("\n") == 1250
