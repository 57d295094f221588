"""Which array task runs which processes. Pure.

A task is one node, or a slice of one, with a fixed number of slots (GPUs, or CPU slots). Train ranks fill the first tasks and inference
replicas the next ones, so that the array index decides the role and roles never share a task; only a run that fits into one task has
both roles in it. A rollout worker goes where its replica is. The controller runs beside task 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_mega.core.errors import UserError
from areal_mega.launch.rundir import Key
from areal_mega.parallel.strategy import ParallelStrategy


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """The tasks of a run.

    Args:
        train_tasks: the first so many tasks hold train ranks.
        tasks: all of them.
        task_of: task of every process.
        slots: slots of every process that has some, counted within its task.
    """

    train_tasks: int
    tasks: int
    task_of: Mapping[Key, int]
    slots: Mapping[Key, tuple[int, ...]]

    def keys(self, task: int) -> tuple[Key, ...]:
        """The processes of one task."""
        return tuple(key for key, where in self.task_of.items() if where == task)

    def describe(self, task: int) -> str:
        """E.g. ``controller, train ranks 0-7``."""
        parts = ["controller"] if task == 0 else []
        for role, noun in (("train", "train rank"), ("server", "inference replica")):
            ranks = [rank for kind, rank in self.keys(task) if kind == role]
            if ranks:
                parts.append(f"{noun}{'s' * (len(ranks) > 1)} {_span(ranks)}")
        return ", ".join(parts)


def plan_tasks(train: ParallelStrategy, rollout: ParallelStrategy, slots_per_task: int, *, apart: bool = False) -> TaskPlan:
    """Put every process on a task.

    Args:
        slots_per_task: GPUs (or CPU slots) of one task.
        apart: the roles never share a task, even where one task holds them all (they ask Slurm for different resources).

    Raises:
        UserError: a replica does not fit into a task.
    """
    size = rollout.replica_size
    if size > slots_per_task:
        raise UserError(
            f"rollout.strategy {rollout}: one replica takes {size} slots, but a task has launch.slurm.slots_per_task={slots_per_task}; "
            "a replica cannot span tasks: shrink t or p, or give tasks more slots"
        )
    together = not apart and train.world_size + rollout.world_size <= slots_per_task
    train_tasks = -(-train.world_size // slots_per_task)
    task_of: dict[Key, int] = {}
    slots: dict[Key, tuple[int, ...]] = {}
    for rank in range(train.world_size):
        task_of["train", rank], slot = divmod(rank, slots_per_task)
        slots["train", rank] = (slot,)
    per_task = slots_per_task // size
    for replica in range(rollout.dp):
        task, place = (0, replica) if together else divmod(replica, per_task)
        task += 0 if together else train_tasks
        first = place * size + (train.world_size if together else 0)
        task_of["server", replica] = task_of["rollout", replica] = task
        slots["server", replica] = tuple(range(first, first + size))
    rollout_tasks = 0 if together else -(-rollout.dp // per_task)
    return TaskPlan(train_tasks, train_tasks + rollout_tasks, task_of, slots)


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
