"""What a run is doing, seen from outside: by its run directory, and by Slurm where Slurm started it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.launch.rundir import REPLICAS_FILE
from areal_mega.launch.slurm.jobs import Slurm, TaskState

_HOLDER = re.compile(r"pid (\d+) on (\S+)")


@dataclass(frozen=True, slots=True)
class RunState:
    """Args:
    alive: the run's controller holds the directory.
    pid, host: of that controller, as it wrote them.
    tasks: Slurm's word on its array tasks; empty where Slurm did not start it, or has forgotten it.
    last: the newest line of metrics, if there is one.
    age_s: seconds since that line.
    absent: replicas that do not serve now, and why, while the controller is alive.
    """

    path: Path
    alive: bool
    pid: int | None
    host: str | None
    tasks: tuple[TaskState, ...]
    last: dict[str, object] | None
    age_s: float | None
    absent: Mapping[int, str]


def look(path: Path) -> RunState:
    """Raises:
    UserError: there is no run, neither as a directory nor in Slurm's queue.
    """
    path = path.absolute()
    tasks = tuple(_tasks(path))
    if not (path / "lock").is_file():
        if tasks:
            return RunState(path, False, None, None, tasks, None, None, {})
        raise UserError(f"{path} is no run directory; give one, e.g. runs/quickstart")
    with (path / "lock").open() as file:
        holder = _HOLDER.search(file.read())
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            alive = False
        except BlockingIOError:
            alive = True
    pid, host = (int(holder[1]), holder[2]) if holder else (None, None)
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    last = json.loads(lines[-1]) if lines else None
    word = path / REPLICAS_FILE
    absent = {int(rank): why for rank, why in json.loads(word.read_text()).items()} if alive and word.is_file() else {}
    return RunState(path, alive, pid, host, tasks, last, time.time() - metrics.stat().st_mtime if lines else None, absent)


def stop(path: Path, timeout_s: float) -> str:
    """End a run in order; returns what was done.

    Raises:
        UserError: it is not running, or its controller is on another machine that Slurm does not manage.
        DeadlineExceeded: it does not end in time.
    """
    state = look(path)
    jobs = sorted({task.job for task in state.tasks if not task.ended})
    if jobs:
        Slurm().cancel(jobs)
        _wait(path, timeout_s, jobs)
        return f"cancelled Slurm job {', '.join(jobs)}"
    if not state.alive or state.pid is None:
        raise UserError(f"{state.path} is not running")
    if state.host != socket.gethostname():
        raise UserError(f"{state.path} runs on {state.host} as pid {state.pid}; stop it there")
    os.kill(state.pid, signal.SIGINT)
    _wait(path, timeout_s, [])
    return f"ended pid {state.pid}"


def _wait(path: Path, timeout_s: float, jobs: list[str]) -> None:
    slurm = Slurm(cache_s=1.0)
    deadline = time.monotonic() + timeout_s
    while look(path).alive or (jobs and any(not task.ended for task in slurm.tasks(jobs))):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{path} has not ended {timeout_s:g} s after it was told to; see `areal-mega status {path}`")
        time.sleep(0.3)


def _tasks(path: Path) -> list[TaskState]:
    """Tasks of the newest submission of this run."""
    meetings = path.parent / ".tasks" / path.name
    jobs = [folder for folder in meetings.glob("*/") if folder.name.isdigit()] if meetings.is_dir() else []
    if not jobs:
        return []
    newest = max(jobs, key=lambda folder: int(folder.name))
    recorded = (newest / "jobs").read_text().split() if (newest / "jobs").is_file() else []
    return Slurm().tasks(list(dict.fromkeys([newest.name, *recorded])))
