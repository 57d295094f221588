"""Interruptions of a run on Slurm, at three moments: while it generates, in a weight sync, in the commit of a checkpoint.

Whatever happens, the run ends by itself, and the prompts that it was trained on are those of a run that nothing disturbed. Here every
interruption comes at one moment; with ``AREAL_MEGA_TEST_POINTS=all`` each comes at all three (ten minutes).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from lab import SlurmLab
from submitted import SETTINGS, Submitted, launch, recipe

from areal_mega.core.points import ENV
from areal_mega.launch.slurm.jobs import Slurm

pytestmark = pytest.mark.usefixtures("slurm")

STEPS = 5
GOING_ON: dict[str, Any] = {
    "run": {"steps": STEPS, "overlap": False},
    "staleness": {"max_staleness": 0},
    "algorithm": {"correction": "none"},
    "checkpoint": {"recover_every_steps": 1},
    "eval": {"at_start": False},
    "launch": {"restarts": 3},
}
MOMENTS = {"generating": "rollout.episode", "syncing": "sync.sent", "committing": "recover.commit"}
WHATS = ("requeue controller", "requeue train", "requeue rollout", "cancel rollout", "crash", "limit", "signal rollout", "preempt")
CASES = [
    (what, moment)
    for number, what in enumerate(WHATS)
    for place, moment in enumerate(MOMENTS)
    if os.environ.get("AREAL_MEGA_TEST_POINTS") == "all" or place == number % len(MOMENTS)
]

STRATEGIES = {
    # One of two rollout tasks is cancelled: what is cancelled does not come back.
    "cancel rollout": {"rollout": {"strategy": "embedded:d2"}},
    # Two train tasks, of which the second is requeued.
    "requeue train": {"train": {"strategy": "megatron:d2", "batch_size": 4, "microbatch_tokens": 64, "optimizer": {"lr": 1e-3}}},
}
SAVING = {"requeue controller": "SIGTERM: saving", "requeue train": "a task with train ranks was told to end: saving"}


def trained(run: Submitted) -> list[tuple[int, list[Any]]]:
    return [
        (entry["step"], sorted(entry["prompts"])) for entry in map(json.loads, (run.run_dir / "trained.jsonl").read_text().splitlines())
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, slurm: SlurmLab | None) -> list[tuple[int, list[Any]]]:
    root = tmp_path_factory.mktemp("undisturbed")
    run = launch(root, recipe(root, GOING_ON))
    assert [task.state for task in run.until_ended()] == ["COMPLETED"] * 2, run.explain()
    return trained(run)


@pytest.mark.parametrize(("what", "moment"), CASES)
def test_an_interrupted_run_goes_on_with_the_same_prompts(
    tmp_path: Path, runs: list[Submitted], slurm: SlurmLab | None, undisturbed: list[tuple[int, list[Any]]], what: str, moment: str
) -> None:
    if what in ("crash", "preempt") and slurm is None:
        pytest.skip("needs the lab's nodes and partitions")
    points = tmp_path / "points"
    points.mkdir()
    settings: dict[str, Any] = {"setup": [*SETTINGS["setup"], f"export {ENV}={shlex.quote(str(points))}"], "extra": ["--exclusive"]}
    if what == "preempt":
        settings["partition"] = "low"
    if what == "limit":
        settings |= {"time": "60", "signal_s": 120}
    run = launch(tmp_path, recipe(tmp_path, GOING_ON | STRATEGIES.get(what, {}), **settings))
    runs.append(run)
    run.until(lambda: (run.run_dir / "recover/step-1/state.json").exists(), "a checkpoint")
    point, reached = points / MOMENTS[moment], points / f"{MOMENTS[moment]}.reached"
    point.touch()
    run.until(reached.exists, f"the moment: {moment}")
    interrupt(run, what, slurm, runs)
    reached.unlink()
    states = [task.state for task in run.until_ended()]
    assert states == ["COMPLETED", *{"cancel rollout": ["CANCELLED"], "requeue train": ["COMPLETED"]}.get(what, []), "COMPLETED"], (
        run.explain()
    )
    # In another attempt, or in the same one with a replica that came back or is missing.
    assert re.search("going on after step|is back, with weights|the run goes on without replica 0", run.output(0)), run.explain()
    if what in SAVING:
        assert SAVING[what] in run.output(0), run.explain()
    assert trained(run) == undisturbed, run.explain()
    assert [record["step"] for record in run.steps()] == list(range(STEPS + 1))


def interrupt(run: Submitted, what: str, slurm: SlurmLab | None, runs: list[Submitted]) -> None:
    """Do it; returns when it has begun."""
    job, rollout = run.jobs[0], run.tasks()[1]
    if what.startswith("requeue"):
        Slurm().requeue(f"{job}_{0 if what.endswith('controller') else 1}")
    elif what == "cancel rollout":
        Slurm().cancel([f"{job}_1"])
    elif what.startswith("signal"):
        Slurm._run(["scancel", "--batch", "--signal=USR1", f"{job}_1"])
    elif what == "limit":
        # Slurm looks at limits twice a minute. The limit is back before the tasks are started again.
        for minutes in (int((time.time() - run.submitted) / 60) + 2, 60):
            Slurm._run(["scontrol", "update", f"jobid={job}_0", f"timelimit={minutes}"])
            run.until(lambda: "SIGUSR1: saving" in run.output(0), "the time limit's signal")
    elif what == "preempt":
        script = f"#!/bin/sh\n#SBATCH --nodelist={rollout.nodes} --exclusive --partition=main --output=/dev/null\nsleep 2\n"
        runs.append(Submitted(run.root, [Slurm().submit(script)], name="urgent"))
        run.until(lambda: run.tasks()[1].state != "RUNNING" or not run.tasks()[1].nodes, "the preemption")
    else:
        assert slurm is not None
        slurm.crash(rollout.nodes)
        time.sleep(2.0)
        slurm.boot(rollout.nodes)
