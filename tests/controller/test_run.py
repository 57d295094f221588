"""What a run does between its processes: one version per batch, and measurements of a step that contain that step alone."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_workers import World, result, settle
from rollout_samples import group, prompt

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.controller.recover import RecoverPoint, Stopped
from areal_mega.controller.run import Run
from areal_mega.controller.train import NotLoaded
from areal_mega.core import metrics as m
from areal_mega.parallel.balance import CostModel
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse
from areal_mega.rpc.client import PeerUnreachable, RpcError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Trainer:
    """Train ranks that do nothing."""

    async def call(self, method: str, **kwargs: Any) -> list[Any]:
        return []


class Sync:
    """A push that takes a while, over as many servers as there are."""

    def __init__(self) -> None:
        self.members = [0]
        self.pushed: list[int] = []

    async def connect(self) -> None: ...

    async def push(self, version: int) -> dict[str, Any]:
        assert self.members, "nobody to send to"
        self.pushed.append(version)
        await settle()
        return {"time/sync": m.total(60.0)}


class Keeper:
    """Servers that come back when a test says so."""

    def __init__(self, sync: Sync) -> None:
        self.sync = sync
        self.back = asyncio.Event()
        self.dying = 0
        """So many times all members die just as weights are to be sent."""

    async def settled(self) -> None: ...

    async def revived(self) -> None:
        await self.back.wait()

    @contextmanager
    def steady(self) -> Iterator[None]:
        if self.dying:
            self.dying -= 1
            self.sync.members = []
            asyncio.get_running_loop().call_later(0.01, self.back.set)
        yield

    def admit(self) -> tuple[int, ...]:
        if not self.back.is_set():
            return ()
        self.back.clear()
        self.sync.members = [0]
        return (0,)

    async def resume(self, ranks: tuple[int, ...], version: int) -> None: ...


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def log(self, step: int, metrics: Any, histograms: Any) -> None:
        self.lines.append(m.results(metrics))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Cast:
    def __init__(self, world: World, folder: Path, resumed: Any = None, train: Any = None) -> None:
        self.sync, self.log = Sync(), Log()
        self.keeper = Keeper(self.sync)
        parts: Any = {"train": train or Trainer(), "sync": self.sync, "replicas": self.keeper, "observer": self.log, "resumed": resumed}
        self.run = Run(
            world.recipe,
            algorithm_of(world.recipe),
            rollout=world.control,
            valid=[],
            cost=CostModel(attention=0.0),
            run_dir=folder,
            **parts,
        )


async def test_a_version_that_comes_while_a_batch_is_awaited_bounds_all_of_it(tmp_path: Path) -> None:
    async with World(batch=2, eta=0) as world:
        cast = Cast(world, tmp_path)
        cast.run._steps_unsent = 1
        wanted = asyncio.create_task(cast.run.rollout_batch(0))
        await settle()
        room = world.staleness.capacity(world.dispatch.version)
        cast.keeper.back.set()
        await asyncio.sleep(0)
        for _ in range(2):  # the batch is complete while weights are under way
            await world.workers[0].finish(members=[{"versions": {0: 1, 1: 1}}, {"versions": {1: 2}}])
        ready = await asyncio.wait_for(wanted, 20)
        assert cast.sync.pushed == [1] and (cast.run.version, world.dispatch.version) == (1, 1)
        assert ready.stale_tokens == 2 and {s.loss_tokens for group in ready.groups for s in group.samples} == {1, 2}
        assert world.staleness.capacity(1) == room == 0, "this version ended no interval"


async def test_who_dies_just_before_a_sync_is_waited_for(tmp_path: Path) -> None:
    async with World(batch=2, eta=0) as world:
        cast = Cast(world, tmp_path)
        cast.keeper.dying = 1
        await asyncio.wait_for(cast.run._push(), 20)
        assert cast.sync.pushed == [0] and cast.sync.members == [0]


class Saved:
    """Checkpoints by their steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = list(steps)

    def has(self, step: int) -> bool:
        return step in self.steps

    async def save(self, step: int) -> None:
        assert step not in self.steps, "saved twice"
        self.steps.append(step)

    async def finish(self) -> None: ...

    async def drain(self) -> list[Any]:
        return []


@pytest.mark.parametrize(("done", "before", "after"), [(3, (2,), [2, 3]), (3, (3,), [3]), (0, (), [])])
async def test_a_run_that_waits_for_groups_ends_as_soon_as_it_is_asked(
    tmp_path: Path, done: int, before: tuple[int, ...], after: list[int]
) -> None:
    async with World(batch=2, eta=0) as world:
        cast = Cast(world, tmp_path)
        saved: Any = Saved(*before)
        cast.run.recovery = saved
        wanted = asyncio.create_task(cast.run.rollout_batch(done))
        await settle()
        cast.run.stop_asked = True
        with pytest.raises(Stopped, match=f"after step {done}" if done else "before the first step"):
            await asyncio.wait_for(wanted, 20)
        assert saved.steps == after and cast.run.stop_asked


@pytest.mark.parametrize("last", [False, True])
async def test_a_run_that_evaluates_ends_without_when_it_is_asked_but_for_the_last_time(tmp_path: Path, last: bool) -> None:
    async with World(batch=2, eta=0) as world:
        cast = Cast(world, tmp_path)
        cast.run._valid = [prompt("e")]
        evaluated = asyncio.create_task(cast.run._evaluated(3, last=last))
        await settle()
        assert not evaluated.done()
        cast.run.stop_asked = True
        await settle()
        if last:
            assert not evaluated.done()
            await world.workers[0].deliver(result(prompt("e"), made=group("g", [{}]), purpose="eval"))
        assert await asyncio.wait_for(evaluated, 20) is last
        assert (cast.run.last_eval is None) is not last
        assert cast.log.notes == ([] if last else ["the evaluation after step 3 is cut short: the run was asked to end"])


async def test_the_first_step_after_a_resume_is_measured_alone(tmp_path: Path) -> None:
    async with World(batch=2, eta=0) as world:
        world.dispatch.poisoned["p7"] = "broken"
        state = {"rollout": world.control.state(), "train": {}, "step": 4, "version": 4, "first_eval": None, "last_eval": None}
    again = World(batch=2, eta=0, overlapped=False)

    class Point(RecoverPoint):
        def state(self) -> dict[str, Any]:
            return state

    async with again:
        cast = Cast(again, tmp_path, Point(tmp_path, 4))
        cast.run._step_started -= 1000
        await cast.run.begin()
        assert cast.sync.pushed == [4] and cast.run.first_step == 4
        cast.run._metrics.append({"batch/trained_tokens": m.total(1), "batch/samples": m.total(1)})
        cast.run._log(5)
        [line] = cast.log.lines
        assert "time/sync" not in line and line["time/total"] < 500
        assert line["rollout/late"] == line["rollout/withdrawn"] == line["rollout/refilled"] == 0
        assert not any("is poisoned" in note for note in cast.log.notes), "it was said before the resume"
        assert any("weights of version 4 sent" in note for note in cast.log.notes)


class Fetching(Trainer):
    """Ranks that find a worker gone when they fetch their first batch."""

    layout = RankLayout(parse("megatron:d1"))

    def __init__(self, world: World) -> None:
        self.world, self.tried = world, 0

    async def step(self, batch: Any, *, step: int, version: int) -> dict[str, Any]:
        self.tried += 1
        if self.tried == 1:
            gone = self.world.workers[0]
            asyncio.get_running_loop().call_later(0.05, self.world.control.lose, 0)
            error = PeerUnreachable(peer="rollout worker", address=gone.address, method="fetch", reason="connection refused")
            raise NotLoaded(str(error)) from RpcError(peer="train rank 0", method="load", kind="PeerUnreachable", message=str(error))
        if self.tried == 3:
            raise NotLoaded("broken") from RpcError(peer="train rank 0", method="load", kind="AssertionError", message="broken")
        return {}


async def test_a_batch_whose_worker_is_lost_before_it_was_fetched_is_not_trained_and_another_one_is(tmp_path: Path) -> None:
    async with World(workers=2, batch=2, eta=1) as world:
        train = Fetching(world)
        cast = Cast(world, tmp_path, train=train)
        for worker in world.workers:
            await worker.finish()
        ready = await cast.run.rollout_batch(0)
        training = asyncio.create_task(cast.run.train_step(0, ready))
        async with asyncio.timeout(20):
            while not world.control.counts["lost_groups"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await settle()
        while not training.done():
            if world.workers[1].running:
                await world.workers[1].finish()
            await settle()
            await asyncio.sleep(0.01)
        await training
        assert cast.log.notes == ["step 1: 1 of 2 groups were lost with their rollout worker; generated again"]
        [line] = map(json.loads, (tmp_path / "trained.jsonl").read_text().splitlines())
        assert len(line["prompts"]) == 2 and train.tried == 2 and world.staleness.consumed == 2
        assert ready.groups[0].prompt.id == "p0", "it was in the batch that was given up, and is generated again"
        # What went wrong otherwise is what it was.
        while world.workers[1].running:
            await world.workers[1].finish()
        await settle()
        with pytest.raises(NotLoaded, match="broken"):
            await cast.run.train_step(1, await cast.run.rollout_batch(1))
