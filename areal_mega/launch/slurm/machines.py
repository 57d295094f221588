"""The machines of a run that Slurm started: its array tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal_mega.config.schema import Recipe
from areal_mega.launch.commands import visible_devices
from areal_mega.launch.rundir import Key, RunDir
from areal_mega.launch.slurm.remote import RemoteLauncher, Tasks


class SlurmTasks:
    """All processes on the tasks of a submission. The controller is beside task 0."""

    def __init__(self, recipe: Recipe, tasks: Tasks) -> None:
        self._recipe, self._tasks = recipe, tasks
        self._launcher: RemoteLauncher | None = None

    def devices(self, key: Key) -> str:
        """Of those that Slurm gave to the process's own task; none where it gave none (CPU slots have no names)."""
        plan = self._tasks.plan
        given = self._tasks.presence(plan.task_of[key]).devices
        return "" if given is None else visible_devices(plan.slots.get(key, ()), {"CUDA_VISIBLE_DEVICES": given})

    async def launcher(self, run_dir: RunDir, say: Callable[[str], None]) -> RemoteLauncher:
        await self._tasks.gather(range(self._tasks.plan.tasks), say)
        self._launcher = RemoteLauncher(run_dir, self._tasks, startup_timeout_s=self._recipe.launch.startup_timeout_s)
        await self._launcher.begin()
        return self._launcher

    def host(self, key: Key) -> str:
        return self._tasks.presence(self._tasks.plan.task_of[key]).host

    async def ports(self, keys: Sequence[Key]) -> dict[Key, int]:
        assert self._launcher is not None, "ports before launcher"
        return await self._launcher.ports(keys)

    async def close(self, why: str) -> None:
        await self._tasks.leave(why)
