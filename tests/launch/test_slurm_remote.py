"""The controller's side and the agents of a run on tasks, without Slurm: two agents here, started by hand."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from launch_children import READY, SLEEP, spec

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import RunFailed, UserError, WorkerDied
from areal_mega.launch.rundir import RunDir
from areal_mega.launch.slurm import agent, gathering, remote
from areal_mega.launch.slurm.agent import Agent
from areal_mega.launch.slurm.jobs import TaskState
from areal_mega.launch.slurm.machines import SlurmTasks
from areal_mega.launch.slurm.meeting import ArrayTask, Meeting
from areal_mega.launch.slurm.script import plan_of
from areal_mega.launch.watching import Absent, MachineLost
from areal_mega.rpc.client import PeerUnreachable, RpcError

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
        self.tasks = gathering.Tasks(self.recipe, plan_of(self.recipe), Meeting(self.recipe, "77"))
        self.serving: dict[int, asyncio.Task[None]] = {}
        self.agents: dict[int, Agent] = {}

    def agent(self, task: int, token: str = "secret", job: str = "") -> None:
        agent = self.agents[task] = Agent(self.recipe, ArrayTask("77", task, job or f"77_{task}"), "127.0.0.1", token)
        self.serving[task] = asyncio.create_task(agent.serve())

    async def end(self, task: int) -> None:
        serving = self.serving.pop(task)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def launcher(self) -> remote.RemoteLauncher:
        said: list[str] = []
        async with asyncio.timeout(30):
            await self.tasks.gather(range(2), (), said.append)
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


@pytest.mark.parametrize("work", ["saves", "is late"])
async def test_before_a_train_task_ends_the_work_may_end(world: World, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """Then its end is the reason, at once; where the work is late, after the time that there is. The agent leaves when it is done with."""
    monkeypatch.setattr(remote, "SAVE_S", 30.0 if work == "saves" else 0.5)
    launcher = await world.launcher()
    await launcher.launch([spec(SLEEP, *TRAIN), spec(SLEEP, *SERVER)])
    ended: list[str] = []

    async def step() -> None:
        await launcher.leaving.wait()
        if work == "is late":
            await asyncio.sleep(60)
        ended.append("saved")
        raise RunFailed("ended as asked")

    running = asyncio.create_task(launcher.supervise(step()))
    await asyncio.sleep(0.2)
    assert not launcher.leaving.is_set()
    world.agents[0]._on_term()
    with pytest.raises(RunFailed, match=r"task 0 was told to end .*: controller, train rank 0"):
        await asyncio.wait_for(running, 20)
    assert ended == (["saved"] if work == "saves" else []) and not world.serving[0].done()
    await launcher.close()
    await asyncio.wait_for(world.serving.pop(0), 20)


async def test_a_train_rank_that_dies_while_its_task_ends_is_no_news(world: World) -> None:
    launcher = await world.launcher()
    await launcher.launch([spec(SLEEP, *TRAIN), spec(SLEEP, *SERVER)])
    world.agents[0]._on_term()
    await asyncio.wait_for(launcher.leaving.wait(), 20)
    await launcher.kill(TRAIN)
    with pytest.raises(RunFailed, match="task 0 was told to end"):
        await run(launcher)
    await launcher.close()


# --- tasks whose end the run survives


WORKER = ("rollout", 0)


async def lost(launcher: remote.RemoteLauncher) -> list[tuple[Any, Exception]]:
    """What the launcher tells of, once it does."""
    async with asyncio.timeout(30):
        while not (losses := launcher.losses()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return losses


async def test_a_rollout_task_that_is_lost_and_starts_again_is_reached_in_the_same_attempt(world: World) -> None:
    launcher = await world.launcher()
    launcher.survive([SERVER, WORKER])
    await launcher.launch([spec(SLEEP, *TRAIN), spec(SLEEP, *SERVER)])
    assert await launcher.absent() == []
    before = world.tasks.presence(1)
    await world.end(1)
    losses = await lost(launcher)
    assert [key for key, _ in losses] == [SERVER, WORKER]
    assert all(isinstance(error, MachineLost) and "task 1 (inference replica 0) is lost" in str(error) for _, error in losses)
    [absent] = await launcher.absent()
    assert absent == Absent("task 1 (inference replica 0): not seen in the queue", over=False)
    reached = asyncio.create_task(launcher.reach(SERVER))
    await asyncio.sleep(0.2)
    assert not reached.done()
    await launcher.kill(SERVER)  # nothing to be done, and no error
    with pytest.raises(MachineLost):
        await launcher.launch([spec(SLEEP, *SERVER)])
    world.agent(1, token="another")
    await asyncio.wait_for(reached, 30)
    assert world.tasks.presence(1).incarnation != before.incarnation
    await launcher.launch([spec(READY, *SERVER, world.run_dir)])
    async with asyncio.timeout(60):
        await launcher.wait_ready([SERVER])
    assert launcher.losses() == []
    await launcher.close()


async def test_a_task_that_says_that_it_leaves_is_lost_at_once_and_not_taken_for_one_that_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_LAST_WORDS_S", 2.0)
    launcher = await world.launcher()
    launcher.survive([SERVER, WORKER])
    await launcher.launch([spec(SLEEP, *SERVER)])
    world.agents[1]._on_term()
    losses = await lost(launcher)
    assert "task 1 was told to end" in str(losses[0][1]) and len(losses) == 2
    assert not world.serving[1].done() and not await world.tasks.find(1), "it still answers, and is not here"
    await launcher.close()


async def test_a_limit_that_came_before_an_attempt_is_heard_in_it_and_in_no_further_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_EVENTS_S", 0.1)
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    async with asyncio.timeout(30):
        await world.tasks.gather(range(2), (), print)
    world.agents[1]._on_limit()
    world.agents[1]._tell(kind="died", role="server", rank=0, code=1)  # of an attempt before
    for _ in range(2):
        launcher = await world.launcher()
        await asyncio.sleep(0.5)
        launcher._raise_failure()
        await launcher.close()
    assert raised == [signal.SIGUSR1]


async def test_a_task_that_is_told_to_end_while_it_waits_is_not_here(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_LAST_WORDS_S", 5.0)
    async with asyncio.timeout(30):
        await world.tasks.gather(range(2), (), print)
    world.agents[1]._on_term()
    with pytest.raises(RpcError, match="task 1 was told to end"):
        await remote.RemoteLauncher(world.run_dir, world.tasks, startup_timeout_s=60.0).begin()
    assert not await world.tasks.find(1) and not world.serving[1].done()


async def test_the_end_of_a_task_with_one_process_that_matters_ends_the_attempt(world: World) -> None:
    launcher = await world.launcher()
    launcher.survive([WORKER])  # as while weights are under way
    await launcher.launch([spec(SLEEP, *SERVER)])
    world.agents[1]._on_term()
    with pytest.raises(RunFailed, match="task 1 was told to end"):
        await run(launcher)
    await launcher.close()


async def test_a_run_begins_without_a_rollout_task_that_is_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_MOMENT_S", 0.5)
    whole = world.recipe.model_copy(update={"rollout": world.recipe.rollout.model_copy(update={"strategy": "sglang:d2"})})
    tasks = gathering.Tasks(whole, plan_of(whole), Meeting(whole, "77"))
    said: list[str] = []
    async with asyncio.timeout(30):
        await tasks.gather(range(1), range(1, 3), said.append)
    assert said == ["beginning without task 2 (inference replica 1): not seen in the queue; it joins when it is there"]
    assert tasks.here == [0, 1]
    launcher = remote.RemoteLauncher(world.run_dir, tasks, startup_timeout_s=60.0)
    await launcher.begin()
    await asyncio.wait_for(launcher.reach(SERVER), 30)
    late = asyncio.create_task(launcher.reach(("server", 1)))
    await asyncio.sleep(0.2)
    assert not late.done()
    world.agent(2)
    await asyncio.wait_for(late, 30)
    assert (await launcher.ports([("server", 1)]))["server", 1] > 0
    await launcher.close()
    await tasks.leave("")


async def test_a_task_that_answers_no_more_is_not_here_and_one_that_is_not_needed_fails_no_beginning(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_MOMENT_S", 0.5)
    async with asyncio.timeout(30):
        await world.tasks.gather(range(2), (), print)
    await world.end(1)
    launcher = remote.RemoteLauncher(world.run_dir, world.tasks, startup_timeout_s=60.0, needed=1)
    await launcher.begin()  # it was here a moment ago
    assert world.tasks.here == [0]
    await launcher.close()
    strict = remote.RemoteLauncher(world.run_dir, world.tasks, startup_timeout_s=60.0)
    await strict.begin()
    reached = asyncio.create_task(strict.reach(SERVER))
    world.agent(1, token="another")
    await asyncio.wait_for(reached, 30)
    await strict.close()
    await world.end(1)
    with pytest.raises(PeerUnreachable):
        await remote.RemoteLauncher(world.run_dir, world.tasks, startup_timeout_s=60.0).begin()
    assert not await world.tasks.find(1) and world.tasks.here == [0]


def state(task: str, name: str) -> TaskState:
    job, _, index = task.partition("_")
    return TaskState(job, int(index), name, "", "")


async def test_slurms_word_is_kept_apart_by_task_also_where_one_was_submitted_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(30):
        await world.tasks.gather(range(2), (), print)
    await world.end(1)
    world.agent(1, token="another", job="90_1")
    async with asyncio.timeout(30):
        while world.tasks._meeting.present()[1].job != "90_1":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    asked: list[Any] = []

    def found(jobs: Any, *, fresh: bool = False) -> list[TaskState]:
        asked.append(jobs)
        return [state("77_0", "RUNNING"), state("77_1", "CANCELLED"), state("90_1", "RUNNING")]

    monkeypatch.setattr(world.tasks._slurm, "tasks", found)
    states = await world.tasks.states()
    assert asked == [("77", "90")] and {task: f"{each.job} {each.state}" for task, each in states.items()} == {
        0: "77 RUNNING",
        1: "90 RUNNING",
    }
    assert world.tasks.job(1) == "90_1" and world.tasks.job(2) is None


@pytest.mark.parametrize(("why", "goes_on", "requeue", "cancels"), [
    ("", False, True, True), ("it broke", False, True, True), ("time limit", True, True, False), ("time limit", True, False, True),
])  # fmt: skip
async def test_what_still_waits_is_cancelled_unless_the_run_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, why: str, goes_on: bool, requeue: bool, cancels: bool
) -> None:
    cancelled: list[Any] = []
    slurm = world.tasks._slurm
    monkeypatch.setattr(slurm, "tasks", lambda jobs, *, fresh=False: [state("77_0", "RUNNING"), state("77_1", "PENDING")])
    monkeypatch.setattr(slurm, "cancel", cancelled.extend)
    section = world.recipe.launch.slurm.model_copy(update={"requeue": requeue})
    recipe = world.recipe.model_copy(update={"launch": world.recipe.launch.model_copy(update={"slurm": section})})
    await SlurmTasks(recipe, world.tasks).close(why, goes_on=goes_on)
    assert cancelled == (["77_1"] if cancels else [])


class Word:
    """Slurm's, on the task of the controller."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tasks(self, jobs: Any) -> list[TaskState]:
        return [state("77_0", self.name)]


async def test_a_task_that_is_later_than_the_run_ends_as_the_run_did(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "LEASE_S", 0.0)
    late: Any = world.agents[1]
    await late._check_orphaned(Word("RUNNING"))
    with pytest.raises(RunFailed, match="the run's controller is over"):
        await late._check_orphaned(Word("FAILED"))
    assert not world.serving[1].done()
    await late._check_orphaned(Word("COMPLETED"))
    await asyncio.wait_for(world.serving[1], 30)
