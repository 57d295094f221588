"""Rollout tasks that start late, are requeued or lost, while training goes on: one attempt, every prompt trained once."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lab import SlurmLab
from submitted import Submitted, areal_mega, launch, recipe

from areal_mega.config.loader import load_recipe
from areal_mega.data.registry import load_rows
from areal_mega.data.stream import PromptStream
from areal_mega.launch.slurm.jobs import Slurm

pytestmark = pytest.mark.usefixtures("slurm")
STEPS = 100
ELASTIC: dict[str, Any] = {
    "run": {"steps": STEPS},
    "rollout": {"strategy": "embedded:d2"},
    # A task that is lost in the middle of a sync ends the attempt: there are few of them.
    "sync": {"every_steps": 5},
    "eval": {"at_start": False, "every_steps": STEPS},
}


def synced(run: Submitted) -> int:
    """Steps with a scheduled sync, of those that are done."""
    return sum(record["step"] % 5 == 0 for record in run.steps())


def nodes(state: str) -> None:
    for node in ("n2", "n3"):
        Slurm._run(["scontrol", "update", f"nodename={node}", f"state={state}", "reason=test"])


def test_rollout_tasks_come_late_and_come_back(tmp_path: Path, slurm: SlurmLab | None) -> None:
    """Two nodes are free at first, for one train and one rollout task; with all four there, the first rollout task is requeued."""
    if slurm is None:
        pytest.skip("holds nodes back: only in the lab")
    nodes("drain")
    slow = tmp_path / "slow"
    slow.touch()
    reward = {"path": "e2e_parts.slow_digits_reward", "kwargs": {"while_there": str(slow)}, "workers": 2}
    path = recipe(tmp_path, ELASTIC | {"reward": reward}, extra=["--exclusive"])
    run = launch(tmp_path, path)
    try:
        run.until_step(1)
        assert re.search(r"beginning without task 2 \(inference replica 1\): Slurm task \S+_2: PENDING .*; it joins", run.output(0)), (
            run.explain()
        )
        assert "  replica 1 is away: not there yet" in areal_mega("status", str(run.run_dir)).stdout
        nodes("resume")
        run.until(lambda: "server rank 1 is back, with weights of version" in run.output(0), "the late task")
        syncs = synced(run)
        run.until(lambda: synced(run) > syncs, "a sync that has just been")
        Slurm().requeue(f"{run.jobs[0]}_1")
        run.until(lambda: "task 1 was told to end (preempted, requeued or cancelled): inference replica 0" in run.output(0), "the loss")
        run.until(lambda: "server rank 0 is back, with weights of version" in run.output(0), "the requeued task")
        slow.unlink()
        states = run.until_ended()
    finally:
        nodes("resume")
        run.clean_up()
    assert [task.state for task in states] == ["COMPLETED"] * 3, run.explain()
    assert len(list((run.run_dir / "rendezvous").iterdir())) == 1, "one attempt"
    assert [record["step"] for record in run.steps()] == list(range(STEPS + 1))
    assert run.steps()[-1]["metrics"]["rollout/failed"] == 0
    trained = [json.loads(line)["prompts"] for line in (run.run_dir / "trained.jsonl").read_text().splitlines()]
    whole = load_recipe(path)
    stream = PromptStream(load_rows(whole.data.train), seed=whole.run.seed, shuffle=whole.data.shuffle)
    undisturbed = Counter((prompt.id, prompt.epoch) for prompt in stream.next(STEPS * whole.train.batch_size))
    assert Counter((id_, epoch) for prompts in trained for id_, epoch in prompts) == undisturbed
