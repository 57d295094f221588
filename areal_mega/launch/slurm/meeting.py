"""Where the tasks of one submission find each other: a folder on the shared file system, beside the run directory.

    <run.root>/.tasks/<run.name>/<job>/<task>.json     address, secret, node, and a name for this start of the task

A folder belongs to one submission, by the id of its Slurm job, so that nothing of an earlier one is ever read. A task that Slurm
starts again writes its file anew under another incarnation; a reader that finds nobody at an address waits for that.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.launch.rundir import write_atomic
from areal_mega.launch.slurm.script import JOB_ENV


@dataclass(frozen=True, slots=True)
class Presence:
    """A task that has started.

    Args:
        task: its number in the run (see ``TaskPlan``).
        incarnation: random, new at every start of the task.
        address: ``host:port`` of its agent.
        token: what callers of the agent must show.
        host: address of its node, where the others reach its processes.
        job: the task's own Slurm job, ``123_4``, for ``scontrol``.
        devices: ``CUDA_VISIBLE_DEVICES`` as Slurm gave it; none where it gave none.
    """

    task: int
    incarnation: str
    address: str
    token: str
    host: str
    job: str
    devices: str | None


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """Who this process is, by what Slurm set in its environment."""

    meeting: str
    task: int
    job: str

    @classmethod
    def current(cls, env: Mapping[str, str], first_task: int) -> ArrayTask:
        """Raises:
        UserError: not an array task.
        """
        try:
            array, index = env["SLURM_ARRAY_JOB_ID"], int(env["SLURM_ARRAY_TASK_ID"])
        except (KeyError, ValueError):
            raise UserError(
                "this is not a task of a Slurm array (SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID); submit with sbatch or "
                "`areal-mega launch RECIPE --on slurm`"
            ) from None
        return cls(env.get(JOB_ENV) or array, first_task + index, f"{array}_{index}")


class Meeting:
    """The folder of one submission."""

    def __init__(self, recipe: Recipe, job: str) -> None:
        self.path = Path(recipe.run.root).absolute() / ".tasks" / recipe.run.name / job

    def enter(self, presence: Presence) -> None:
        """Say that a task is here.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / f"{presence.task}.json", json.dumps(asdict(presence)), mode=0o600)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror or error}; set run.root to a folder that every node can write"
            ) from error

    def record_jobs(self, jobs: Sequence[str]) -> None:
        """Keep the ids of a submission's arrays, the train array first."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / "jobs", "\n".join(jobs) + "\n")

    def recorded_jobs(self) -> tuple[str, ...]:
        """Ids of the submission's arrays as recorded when they were submitted together, the first one first."""
        recorded = (self.path / "jobs").read_text().split() if (self.path / "jobs").exists() else []
        return tuple(dict.fromkeys([self.path.name, *recorded]))

    def present(self) -> dict[int, Presence]:
        """Every task that has said so, by number. It may have died since."""
        try:
            names = os.listdir(self.path)  # listing, not opening by name: a shared file system caches that a name was absent
        except FileNotFoundError:
            return {}
        found = (Presence(**json.loads((self.path / name).read_text())) for name in names if name.endswith(".json") and name[0] != ".")
        return {presence.task: presence for presence in found}


def new_token() -> str:
    return secrets.token_hex(32)


def new_incarnation() -> str:
    return secrets.token_hex(4)
