"""Runs that are killed and go on, under other strategies too. Kills at every point of a step: `test_every_point`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from programs import HERE, Finished, started, train

from areal_mega.core.points import ENV

STEPS = 4
CHANGES: dict[str, Any] = {
    "run": {"steps": STEPS, "overlap": False},
    "staleness": {"max_staleness": 0},
    "algorithm": {"correction": "none"},
    "checkpoint": {"recover_every_steps": 1, "keep": 2},
    "eval": {"at_start": False},
}


def trained(run_dir: Path) -> list[tuple[int, list[list[Any]]]]:
    return [(entry["step"], sorted(entry["prompts"])) for entry in map(json.loads, (run_dir / "trained.jsonl").read_text().splitlines())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = train(tmp_path_factory.mktemp("undisturbed"), CHANGES)
    assert finished.code == 0, finished.explain()
    return finished


def kept(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "recover").iterdir())


def test_the_newest_checkpoints_are_kept_whole(undisturbed: Finished) -> None:
    assert kept(undisturbed.run_dir) == ["step-3", "step-4"]
    for name in kept(undisturbed.run_dir):
        state = json.loads((undisturbed.run_dir / "recover" / name / "state.json").read_text())
        assert f"step-{state['step']}" == name and state["train"]["optimizer_steps"] == state["step"]
    last = undisturbed.metrics[-1]
    assert last["recover/stall_s"] > 0 and last["recover/bytes"] > 0


def test_another_strategy_from_the_middle_on(tmp_path: Path, undisturbed: Finished) -> None:
    """Saved by two tensor-parallel ranks, gone on with by two stages of two replicas each: the same samples, losses and updates."""
    with started(tmp_path, CHANGES, "train.strategy=megatron:d1t2") as running:
        running.until(lambda: (running.run_dir / "recover/step-2/state.json").exists(), "a checkpoint")
        os.kill(running.pid, signal.SIGKILL)
        running.finish()
        running.until_gone(30.0)
    before = len(trained(running.run_dir))
    finished = train(tmp_path, CHANGES, "train.strategy=megatron:d2p2", "run.resume=true")
    assert finished.code == 0 and before < STEPS, finished.explain()
    assert trained(finished.run_dir) == trained(undisturbed.run_dir)
    for mine, theirs in zip(finished.metrics[1:], undisturbed.metrics[1:], strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5, abs=1e-6)
        for name in ("train/grad_norm", "policy/entropy"):  # on-policy losses are almost 0
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


def test_a_run_that_is_told_to_end_saves_first(tmp_path: Path, undisturbed: Finished) -> None:
    """SIGTERM, in a run without a schedule of checkpoints, while a step is under way; it goes on as if nothing had been."""
    changes = CHANGES | {"checkpoint": {"recover_every_steps": 0}}
    with started(tmp_path, changes, **{ENV: str(tmp_path)}) as running:
        running.until_step(1)
        running.hold("train.loaded", tmp_path, lambda: os.kill(running.pid, signal.SIGTERM))
        finished = running.finish()
        running.until_gone(30.0)
    done = len(trained(finished.run_dir))
    assert finished.code == 1 and f"SIGTERM: ended after step {done} as asked, with everything saved" in finished.err, finished.explain()
    assert kept(finished.run_dir) == [f"step-{done}"] and not (finished.run_dir / "failure.md").exists()
    finished = train(tmp_path, changes, "run.resume=true")
    assert finished.code == 0 and f"going on after step {done}" in finished.out, finished.explain()
    assert trained(finished.run_dir) == trained(undisturbed.run_dir)
    assert finished.synced[STEPS] == undisturbed.synced[STEPS]


def test_sigterm_ends_at_once_where_nothing_could_be_saved_and_the_second_time(tmp_path: Path) -> None:
    with started(tmp_path, CHANGES | {"run": {"steps": 1000}}, **{ENV: str(tmp_path)}) as running:
        running.until(lambda: (running.run_dir / "logs/controller-0.log").exists(), "the run directory")
        os.kill(running.pid, signal.SIGTERM)
        assert running.finish(30.0).code == -signal.SIGTERM
        running.until_gone(30.0)
    with started(tmp_path, CHANGES | {"run": {"steps": 1000}}, "run.resume=true", **{ENV: str(tmp_path)}) as running:
        running.until_step(1)
        log = running.run_dir / "logs/controller-0.log"

        def twice() -> None:
            os.kill(running.pid, signal.SIGTERM)
            time.sleep(0.5)
            os.kill(running.pid, signal.SIGTERM)
            assert running.finish(30.0).code == -signal.SIGTERM, log.read_text()

        running.hold("train.loaded", tmp_path, twice)
        running.until_gone(30.0)


def test_a_failed_run_leaves_a_page_with_the_command_that_goes_on(tmp_path: Path, undisturbed: Finished) -> None:
    settings = ["launch.restarts=1", "run.overwrite=true"]
    with started(tmp_path, CHANGES | {"launch": {"server_restarts": 0}}, *settings, **{ENV: str(tmp_path)}) as running:
        for number in range(2):
            running.until(lambda n=number: len(list(running.run_dir.glob("rendezvous/*"))) > n, "an attempt")  # type: ignore[misc]
            running.hold("train.logged", tmp_path, lambda: os.kill(running.worker("train"), signal.SIGKILL))
        finished = running.finish()
    page = finished.run_dir / "failure.md"
    assert finished.code == 1 and f"what failed, and how to go on: {page}" in finished.out, finished.explain()
    text = page.read_text()
    assert "train rank 0 died: killed by SIGKILL; log: " in text and "ready at 127.0.0.1" in text, "with its last lines"
    assert "attempt 1 had ended with: train rank 0 died" in text
    folder, command = text.partition("```bash\n")[2].partition("\n```")[0].splitlines()
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command.replace("areal-mega", "areal_mega", 1))],
        cwd=shlex.split(folder)[1],
        env=os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert trained(finished.run_dir) == trained(undisturbed.run_dir) and not page.exists()


def test_another_strategy_and_number_of_replicas_and_an_overlapped_run(tmp_path: Path) -> None:
    """Resumed with twice the ranks and twice the replicas; asynchronous: every prompt of the data once, however the schedule fell."""
    rows = {"train": {"loader": "arithmetic", "limit": 4 * STEPS, "kwargs": {"digits": 2, "high": 49}}}
    changes = CHANGES | {"run": {"steps": STEPS}, "staleness": {"max_staleness": 1}, "algorithm": {"correction": "decoupled"}, "data": rows}
    with started(tmp_path, changes) as running:
        running.until(lambda: (running.run_dir / "recover/step-1/state.json").exists(), "a checkpoint")
        os.kill(running.pid, signal.SIGKILL)
        running.finish()
        running.until_gone(30.0)
    finished = train(tmp_path, changes, "train.strategy=megatron:d1t2", "rollout.strategy=embedded:d2", "run.resume=true")
    assert finished.code == 0, finished.explain()
    assert (finished.run_dir / "logs/rollout-1.log").exists()
    counts = Counter(tuple(prompt) for _, prompts in trained(finished.run_dir) for prompt in prompts)
    assert len(counts) == 4 * STEPS and set(counts.values()) == {1}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["run.resume=true", "run.seed=2"], "the training data changed since the checkpoint (seed: 1 then, 2 now)"),
        ([], "=true to go on with it"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(undisturbed: Finished, overrides: list[str], line: str) -> None:
    finished = train(undisturbed.run_dir.parents[1], CHANGES | {"run": {"steps": STEPS + 1, "overlap": False}}, *overrides)
    assert finished.code == 2 and line in finished.err, finished.explain()
