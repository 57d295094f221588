"""The keeper of inference servers: who dies is started again, so often and no more, and serves with the current weights alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from areal_mega.controller.servers import ServerKeeper, server_specs
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError, WorkerDied
from areal_mega.launch.local import ProcessSpec

EVENTS = list[tuple[Any, ...]]


class World:
    """Launcher, servers, workers and weight sync in one; all that happens, in order."""

    def __init__(self, restarts: int, health_s: float = 30.0) -> None:
        self.events: EVENTS = []
        self.lost: list[tuple[tuple[str, int], Exception]] = []
        self.surviving: list[tuple[str, int]] = []
        self.heal: dict[int, asyncio.Event] = {0: asyncio.Event(), 1: asyncio.Event()}
        self.said: list[str] = []
        self.members = [0, 1]
        self.versions, self.confirmed = {0: 5, 1: 5}, {0: 5, 1: 5}
        self.silent: set[int] = set()
        self.failing: dict[int, str] = {}
        self.resuming: Callable[[int], Awaitable[None]] | None = None
        specs = server_specs([ProcessSpec(role=role, rank=rank, argv=["x"]) for role in ("train", "server") for rank in (1, 0)])
        peers: Any = [Peer(self, 0), Peer(self, 1)]
        self.keeper = ServerKeeper(
            self, specs, peers, self, self, restarts=restarts, deadline_s=30.0, health_s=health_s, say=self.said.append  # type: ignore[arg-type]
        )  # fmt: skip

    def survive(self, keys: Iterable[tuple[str, int]]) -> None:
        self.surviving = list(keys)

    def losses(self) -> list[tuple[tuple[str, int], Exception]]:
        found, self.lost = self.lost, []
        return found

    async def launch(self, specs: Iterable[ProcessSpec]) -> None:
        self.events += [("launch", spec.rank) for spec in specs]

    async def kill(self, key: tuple[str, int]) -> None:
        self.events.append(("kill", key[1]))
        self.die(key[1])

    def lose(self, rank: int) -> None:
        self.events.append(("lose", rank))
        self.members = [member for member in self.members if member != rank]
        self.confirmed.pop(rank, None)

    def admit(self, rank: int) -> None:
        self.events.append(("admit", rank))
        self.members.append(rank)

    def acknowledged(self, rank: int) -> int:
        return self.confirmed.get(rank, -1)

    def faulty(self) -> dict[int, str]:
        return self.failing

    async def suspend(self, rank: int, *, deadline_s: float, for_good: bool = False) -> None:
        self.failing.pop(rank, None)
        self.events.append(("give up" if for_good else "suspend", rank))

    async def resume(self, rank: int, *, deadline_s: float) -> None:
        self.events.append(("resume", rank))
        if self.resuming is not None:
            await self.resuming(rank)

    def die(self, rank: int, error: Exception | None = None) -> None:
        self.heal[rank].clear()
        death = error or WorkerDied(role="server", rank=rank, cause="killed by SIGKILL", log="l", last_lines="w")
        self.lost.append((("server", rank), death))


class Peer:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank

    async def weight_version(self) -> int:
        if self.rank in self.world.silent:
            await asyncio.Event().wait()
        return self.world.versions[self.rank]

    async def wait_healthy(self, deadline_s: float) -> None:
        if not self.world.heal[self.rank].is_set():
            await self.world.heal[self.rank].wait()
        self.world.events.append(("healthy", self.rank))


async def until(world: World, event: tuple[Any, ...], times: int = 1) -> None:
    async with asyncio.timeout(30):
        while world.events.count(event) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_dead_server_is_started_and_waits_for_weights() -> None:
    world = World(restarts=1)
    watch = asyncio.create_task(world.keeper.watch())
    revived = asyncio.create_task(world.keeper.revived())
    await asyncio.sleep(0.1)
    assert world.surviving == [("server", 0), ("server", 1)] and not revived.done()
    world.die(1)
    await until(world, ("launch", 1))
    assert not revived.done(), "it is not healthy yet"
    world.heal[1].set()
    await asyncio.wait_for(revived, 30)
    assert world.keeper.admit() == (1,) and world.keeper.admit() == ()
    with world.keeper.steady():
        assert world.surviving == []
    assert len(world.surviving) == 2
    world.confirmed[1] = 7
    await world.keeper.resume((1,), 7)
    assert world.events == [("lose", 1), ("suspend", 1), ("launch", 1), ("healthy", 1), ("admit", 1), ("resume", 1)]
    assert world.said[0].startswith("server rank 1 died: killed by SIGKILL; ") and world.said[0].endswith("it is started again (1 of 1)")
    assert world.said[1] == "server rank 1 is back, with weights of version 7"
    await ended(watch)


async def test_one_that_dies_before_its_worker_goes_on_is_not_back() -> None:
    world = World(restarts=2)
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.1)
    world.die(1)
    await until(world, ("launch", 1))
    world.heal[1].set()
    await asyncio.wait_for(world.keeper.revived(), 30)
    with world.keeper.steady():
        new = world.keeper.admit()
        world.confirmed[1] = 7
    world.die(1)
    await until(world, ("lose", 1), times=2)
    await world.keeper.resume(new, 7)
    assert ("resume", 1) not in world.events and not any("is back" in line for line in world.said) and not watch.done()
    await ended(watch)


@pytest.mark.parametrize("noticed", ["by the worker", "here"])
async def test_one_that_dies_while_its_worker_goes_on_is_not_back(noticed: str) -> None:
    world = World(restarts=2)
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.1)

    async def dies(rank: int) -> None:
        world.die(rank)
        if noticed == "here":
            await asyncio.Event().wait()
        raise RunFailed("rollout rank 1: resume: ServerFault: connection failed")

    world.resuming = dies
    async with asyncio.timeout(30):
        await world.keeper.resume((1,), 5)
    assert world.events.count(("launch", 1)) <= 1 and ("lose", 1) in world.events
    assert not any("is back" in line for line in world.said) and not watch.done()
    await ended(watch)


async def test_a_worker_that_cannot_go_on_with_a_server_that_lives_ends_the_run() -> None:
    world = World(restarts=2)

    async def fails(rank: int) -> None:
        raise RunFailed("rollout rank 1: resume: ServerFault: it lies")

    world.resuming = fails
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed, match="it lies"):
        patch.setattr("areal_mega.controller.servers._NEWS_S", 0.2)
        await asyncio.wait_for(world.keeper.resume((1,), 5), 30)


async def test_a_death_in_a_sync_that_fails_is_none_to_survive() -> None:
    world = World(restarts=1)
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.1)
    with pytest.raises(RunFailed), world.keeper.steady():
        raise RunFailed("the sync failed")
    assert world.surviving == []
    await ended(watch)


async def test_one_that_dies_while_it_starts_is_started_once_more() -> None:
    world = World(restarts=2)
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0)
    await until(world, ("launch", 0))
    world.die(0)
    await until(world, ("launch", 0), times=2)
    world.heal[0].set()
    await asyncio.wait_for(world.keeper.revived(), 30)
    assert world.events.count(("healthy", 0)) == 1 and world.keeper.restarts == 2
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


@pytest.mark.parametrize(
    ("restarts", "error"), [(0, None), (3, UserError("server rank 0: no such model"))], ids=["none allowed", "a user's mistake"]
)
async def test_what_is_not_started_again_ends_the_watch(restarts: int, error: Exception | None) -> None:
    world = World(restarts)
    world.die(0, error)
    with pytest.raises(UserError if error else WorkerDied, match="server rank 0"):
        await asyncio.wait_for(world.keeper.watch(), 30)
    assert world.events == []


async def test_one_that_never_gets_healthy_ends_the_watch() -> None:
    world = World(restarts=1)

    async def never(deadline_s: float) -> None:
        raise DeadlineExceeded("not healthy")

    world.keeper._servers[0].wait_healthy = never  # type: ignore[method-assign]
    world.die(0)
    with pytest.raises(DeadlineExceeded, match="not healthy"):
        await asyncio.wait_for(world.keeper.watch(), 30)


# --- servers that live and are broken


async def ended(watch: asyncio.Task[None]) -> None:
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_one_that_hangs_is_killed_and_started_again() -> None:
    world = World(restarts=1, health_s=0.2)
    world.silent.add(0)
    watch = asyncio.create_task(world.keeper.watch())
    await until(world, ("launch", 0))
    assert world.events == [("kill", 0), ("lose", 0), ("suspend", 0), ("launch", 0)]
    said = world.said[0]
    assert said.startswith("server rank 0 died: killed, for it did not answer a health check within launch.server_health_timeout_s=0.2 s;")
    assert said.endswith("it is started again (1 of 1)")
    await ended(watch)


async def test_an_old_version_is_noticed_between_two_syncs() -> None:
    world = World(restarts=1, health_s=0.2)
    world.versions[1] = 4
    watch = asyncio.create_task(world.keeper.watch())
    await until(world, ("launch", 1))
    assert "killed, for it reports weight version 4 although it had confirmed version 5;" in world.said[0]
    await ended(watch)


async def test_one_that_fails_attempt_after_attempt_is_started_again() -> None:
    world = World(restarts=1)
    world.failing[1] = "/generate answered malformed JSON"
    watch = asyncio.create_task(world.keeper.watch())
    await until(world, ("launch", 1))
    assert world.events.count(("kill", 1)) == 1
    assert "failed attempt after attempt; last: /generate answered malformed JSON" in world.said[0]
    await ended(watch)


async def test_without_restarts_left_the_others_go_on_and_the_last_one_ends_the_run() -> None:
    world = World(restarts=1)
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0)
    await until(world, ("launch", 0))
    world.die(0)
    await until(world, ("give up", 0))
    assert world.said[-1].endswith("; all 1 restarts are used: the run goes on with 1 of 2 servers") and not watch.done()
    world.die(1)
    with pytest.raises(WorkerDied, match="server rank 1 died"):
        await asyncio.wait_for(watch, 30)


async def test_with_no_server_left_the_run_says_that_it_waits() -> None:
    world = World(restarts=2)
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0)
    world.die(1)
    await until(world, ("launch", 1))
    assert world.said[-1] == "no inference server is left; the run waits for one, at most launch.startup_timeout_s=30 s"
    await ended(watch)


async def test_a_hang_ends_a_run_that_starts_nobody_again() -> None:
    world = World(restarts=0, health_s=0.2)
    world.silent.add(0)
    with pytest.raises(RunFailed, match=r"server rank 0 did not answer a health check within .*; launch.server_restarts is 0"):
        await asyncio.wait_for(world.keeper.watch(), 30)


async def test_nobody_is_judged_while_weights_are_under_way_nor_sent_weights_while_dying() -> None:
    world = World(restarts=1, health_s=0.2)
    world.silent.add(0)
    watch = asyncio.create_task(world.keeper.watch())
    with world.keeper.steady():
        await asyncio.sleep(0.6)
        assert world.events == []
    await until(world, ("kill", 0))
    await asyncio.wait_for(world.keeper.settled(), 30)
    assert ("lose", 0) in world.events
    await ended(watch)


async def test_one_that_hangs_takes_no_part_in_the_next_sync() -> None:
    world = World(restarts=1, health_s=0.5)
    watch = asyncio.create_task(world.keeper.watch())
    world.silent.add(1)
    await asyncio.wait_for(world.keeper.settled(), 30)
    assert world.members == [0] and world.events.count(("kill", 1)) == 1
    await ended(watch)
