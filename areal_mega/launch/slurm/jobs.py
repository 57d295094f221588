"""What Slurm knows of a job's tasks, by few calls of its own programs. Needs no accounting: the controller alone is asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from areal_mega.core.errors import RunFailed, UserError

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""Not started yet, or to be started again."""
ALIVE = frozenset({"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"})
ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
)
"""Over. A requeued task is PENDING again and not one of these."""

_CALL_S = 30.0
_CACHE_S = 10.0
"""A busy slurmctld serves a whole cluster: one look every so often, for all tasks at once, is what a run may cost it."""
_TASK = re.compile(r"(?P<job>\d+)(?:_(?P<index>\d+))?")


@dataclass(frozen=True, slots=True)
class TaskState:
    """One array task, as squeue shows it. ``nodes`` is empty and ``reason`` says why while it waits."""

    job: str
    index: int
    state: str
    nodes: str
    reason: str

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def running(self) -> bool:
        """On its nodes, or about to be."""
        return self.state in ALIVE or self.state == "CONFIGURING"

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def __str__(self) -> str:
        name = f"Slurm task {self.job}_{self.index}: {self.state}"
        return f"{name} ({self.reason})" if self.reason not in ("", "None") else name


class Slurm:
    """Slurm's client programs. States are cached for a few seconds.

    Args:
        cache_s: an older answer is asked for again.
    """

    def __init__(self, cache_s: float = _CACHE_S) -> None:
        self._cache_s = cache_s
        self._cache: dict[tuple[str, ...], tuple[float, list[TaskState]]] = {}

    def submit(self, script: str, *, env: dict[str, str] | None = None, directory: str | None = None) -> str:
        """Submit a script by its text; returns the job's id.

        Raises:
            UserError: Slurm is absent here, or refuses (an unknown partition, an account without rights, ...).
        """
        done = self._run(["sbatch", "--parsable"], script, env, directory)
        if done.returncode:
            raise UserError(f"sbatch refuses: {_one_line(done.stderr)}; see launch.slurm in the recipe")
        return done.stdout.strip().partition(";")[0]

    def tasks(self, jobs: Sequence[str], *, fresh: bool = False) -> list[TaskState]:
        """The tasks of these jobs that Slurm still remembers (it forgets ended ones after MinJobAge, 5 minutes by default).

        Raises:
            RunFailed: squeue fails for another reason than jobs that it has forgotten.
        """
        key = tuple(jobs)
        asked, known = self._cache.get(key, (0.0, []))
        if not fresh and key in self._cache and time.monotonic() - asked < self._cache_s:
            return known
        # -r: one line per array task, also for those that wait.
        done = self._run(["squeue", "-h", "-r", "-t", "all", "-j", ",".join(jobs), "-o", "%i|%T|%N|%r"])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise RunFailed(f"squeue fails: {_one_line(done.stderr)}")
        found = parse_squeue(done.stdout)
        self._cache[key] = (time.monotonic(), found)
        return found

    def cancel(self, jobs: Sequence[str]) -> None:
        """End these jobs (``123`` or one task of it, ``123_4``).

        Raises:
            UserError: scancel refuses.
        """
        done = self._run(["scancel", *jobs])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise UserError(f"scancel refuses: {_one_line(done.stderr)}")

    def requeue(self, job: str) -> None:
        """Put a running task back into the queue; it starts again with the same id.

        Raises:
            RunFailed: scontrol refuses.
        """
        done = self._run(["scontrol", "requeue", job])
        if done.returncode:
            raise RunFailed(f"scontrol requeue {job} fails: {_one_line(done.stderr)}")

    @staticmethod
    def _run(
        argv: list[str], text: str | None = None, env: dict[str, str] | None = None, directory: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        if shutil.which(argv[0]) is None:
            raise UserError(f"there is no {argv[0]} here; run this on a node with Slurm's client programs")
        full = {**os.environ, **(env or {})}
        try:
            return subprocess.run(argv, input=text, text=True, capture_output=True, timeout=_CALL_S, env=full, cwd=directory)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"{argv[0]} did not answer within {_CALL_S:g} s; is slurmctld up?") from error


def parse_squeue(text: str) -> list[TaskState]:
    """Lines of ``squeue -r -o '%i|%T|%N|%r'``. A job that is no array counts as its own task 0."""
    found = []
    for line in text.splitlines():
        name, state, nodes, reason = (part.strip() for part in line.split("|", 3))
        match = _TASK.fullmatch(name)
        assert match is not None, f"squeue names a task {name!r}"
        found.append(TaskState(match["job"], int(match["index"] or 0), state, nodes, reason))
    return found


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(line.partition("error: ")[2] or line for line in lines) or "no message"
