"""The machines of a run that Slurm started: its array tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal_mega.config.schema import Recipe
from areal_mega.launch.commands import visible_devices
from areal_mega.launch.rundir import Key, RunDir
from areal_mega.launch.slurm.gathering import Tasks
from areal_mega.launch.slurm.remote import RemoteLauncher


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
        """When all train tasks are here, and a rollout task; all of those where the run would not survive the loss of one."""
        plan = self._tasks.plan
        needed = plan.train_tasks if self._recipe.launch.server_restarts else plan.tasks
        await self._tasks.gather(range(needed), range(needed, plan.tasks), say)
        startup_s = self._recipe.launch.startup_timeout_s
        self._launcher = RemoteLauncher(run_dir, self._tasks, startup_timeout_s=startup_s, needed=needed)
        await self._launcher.begin()
        return self._launcher

    def is_here(self, key: Key) -> bool:
        return self._tasks.plan.task_of[key] in self._tasks.here

    def host(self, key: Key) -> str:
        return self._tasks.presence(self._tasks.plan.task_of[key]).host

    async def ports(self, keys: Sequence[Key]) -> dict[Key, int]:
        assert self._launcher is not None, "ports before launcher"
        return await self._launcher.ports(keys)

    async def close(self, why: str, *, goes_on: bool) -> None:
        # One that starts when the run has ended would hold its devices for nothing.
        if not (goes_on and self._recipe.launch.slurm.requeue):
            await self._tasks.cancel_waiting()
        await self._tasks.leave(why)
