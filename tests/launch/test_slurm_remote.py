"""The controller's side and the agents of a run on tasks, without Slurm: two agents here, started by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from launch_children import READY, SLEEP, spec

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import RunFailed, UserError, WorkerDied
from areal_mega.launch.rundir import RunDir
from areal_mega.launch.slurm import remote
from areal_mega.launch.slurm.agent import Agent
from areal_mega.launch.slurm.meeting import ArrayTask, Meeting
from areal_mega.launch.slurm.script import plan_of

TRAIN, SERVER = ("train", 0), ("server", 0)


class World:
    """Two tasks: one with a train rank, one with a replica."""

    def __init__(self, root: Path) -> None:
        self.recipe = Recipe.model_validate(
            {
                "run": {"name": "one", "root": str(root), "steps": 1},
                "model": {"path": "m"},
                "launch": {"slurm": {"slots_per_task": 1}, "startup_timeout_s": 60.0, "shutdown_timeout_s": 2.0},
            }
        )
        self.run_dir = RunDir.create(self.recipe)
        self.tasks = remote.Tasks(self.recipe, plan_of(self.recipe), Meeting(self.recipe, "77"))
        self.serving: dict[int, asyncio.Task[None]] = {}

    def agent(self, task: int, token: str = "secret") -> None:
        agent = Agent(self.recipe, ArrayTask("77", task, f"77_{task}"), "127.0.0.1", token)
        self.serving[task] = asyncio.create_task(agent.serve())

    async def end(self, task: int) -> None:
        serving = self.serving.pop(task)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def launcher(self) -> remote.RemoteLauncher:
        said: list[str] = []
        async with asyncio.timeout(30):
            await self.tasks.gather(range(2), said.append)
        launcher = remote.RemoteLauncher(self.run_dir, self.tasks, startup_timeout_s=60.0)
        await launcher.begin()
        return launcher


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv("PATH", "/nowhere")  # no squeue, which must matter to nothing here
    monkeypatch.setattr(remote, "_LOST_S", 0.5)
    world = World(tmp_path)
    for task in range(2):
        world.agent(task)
    yield world
    await world.tasks.leave("")
    for task in list(world.serving):
        await world.end(task)


async def run(launcher: remote.RemoteLauncher) -> Any:
    async with asyncio.timeout(60):
        return await launcher.supervise(asyncio.sleep(50))


async def test_processes_start_on_their_tasks_and_a_death_is_named(world: World) -> None:
    launcher = await world.launcher()
    await launcher.launch([spec(READY, *TRAIN, world.run_dir), spec(READY, *SERVER, world.run_dir)])
    async with asyncio.timeout(60):
        found = await launcher.wait_ready([TRAIN, SERVER])
    assert found[TRAIN]["hello"] == "there"
    await launcher.kill(TRAIN)
    with pytest.raises(WorkerDied, match="train rank 0 died: killed by SIGKILL"):
        await run(launcher)
    await launcher.close()


async def test_a_server_that_refuses_its_command_line_is_a_users_mistake(world: World) -> None:
    launcher = await world.launcher()
    await launcher.launch([spec("import sys; print('error: no such flag'); sys.exit(2)", *SERVER)])
    with pytest.raises(UserError, match="server rank 0: no such flag"):
        await run(launcher)
    await launcher.close()


async def test_a_task_that_is_gone_is_named_though_slurm_cannot_be_asked(world: World) -> None:
    launcher = await world.launcher()
    await launcher.launch([spec(SLEEP, *TRAIN), spec(SLEEP, *SERVER)])
    await world.end(1)
    with pytest.raises(RunFailed, match=r"task 1 \(inference replica 0\) is lost: agent of task 1"):
        await run(launcher)
    await launcher.close()


async def test_a_task_that_comes_back_is_taken_up_by_the_next_attempt(world: World) -> None:
    launcher = await world.launcher()
    await launcher.launch([spec(SLEEP, *SERVER)])
    before = world.tasks.presence(1)
    await world.end(1)
    with pytest.raises(RunFailed, match="is lost"):
        await run(launcher)
    await launcher.close()
    world.agent(1, token="another")
    world.run_dir.next_attempt(world.recipe)
    again = await world.launcher()
    assert world.tasks.presence(1).incarnation != before.incarnation
    await again.launch([spec(READY, *SERVER, world.run_dir)])
    async with asyncio.timeout(60):
        await again.wait_ready([SERVER])
    await again.close()
    await world.tasks.leave("")
    async with asyncio.timeout(30):
        await asyncio.gather(*world.serving.values())


async def test_tasks_of_a_failed_run_fail(world: World) -> None:
    await (await world.launcher()).close()
    await world.tasks.leave("it broke")
    for serving in world.serving.values():
        with pytest.raises(RunFailed, match="the run failed: it broke; task 0 has the whole story"):
            await asyncio.wait_for(serving, 30)
    world.serving.clear()


async def test_a_stranger_at_an_agents_address_is_a_lost_task(world: World) -> None:
    launcher = await world.launcher()
    world.tasks.agent(1)._headers["Authorization"] = "Bearer of another start"
    with pytest.raises(RunFailed, match=r"task 1 \(inference replica 0\) is lost: .*wrong token"):
        await run(launcher)
    await launcher.close()
