"""The keeper of inference servers: who dies is started again, so often and no more, and serves with the current weights alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from areal_mega.controller.servers import ServerKeeper, server_specs
from areal_mega.core.errors import DeadlineExceeded, UserError, WorkerDied
from areal_mega.launch.local import ProcessSpec

EVENTS = list[tuple[Any, ...]]


class World:
    """Launcher, servers, workers and weight sync in one; all that happens, in order."""

    def __init__(self, restarts: int) -> None:
        self.events: EVENTS = []
        self.lost: list[tuple[tuple[str, int], Exception]] = []
        self.surviving: list[tuple[str, int]] = []
        self.heal: dict[int, asyncio.Event] = {0: asyncio.Event(), 1: asyncio.Event()}
        self.said: list[str] = []
        specs = server_specs([ProcessSpec(role=role, rank=rank, argv=["x"]) for role in ("train", "server") for rank in (1, 0)])
        peers: Any = [Peer(self, 0), Peer(self, 1)]
        self.keeper = ServerKeeper(
            self, specs, peers, peers, self, restarts=restarts, deadline_s=30.0, say=self.said.append  # type: ignore[arg-type]
        )  # fmt: skip

    def survive(self, keys: Iterable[tuple[str, int]]) -> None:
        self.surviving = list(keys)

    def losses(self) -> list[tuple[tuple[str, int], Exception]]:
        found, self.lost = self.lost, []
        return found

    async def launch(self, specs: Iterable[ProcessSpec]) -> None:
        self.events += [("launch", spec.rank) for spec in specs]

    def lose(self, rank: int) -> None:
        self.events.append(("lose", rank))

    def admit(self, rank: int) -> None:
        self.events.append(("admit", rank))

    def kill(self, rank: int, error: Exception | None = None) -> None:
        self.heal[rank].clear()
        death = error or WorkerDied(role="server", rank=rank, cause="killed by SIGKILL", log="l", last_lines="w")
        self.lost.append((("server", rank), death))


class Peer:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank

    async def call(self, method: str, **kwargs: Any) -> None:
        self.world.events.append((method, self.rank))

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
    world.kill(1)
    await until(world, ("launch", 1))
    assert not revived.done(), "it is not healthy yet"
    world.heal[1].set()
    await asyncio.wait_for(revived, 30)
    assert world.keeper.admit() == (1,) and world.keeper.admit() == ()
    with world.keeper.steady():
        assert world.surviving == []
    assert len(world.surviving) == 2
    await world.keeper.resume((1,), 7)
    assert world.events == [("lose", 1), ("suspend", 1), ("launch", 1), ("healthy", 1), ("admit", 1), ("resume", 1)]
    assert world.said[0].startswith("server rank 1 died: killed by SIGKILL; ") and world.said[0].endswith("it is started again (1 of 1)")
    assert world.said[1] == "server rank 1 is back, with weights of version 7"
    world.kill(0)
    with pytest.raises(WorkerDied, match="server rank 0 died"):
        await asyncio.wait_for(watch, 30)


async def test_one_that_dies_while_it_starts_is_started_once_more() -> None:
    world = World(restarts=2)
    watch = asyncio.create_task(world.keeper.watch())
    world.kill(0)
    await until(world, ("launch", 0))
    world.kill(0)
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
    world.kill(0, error)
    with pytest.raises(UserError if error else WorkerDied, match="server rank 0"):
        await asyncio.wait_for(world.keeper.watch(), 30)
    assert world.events == []


async def test_one_that_never_gets_healthy_ends_the_watch() -> None:
    world = World(restarts=1)

    async def never(deadline_s: float) -> None:
        raise DeadlineExceeded("not healthy")

    world.keeper._servers[0].wait_healthy = never  # type: ignore[method-assign]
    world.kill(0)
    with pytest.raises(DeadlineExceeded, match="not healthy"):
        await asyncio.wait_for(world.keeper.watch(), 30)
