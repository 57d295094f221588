"""Runs of the whole program in processes of their own, and what is left of them."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MARK = "AREAL_MEGA_TEST_RUN"
"""Environment variable that every process of a run inherits."""
DEADLINE_S = 280.0

BASE: dict[str, Any] = {
    "run": {"name": "e2e", "seed": 1, "steps": 2},
    "model": {"path": str(REPO / "recipes/quickstart_model"), "weights": "random", "dtype": "fp32"},
    "data": {
        "train": {"loader": "arithmetic", "limit": 200, "kwargs": {"digits": 2, "high": 49}},
        "valid": {"loader": "arithmetic", "split": "valid", "limit": 4, "kwargs": {"digits": 2, "high": 49}},
        "max_prompt_tokens": 8,
    },
    "reward": {"path": "e2e_parts.digits_reward"},
    "rollout": {"strategy": "embedded:d1", "group_size": 4, "max_new_tokens": 6, "dtype": "fp32"},
    "train": {"strategy": "megatron:d1", "batch_size": 4, "microbatch_tokens": 64, "optimizer": {"lr": 1e-3}},
    "algorithm": {"name": "grpo", "correction": "decoupled"},
    "observe": {"console": "plain", "mlflow": False, "report": False},
    "checkpoint": {"export_at_end": False},
    "launch": {"startup_timeout_s": 240.0, "shutdown_timeout_s": 5.0},
}
"""A model of a million parameters from scratch; a reward that tells its random answers apart, so that every step has a gradient."""


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid on it; a dataset is replaced whole."""
    out = dict(base)
    for key, value in changes.items():
        within = isinstance(value, Mapping) and isinstance(out.get(key), Mapping) and "loader" not in value
        out[key] = merged(out[key], value) if within else value
    return out


def write_recipe(root: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A recipe whose run lands below ``root``."""
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(merged(merged(BASE, {"run": {"root": str(root / "runs")}}), changes or {})))
    return path


@dataclass
class Finished:
    code: int
    out: str
    err: str
    run_dir: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Step records, that of the start first."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [record["metrics"] for record in self.steps]

    def log(self, role: str, rank: int = 0) -> str:
        return (self.run_dir / "logs" / f"{role}-{rank}.log").read_text()

    @property
    def synced(self) -> dict[int, str]:
        """Digest of each weight version that all servers acknowledged."""
        return {int(v): digest for v, digest in re.findall(r"version (\d+), digest (\w+): \d+ servers hold it", self.log("controller"))}

    def explain(self) -> str:
        """Everything that a failed assertion should show."""
        logs = {path.name: path.read_text()[-2000:] for path in sorted((self.run_dir / "logs").glob("*.log"))}
        return "\n".join([f"exit {self.code}", self.out[-3000:], self.err[-3000:], *(f"== {name}\n{text}" for name, text in logs.items())])


class Running:
    """A program under way."""

    def __init__(self, argv: Sequence[str], run_dir: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self.run_dir = run_dir
        self.mark = secrets.token_hex(8)
        given = {MARK: self.mark, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE), "TERM": "dumb"}
        self._process = subprocess.Popen(
            argv, cwd=cwd, env=os.environ | given | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def living(self) -> list[int]:
        """Every process of this run, zombies aside."""
        needle, found = f"{MARK}={self.mark}".encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/environ", "rb") as environ, open(f"/proc/{name}/stat", "rb") as stat:
                    if needle in environ.read().split(b"\0") and stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                        found.append(int(name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def worker(self, role: str, rank: int = 0) -> int:
        """Process id of a role, the one that was started last, from the controller's own log."""
        found = re.findall(rf"started {role} rank {rank} as pid (\d+)", (self.run_dir / "logs/controller-0.log").read_text())
        assert found, f"{role} rank {rank} was not started"
        return int(found[-1])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait while the program runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self._process.poll() is None, f"it ended before {what}: {self._process.communicate()}"
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        path = self.run_dir / "metrics.jsonl"
        self.until(lambda: path.exists() and path.read_text().count("\n") > step, f"step {step}")

    def hold(self, point: str, folder: Path, meanwhile: Callable[[], None]) -> None:
        """Do something while the run is at a point of `areal_mega.core.points`, whose environment variable names ``folder``."""
        reached = folder / f"{point}.reached"
        (folder / point).touch()
        self.until(reached.exists, f"{point} is reached")
        meanwhile()
        reached.unlink()

    def finish(self, timeout_s: float = DEADLINE_S) -> Finished:
        out, err = self._process.communicate(timeout=timeout_s)
        return Finished(self._process.returncode, out, err, self.run_dir)

    def until_gone(self, timeout_s: float) -> None:
        """Wait until no process of the run is left."""
        deadline = time.monotonic() + timeout_s
        while left := self.living():
            assert time.monotonic() < deadline, f"left behind: {[_command(pid) for pid in left]}"
            time.sleep(0.05)

    def clean_up(self) -> None:
        for pid in self.living():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextmanager
def started(root: Path, changes: Mapping[str, Any] | None = None, *overrides: str, **environment: str) -> Iterator[Running]:
    """``areal-mega train`` on ``BASE`` with changes; nothing of it is left afterwards."""
    recipe = write_recipe(root, changes)
    running = Running([sys.executable, "-m", "areal_mega", "train", str(recipe), *overrides], root / "runs" / "e2e", REPO, environment)
    try:
        yield running
    finally:
        running.clean_up()


def train(root: Path, changes: Mapping[str, Any] | None = None, *overrides: str, **environment: str) -> Finished:
    """Run to the end."""
    with started(root, changes, *overrides, **environment) as running:
        finished = running.finish()
        running.until_gone(10.0)
    return finished


def _command(pid: int) -> str:
    try:
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return f"{pid}: gone"
