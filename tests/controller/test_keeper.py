"""The keeper of inference servers: who dies is started again, so often and no more, and serves with the current weights alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import pytest

from areal_mega.controller.keeper import ReplicaKeeper
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError, WorkerDied
from areal_mega.launch.watching import Absent, MachineLost
from areal_mega.rollout.inference import ServerFault
from areal_mega.rpc.client import RpcError

EVENTS = list[tuple[Any, ...]]


class World:
    """Launcher, servers, workers and weight sync in one; all that happens, in order."""

    def __init__(self, restarts: int, health_s: float = 30.0, queue_s: float = 30.0) -> None:
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
        self.there = {0, 1}
        """Whose worker takes prompts."""
        self.machines: dict[int, asyncio.Event] = {}
        """Set where the machine of a replica is there; none: it always is."""
        self.over = False
        self.states: dict[int, str] = {}
        self.replicas = [FakeReplica(self, rank) for rank in range(2)]
        whole: Any = self
        rollout: Any = Workers(self)
        self.keeper = ReplicaKeeper(
            whole, self.replicas, rollout, whole, restarts=restarts, deadline_s=30.0, health_s=health_s, queue_s=queue_s,  # type: ignore[arg-type]
            say=self.said.append, show=self.states_are,
        )  # fmt: skip

    def states_are(self, states: Mapping[int, str]) -> None:
        self.states = dict(states)

    def survive(self, keys: Iterable[tuple[str, int]]) -> None:
        self.surviving = list(keys)

    def losses(self) -> list[tuple[tuple[str, int], Exception]]:
        found, self.lost = self.lost, []
        return found

    async def reach(self, key: tuple[str, int]) -> None:
        if key[1] in self.machines:
            await self.machines[key[1]].wait()

    async def absent(self) -> list[Absent]:
        return [Absent(f"task {rank}: PENDING", self.over) for rank, event in self.machines.items() if not event.is_set()]

    async def kill(self, key: tuple[str, int]) -> None:
        self.events.append(("kill", key[1]))
        self.die(key[1], role=key[0])

    def lose(self, rank: int) -> None:
        """Of the weight sync."""
        self.events.append(("lose", rank))
        self.members = [member for member in self.members if member != rank]
        self.confirmed.pop(rank, None)

    def admit(self, rank: int, server: Any, able: Any) -> None:
        self.events.append(("admit", rank))
        self.members.append(rank)

    def acknowledged(self, rank: int) -> int:
        return self.confirmed.get(rank, -1)

    def die(self, rank: int, error: Exception | None = None, role: str = "server") -> None:
        if role == "server":
            self.heal[rank].clear()
        death = error or WorkerDied(role=role, rank=rank, cause="killed by SIGKILL", log="l", last_lines="w")
        self.lost.append(((role, rank), death))

    def leave(self, rank: int) -> None:
        """The machine of a replica goes."""
        self.machines[rank] = asyncio.Event()
        for role in ("server", "rollout"):
            self.die(rank, MachineLost(f"task {rank} was told to end"), role)


class Workers:
    """The controller's side of the rollout workers."""

    def __init__(self, world: World) -> None:
        self.world = world

    def lose(self, rank: int) -> None:
        self.world.events.append(("lose worker", rank))
        self.world.there.discard(rank)

    def faulty(self) -> dict[int, str]:
        return self.world.failing

    def has(self, rank: int) -> bool:
        return rank in self.world.there

    async def pump(self) -> None:
        pass

    async def join(self, rank: int, client: Any) -> None:
        assert client is self.world.replicas[rank].worker
        self.world.events.append(("join", rank))
        self.world.there.add(rank)

    async def suspend(self, rank: int, *, deadline_s: float, for_good: bool = False) -> None:
        self.world.failing.pop(rank, None)
        self.world.events.append(("give up" if for_good else "suspend", rank))

    async def resume(self, rank: int, *, deadline_s: float) -> None:
        self.world.events.append(("resume", rank))
        if self.world.resuming is not None:
            await self.world.resuming(rank)


class FakeReplica:
    """A replica, and the client of its server."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.server_key, self.worker_key = ("server", rank), ("rollout", rank)
        self.server = self.worker = self.capabilities = self
        self.missing: set[str] = set()

    @property
    def started(self) -> bool:
        return len(self.missing) < 2

    def lost(self, part: str) -> None:
        self.missing.add(part)

    async def start(self) -> None:
        self.world.events += [("launch" if part == "server" else "launch worker", self.rank) for part in sorted(self.missing)]
        self.missing.clear()

    async def meet_server(self, deadline_s: float) -> None:
        await self.wait_healthy(deadline_s)

    async def meet_worker(self, deadline_s: float) -> None:
        self.world.events.append(("meet", self.rank))

    async def abort_all(self) -> None:
        self.world.events.append(("abort", self.rank))

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
    assert world.surviving == [("server", 0), ("server", 1), ("rollout", 0), ("rollout", 1)] and not revived.done()
    world.die(1)
    await until(world, ("launch", 1))
    assert not revived.done(), "it is not healthy yet"
    world.heal[1].set()
    await asyncio.wait_for(revived, 30)
    assert world.keeper.admit() == (1,) and world.keeper.admit() == ()
    with world.keeper.steady():
        assert world.surviving == [("rollout", 0), ("rollout", 1)]
    assert len(world.surviving) == 4
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
        patch.setattr("areal_mega.controller.keeper._NEWS_S", 0.2)
        await asyncio.wait_for(world.keeper.resume((1,), 5), 30)


async def test_a_death_in_a_sync_that_fails_is_none_to_survive() -> None:
    world = World(restarts=1)
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.1)
    with pytest.raises(RunFailed), world.keeper.steady():
        raise RunFailed("the sync failed")
    assert world.surviving == [("rollout", 0), ("rollout", 1)]
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

    world.replicas[0].wait_healthy = never  # type: ignore[method-assign]
    world.keeper._given_up.add(1)
    world.die(0)
    with pytest.raises(DeadlineExceeded, match="not healthy"):
        await asyncio.wait_for(world.keeper.watch(), 30)


async def test_one_that_never_gets_healthy_is_given_up_where_another_serves() -> None:
    world = World(restarts=1)

    async def never(deadline_s: float) -> None:
        raise DeadlineExceeded("not healthy\n  its log is empty")

    world.replicas[0].wait_healthy = never  # type: ignore[method-assign]
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0)
    await until(world, ("kill", 0), times=2)  # server and worker
    await asyncio.sleep(0.2)
    assert world.said[1] == "replica 0 is given up, for it does not get ready: not healthy" and world.states == {0: world.said[1][13:]}
    assert world.members == [1] and not watch.done()
    await ended(watch)


async def test_one_that_never_gets_healthy_is_given_up_while_another_is_away() -> None:
    world = World(restarts=1)

    async def never(deadline_s: float) -> None:
        raise DeadlineExceeded("not healthy")

    world.replicas[0].wait_healthy = never  # type: ignore[method-assign]
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.1)
    world.leave(1)
    await until(world, ("lose worker", 1))
    world.die(0)
    await until(world, ("kill", 0), times=2)
    await asyncio.sleep(0.2)
    assert world.keeper._given_up == {0} and "replica 0 is given up, for it does not get ready: not healthy" in world.said
    assert world.said[-1].startswith("no replica is there; the run waits") and not watch.done()
    await ended(watch)


@pytest.mark.parametrize(
    "error", [ServerFault("server rank 0", "it reports no version"), RpcError(peer="w", method="connect", kind="X", message="m")]
)
async def test_one_that_lives_and_cannot_be_used_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr("areal_mega.controller.keeper.NEWS_S", 0.3)
    world = World(restarts=4)
    whole = world.replicas[0].meet_server

    async def broken(deadline_s: float) -> None:
        world.replicas[0].meet_server = whole  # type: ignore[method-assign]
        raise error

    world.replicas[0].meet_server = broken  # type: ignore[method-assign]
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0)
    await until(world, ("launch", 0), times=2)
    world.heal[0].set()
    await asyncio.wait_for(world.keeper.revived(), 30)
    assert f"replica 0 is killed, for it does not get ready: {error}" in world.said and not watch.done()
    await ended(watch)


async def test_the_last_one_that_cannot_be_used_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_mega.controller.keeper.NEWS_S", 0.1)
    world = World(restarts=4)
    world.keeper._given_up.add(1)

    async def broken(deadline_s: float) -> None:
        raise ServerFault("server rank 0", "it reports no version")

    world.replicas[0].meet_server = broken  # type: ignore[method-assign]
    world.die(0)
    with pytest.raises(ServerFault, match="no version"):
        await asyncio.wait_for(world.keeper.watch(), 30)


# --- servers that live and are broken


async def ended(watch: asyncio.Task[None]) -> None:
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def gets_weights(world: World, rank: int, version: int) -> None:
    """A server that gets healthy takes part in a push of ``version``, and is let go on."""
    await asyncio.wait_for(world.keeper.revived(), 30)
    assert world.keeper.admit() == (rank,)
    world.confirmed[rank] = version
    await world.keeper.resume((rank,), version)


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
    assert world.said[-1].endswith("; all 1 restarts are used: the run goes on with 1 of 2 replicas") and not watch.done()
    world.die(1)
    with pytest.raises(WorkerDied, match="server rank 1 died"):
        await asyncio.wait_for(watch, 30)


async def test_with_no_server_left_the_run_says_that_it_waits() -> None:
    world = World(restarts=2)
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0)
    world.die(1)
    await until(world, ("launch", 1))
    assert world.said[-1] == "no replica is left; the run waits for one, at most launch.startup_timeout_s=30 s"
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


# --- workers, and whole machines


async def test_a_worker_that_died_is_started_and_joins_with_the_server_that_lives() -> None:
    world = World(restarts=1)
    watch = asyncio.create_task(world.keeper.watch())
    world.heal[1].set()
    world.die(1, role="rollout")
    await until(world, ("join", 1))
    assert world.events == [("lose worker", 1), ("abort", 1), ("launch worker", 1), ("healthy", 1), ("meet", 1), ("join", 1)]
    await asyncio.sleep(0.1)
    assert world.members == [0, 1] and world.states == {}
    assert world.said[0].startswith("rollout rank 1 died: killed by SIGKILL; ") and world.said[0].endswith("it is started again (1 of 1)")
    assert world.said[1:] == ["rollout rank 1 is back; its server has weights of version 5"]
    await ended(watch)


@pytest.mark.parametrize("in_sync", [True, False], ids=["a member of the sync", "not a member"])
async def test_a_worker_that_dies_while_weights_are_under_way_does_not_join_before_its_server_has_them(in_sync: bool) -> None:
    world = World(restarts=3)
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.1)
    world.die(1)
    await until(world, ("launch", 1))
    world.heal[1].set()
    await asyncio.wait_for(world.keeper.revived(), 30)
    with world.keeper.steady():
        new = world.keeper.admit() if in_sync else ()
        world.die(1, role="rollout")
        await until(world, ("meet", 1))
        await asyncio.sleep(0.2)
        assert ("join", 1) not in world.events
        if in_sync:
            world.confirmed[1] = 6
    await world.keeper.resume(new, 6)
    if not in_sync:
        await asyncio.wait_for(world.keeper.revived(), 30)
        assert world.keeper.admit() == (1,)
        world.confirmed[1] = 7
        await asyncio.sleep(0.1)
        await world.keeper.resume((1,), 7)
    await until(world, ("join", 1))
    await asyncio.sleep(0.1)
    assert world.events.count(("join", 1)) == 1 and ("resume", 1) not in world.events and not watch.done()
    await ended(watch)


async def test_a_server_that_dies_while_its_worker_starts_waits_for_weights_with_it() -> None:
    world = World(restarts=2)
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0, role="rollout")
    await until(world, ("launch worker", 0))
    world.die(0)
    await until(world, ("launch", 0))
    world.heal[0].set()
    await asyncio.wait_for(world.keeper.revived(), 30)
    assert ("join", 0) not in world.events
    await gets_weights(world, 0, 6)
    assert world.events.count(("join", 0)) == 1 and world.events.count(("launch worker", 0)) == 1
    await ended(watch)


async def test_without_restarts_left_a_worker_takes_its_server_along() -> None:
    world = World(restarts=1)
    world.keeper.restarts = 1
    watch = asyncio.create_task(world.keeper.watch())
    world.die(0, role="rollout")
    await until(world, ("kill", 0))
    await asyncio.sleep(0.2)
    assert world.members == [1] and not watch.done()
    assert world.said == [world.said[0]] and world.said[0].endswith("all 1 restarts are used: the run goes on with 1 of 2 replicas")
    assert world.states == {0: "given up: rollout rank 0 died: killed by SIGKILL; log: l"}
    world.die(1, role="rollout")
    with pytest.raises(WorkerDied, match="rollout rank 1 died"):
        await asyncio.wait_for(watch, 30)


@pytest.mark.parametrize("why", ["no restart is left", "not ready in time"])
async def test_a_server_is_given_up_after_the_sync_that_it_takes_part_in(why: str) -> None:
    world = World(restarts=1)
    watch = asyncio.create_task(world.keeper.watch())
    if why == "no restart is left":
        world.keeper.restarts = 1
    else:

        async def never(deadline_s: float) -> None:
            raise DeadlineExceeded("its worker is not ready")

        world.replicas[0].meet_worker = never  # type: ignore[method-assign]
        world.heal[0].set()
    with world.keeper.steady():
        world.die(0, role="rollout")
        await asyncio.sleep(0.3)
        assert world.keeper._given_up == {0} and world.members == [0, 1] and ("kill", 0) not in world.events
    await until(world, ("kill", 0))
    assert world.members == [1] and world.events.index(("lose", 0)) < world.events.index(("kill", 0)) and not watch.done()
    await ended(watch)


async def test_a_machine_that_goes_is_waited_for_and_costs_no_restart() -> None:
    world = World(restarts=1)
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.1)
    world.leave(1)
    await until(world, ("lose", 1))
    await asyncio.sleep(0.2)
    assert world.events == [("lose worker", 1), ("lose", 1)] and world.states == {1: "task 1 was told to end"}
    assert world.said == ["task 1 was told to end; the run goes on without replica 1 until that is there again"]
    world.machines[1].set()
    world.heal[1].set()
    await asyncio.wait_for(world.keeper.revived(), 30)
    assert world.events[2:] == [("launch worker", 1), ("launch", 1), ("healthy", 1), ("meet", 1)] and world.keeper.restarts == 0
    await gets_weights(world, 1, 6)
    assert world.events[-1] == ("join", 1) and world.states == {}
    await ended(watch)


async def test_a_replica_that_was_given_up_comes_back_with_another_machine() -> None:
    world = World(restarts=1)
    world.keeper.restarts = 1
    watch = asyncio.create_task(world.keeper.watch())
    world.die(1, role="rollout")
    await until(world, ("kill", 1))
    await asyncio.sleep(0.2)
    assert world.keeper._given_up == {1} and world.replicas[1].missing == {"server", "rollout"}
    world.leave(1)
    await asyncio.sleep(0.2)
    assert world.keeper._given_up == set() and world.states == {1: "task 1 was told to end"}
    world.machines[1].set()
    world.heal[1].set()
    await gets_weights(world, 1, 6)
    assert world.events[-1] == ("join", 1) and world.states == {}
    await ended(watch)


async def test_a_machine_that_is_late_joins() -> None:
    world = World(restarts=1)
    world.machines[1] = asyncio.Event()
    world.replicas[1].missing = {"server", "rollout"}
    world.members, world.there = [0], {0}
    del world.confirmed[1]
    watch = asyncio.create_task(world.keeper.watch())
    await asyncio.sleep(0.2)
    assert world.events == [] and world.states == {1: "not there yet"}
    world.machines[1].set()
    world.heal[1].set()
    await asyncio.wait_for(world.keeper.revived(), 30)
    assert world.keeper.admit() == (1,) and world.events[-2:] == [("meet", 1), ("admit", 1)]
    await ended(watch)


@pytest.mark.parametrize(("over", "error"), [(False, DeadlineExceeded), (True, RunFailed)])
async def test_with_every_machine_gone_the_run_waits_and_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, over: bool, error: type[Exception]
) -> None:
    monkeypatch.setattr("areal_mega.controller.absence._LOOK_S", 0.05)
    world = World(restarts=1, queue_s=0.5)
    world.over = over
    watch = asyncio.create_task(world.keeper.watch())
    world.leave(0)
    world.leave(1)
    with pytest.raises(error, match="task 0: PENDING; task 1: PENDING"):
        await asyncio.wait_for(watch, 30)
    assert [line for line in world.said if line.startswith("no replica")] == [
        "no replica is there; the run waits, at most launch.slurm.queue_timeout_s=0.5 s, for task 0: PENDING; task 1: PENDING"
    ]
