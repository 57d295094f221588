"""Runs submitted to Slurm, and what is seen of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from programs import HERE, REPO, write_recipe

from areal_mega.launch.slurm.jobs import Slurm, TaskState

DEADLINE_S = 280.0
PROGRAM = Path(sys.executable).parent
SETTINGS: dict[str, Any] = {
    "slots_per_task": 1,
    "gres": "gpu:1",
    "cpus_per_task": 1,
    "setup": [f"export PATH={PROGRAM}:$PATH PYTHONPATH={HERE}:{REPO} OMP_NUM_THREADS=1", f"cd {REPO}"],
    "queue_timeout_s": 200.0,
}


def recipe(root: Path, changes: Mapping[str, Any] | None = None, **slurm: Any) -> Path:
    """A recipe of tests/e2e for Slurm, below ``root``."""
    path = write_recipe(root, changes)
    import yaml

    whole = yaml.safe_load(path.read_text())
    whole["launch"]["slurm"] = SETTINGS | {"output": str(root / "task-%a.out")} | slurm
    path.write_text(yaml.safe_dump(whole))
    return path


class Submitted:
    """A run in Slurm's hands; ``clean_up`` ends it."""

    def __init__(self, root: Path, jobs: Sequence[str], name: str = "e2e") -> None:
        self.root, self.jobs, self.run_dir = root, list(jobs), root / "runs" / name
        self._slurm = Slurm(cache_s=0.5)
        self.submitted = time.time()

    def tasks(self) -> list[TaskState]:
        return sorted(self._slurm.tasks(self.jobs), key=lambda task: (int(task.job), task.index))

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            over = all(task.ended for task in self.tasks())
            assert not over or condition(), f"all tasks ended before {what}\n{self.explain()}"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{self.explain()}"
            time.sleep(0.3)

    def until_ended(self) -> list[TaskState]:
        self.until(lambda: all(task.ended for task in self.tasks()), "the end of all tasks")
        return self.tasks()

    def until_step(self, step: int) -> None:
        self.until(lambda: len(self.steps()) > step, f"step {step}")

    def steps(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def output(self, task: int) -> str:
        path = self.root / f"task-{task}.out"
        return path.read_text() if path.exists() else ""

    def explain(self) -> str:
        """Everything that a failed assertion should show."""
        logs = [*sorted(self.root.glob("*.out")), *sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join([*map(str, self.tasks()), *(f"== {path.name}\n{path.read_text()[-1500:]}" for path in logs)])

    def clean_up(self) -> None:
        self._slurm.cancel(self.jobs)
        self.until(lambda: all(task.ended for task in self.tasks()), "the end of cancelled tasks", 60.0)


def areal_mega(*arguments: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    """The program itself, on this machine."""
    env = os.environ | {"PYTHONPATH": f"{HERE}:{REPO}"}
    return subprocess.run([str(PROGRAM / "areal-mega"), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)


def launch(root: Path, path: Path) -> Submitted:
    """``areal-mega launch RECIPE --on slurm``."""
    done = areal_mega("launch", str(path), "--on", "slurm")
    assert done.returncode == 0, done.stderr
    jobs = done.stdout.partition("as Slurm job ")[2].partition(";")[0].split(" and ")
    return Submitted(root, jobs)
