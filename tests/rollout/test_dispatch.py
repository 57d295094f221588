"""Dispatch on a simulated clock: whatever happens in whatever order, no prompt is lost or doubled and no bound is exceeded."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import group

from areal_mega.core.types import Group
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.dispatch import Dispatch, DispatchSettings, Flight, ReadyBatch, RolloutFailed
from areal_mega.rollout.routing import Router, prefix_blocks
from areal_mega.rollout.staleness import StaleAction, StalenessControl

ROWS = [{"id": f"p{i}", "prompt": f"{i}", "answer": "1"} for i in range(7)]
DEADLINE = 50.0


def dispatch_settings(**changes: Any) -> DispatchSettings:
    base: dict[str, Any] = {
        "batch_size": 2,
        "action": "mask_token",
        "group_size": 2,
        "max_per_replica": 3,
        "attempts": 2,
        "max_poisoned": 100,
        "deadline_s": DEADLINE,
        "lone_is_useless": False,
        "uniform_is_useless": False,
        "expected_tokens": 10.0,
    }
    return DispatchSettings(**{**base, **changes})


class World:
    """A dispatch, what its replicas run, and the books that a bystander keeps of every prompt."""

    def __init__(self, eta: int = 1, total: int | None = None, rows: int = len(ROWS), always: bool = True, **changes: Any) -> None:
        self.settings = dispatch_settings(**changes)
        self.batch, self.eta, self.version, self.now = self.settings.batch_size, eta, 0, 0.0
        self.drawn: Counter[tuple[str, int]] = Counter()
        self.gone: Counter[tuple[str, int]] = Counter()
        """Rejected, poisoned, or filtered."""
        self.trained: Counter[tuple[str, int]] = Counter()
        self.trained_ids: set[str] = set()
        self.began: dict[int, int] = {}
        self.finished_late: list[Flight] = []
        self.total, self.rows, self.always = total, rows, always
        self.dispatch = self.fresh()
        for name in ("a", "b"):
            self.dispatch.replica_joined(name)

    def fresh(self) -> Dispatch:
        stream = PromptStream(ROWS[: self.rows], seed=1, shuffle=True)
        made = Dispatch(stream, StalenessControl(self.batch, self.eta, total=self.total), self.settings)
        if self.always:
            made.generate_always()
        return made

    def pump(self) -> None:
        for flight in self.dispatch.submissions(self.now):
            self.began[flight.ticket] = self.version

    def pick(self, index: int) -> Flight | None:
        flying = list(self.dispatch.flying.values())
        return flying[index % len(flying)] if flying else None

    def finish(self, index: int, useless: bool = False) -> None:
        if flight := self.pick(index):
            self.dispatch.finished(flight.ticket, self.group_of(flight, useless), {})
            if useless and self.settings.uniform_is_useless:
                self.gone[key(flight)] += 1

    def group_of(self, flight: Flight, useless: bool = False) -> Group:
        versions = {v: 1 + v % 2 for v in range(self.began[flight.ticket], self.version + 1)}
        members = [{"versions": versions, "reward": 0.0}, {"versions": {self.version: 3}, "reward": 0.0 if useless else 1.0}]
        return group(f"{flight.prompt.id}/{flight.prompt.epoch}/{flight.ticket}", members, of=flight.prompt, worker=flight.replica)

    def reject(self, index: int) -> None:
        if flight := self.pick(index):
            self.dispatch.rejected(flight.ticket, "no", {})
            self.gone[key(flight)] += 1

    def fail(self, index: int) -> None:
        if (flight := self.pick(index)) and not self.dispatch.failed(flight.ticket, "boom", {}, server_fault=True):
            self.gone[key(flight)] += 1

    def time_out(self, index: int) -> None:
        """One is given up, and its answer comes all the same."""
        if flight := self.pick(index):
            if not self.dispatch.timed_out(flight.ticket, "slow"):
                self.gone[key(flight)] += 1
            self.finished_late.append(flight)

    def late_answer(self, index: int) -> None:
        if self.finished_late:
            flight = self.finished_late.pop(index % len(self.finished_late))
            made = self.group_of(flight)
            self.dispatch.finished(flight.ticket, made, {})
            assert self.dispatch.discarded[-1] is made

    def lose(self, index: int) -> None:
        names = sorted(self.dispatch.router.replicas)
        if len(names) > 1:
            self.dispatch.replica_lost(names[index % len(names)])

    def join(self, index: int) -> None:
        name = "abcd"[index % 4]
        if name not in self.dispatch.router.replicas:
            self.dispatch.replica_joined(name)

    def down(self, index: int) -> None:
        """A server goes; some of what ran there is taken back, and the rest ends by itself."""
        names = sorted(self.dispatch.router.replicas)
        name = names[index % len(names)]
        self.dispatch.replica_down(name)
        mine = [f.ticket for f in self.dispatch.flying.values() if f.replica == name]
        self.dispatch.withdrawn(mine[index % 2 :])
        self.dispatch.withdrawn([10_000])  # given up before
        self.pump()
        assert not [f for f in self.dispatch.flying.values() if f.replica == name and f.ticket not in mine[: index % 2]]

    def up(self, index: int) -> None:
        names = sorted(self.dispatch.router.replicas)
        self.dispatch.replica_up(names[index % len(names)])

    def answer_old(self, index: int) -> None:
        flight = self.pick(index)
        if flight is None or not flight.version:
            return
        made = group(
            f"{flight.ticket}-old", [{"versions": {flight.version - 1: 1, self.version: 2}}], of=flight.prompt, worker=flight.replica
        )
        assert "although it had confirmed" in self.dispatch.finished(flight.ticket, made, {})
        assert self.dispatch.discarded[-1] is made
        if flight.prompt.id in self.dispatch.poisoned:
            self.gone[key(flight)] += 1

    def wait(self, index: int) -> None:
        self.now += index
        for flight in self.dispatch.overdue(self.now):
            assert self.now - flight.since > DEADLINE
            if not self.dispatch.timed_out(flight.ticket, "overdue"):
                self.gone[key(flight)] += 1

    def train(self, index: int = 0) -> None:
        ready = self.dispatch.take(self.batch)
        if ready is not None and index % 3 == 1:  # a replica is lost before the trainer has fetched everything
            self.lose(index)
            if self.dispatch.torn:
                before = len(self.dispatch.ready)
                kept = self.batch - self.dispatch.give_back()
                assert len(self.dispatch.ready) == before + kept < before + self.batch and not self.dispatch.torn
                return
        if ready is not None:
            self.check_batch(ready)
            self.version += 1
            self.dispatch.version_changed(self.version)

    def recover(self, index: int = 0) -> None:
        state = json.loads(json.dumps(self.dispatch.state()))
        replicas = list(self.dispatch.router.replicas)
        self.dispatch = self.fresh()
        self.dispatch.restore(state)
        for name in replicas:
            self.dispatch.replica_joined(name)
        self.finished_late.clear()
        assert json.loads(json.dumps(self.dispatch.state())) == state

    def check_batch(self, ready: ReadyBatch) -> None:
        assert len(ready.groups) == len(ready.taken) == self.batch
        for g in ready.groups:
            assert g.id not in self.trained_ids, "trained twice"
            self.trained_ids.add(g.id)
            self.trained[g.prompt.id, g.prompt.epoch] += 1
            assert all(self.version - v.version <= self.eta for s in g.samples for v in s.versions)

    def check(self) -> None:
        d = self.dispatch
        control = d.staleness
        started = control.running + control.ready + control.consumed
        assert started <= (self.eta + self.version + 1) * self.batch
        assert self.total is None or started <= self.total
        assert control.running == len(d.flying) + len(d.retry)
        assert control.ready == len(d.ready) + len(d._batch.kept)
        flights = Counter(f.replica for f in d.flying.values())
        for name, replica in d.router.replicas.items():
            assert replica.prompts == flights[name] <= self.settings.max_per_replica
            assert replica.tokens >= 0
        assert set(flights) <= set(d.router.replicas)
        self.check_prompts()

    def check_prompts(self) -> None:
        """Every prompt that the stream gave out is in one place, and what the stream gave out is what came before its cursor."""
        d = self.dispatch
        places: Counter[tuple[str, int]] = Counter()
        places.update((f.prompt.id, f.prompt.epoch) for f in d.flying.values())
        places.update((w.prompt.id, w.prompt.epoch) for w in d.retry)
        places.update((g.prompt.id, g.prompt.epoch) for _, g in d.ready)
        places.update((g.prompt.id, g.prompt.epoch) for _, _, g in d._batch.kept)
        places.update((p.id, p.epoch) for p in d._stream._returned)
        places += self.gone + self.trained
        assert all(n == 1 for n in places.values()), places
        cursor = d._stream.state()
        seen = {(row["id"], epoch) for epoch in range(cursor["epoch"]) for row in ROWS[: self.rows]}
        seen |= {(ROWS[i]["id"], cursor["epoch"]) for i in d._stream._order[: cursor["position"]]}
        missing = seen - set(places)
        assert all(id_ in d.poisoned for id_, _ in missing), missing  # poisoned ones are skipped
        assert set(places) <= seen


def key(flight: Flight) -> tuple[str, int]:
    return flight.prompt.id, flight.prompt.epoch


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["finish"] * 4
            + ["train"] * 2
            + ["useless", "reject", "fail", "time_out", "late_answer", "lose", "join", "wait", "recover", "down", "up", "answer_old"]
        ),
        st.integers(0, 30),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=150)
@given(
    moves=MOVES,
    eta=st.integers(0, 3),
    action=st.sampled_from(["mask_token", "drop_sample", "refill_prompt"]),
    filtered=st.booleans(),
    always=st.booleans(),
    total=st.one_of(st.none(), st.just(8)),
    attempts=st.integers(1, 3),
)
def test_no_order_of_events_loses_or_doubles_a_prompt(
    moves: list[tuple[str, int]], eta: int, action: StaleAction, filtered: bool, always: bool, total: int | None, attempts: int
) -> None:
    world = World(eta, total, always=always, action=action, uniform_is_useless=filtered, attempts=attempts)
    for name, index in moves:
        if name == "useless":
            world.finish(index, useless=True)
        else:
            getattr(world, name)(index)
        world.pump()
        world.check()


@pytest.mark.parametrize("action", ["mask_token", "drop_sample", "refill_prompt"])
def test_a_run_with_faults_of_every_kind_ends_and_trains_every_step(action: StaleAction) -> None:
    world = World(eta=1, total=40, action=action, attempts=3)
    moves = [
        "finish",
        "train",
        "fail",
        "finish",
        "lose",
        "train",
        "join",
        "finish",
        "time_out",
        "finish",
        "late_answer",
        "train",
        "recover",
    ]
    for turn in range(4000):
        getattr(world, moves[turn % len(moves)])(turn * 7)
        world.pump()
        world.check()
        if sum(world.trained.values()) == 40:
            break
    assert sum(world.trained.values()) == 40
    assert not world.dispatch.flying and not world.dispatch.retry  # nothing beyond what the last step used was started


@settings(max_examples=100)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["finish", "lose all", "join", "train", "down", "up"]), st.integers(0, 30)), max_size=60),
    always=st.booleans(),
    eta=st.integers(0, 2),
    action=st.sampled_from(["mask_token", "drop_sample", "refill_prompt"]),
)
def test_replicas_that_come_and_go_leave_nothing_undone(moves: list[tuple[str, int]], always: bool, eta: int, action: StaleAction) -> None:
    """Whatever was lost when, also with nobody there for a while: with replicas that stay, every step is trained, each prompt once."""
    world = World(eta, total=12, always=always, action=action)
    for name, index in moves:
        if name == "lose all":
            for replica in sorted(world.dispatch.router.replicas):
                world.dispatch.replica_lost(replica)
        elif world.dispatch.router.replicas or name in ("join", "train"):
            getattr(world, name)(index)
        world.pump()
        world.check()
    for index in range(4):
        world.join(index)
        world.up(index)
    for _ in range(200):
        world.pump()
        for index in range(3):
            world.finish(index)
        world.train()
        world.check()
        if sum(world.trained.values()) == 12:
            break
    # The first twelve prompts of the stream, as without any loss.
    undisturbed = PromptStream(ROWS, seed=1, shuffle=True).next(12)
    assert world.trained == Counter((prompt.id, prompt.epoch) for prompt in undisturbed)


def test_what_a_lost_replica_held_is_made_again_elsewhere_and_is_no_failure() -> None:
    world = World(eta=0, batch_size=4)
    world.pump()
    assert [f.replica for f in world.dispatch.flying.values()] == ["a", "b", "a", "b"]
    lost = [key(f) for f in world.dispatch.flying.values() if f.replica == "a"]
    world.finish(0)  # one of them is ready already
    world.dispatch.replica_lost("a")
    world.pump()
    assert all(f.replica == "b" for f in world.dispatch.flying.values())
    assert len(world.dispatch.flying) == 3  # b has no more room
    world.dispatch.replica_joined("c")
    world.pump()
    assert {key(f) for f in world.dispatch.flying.values()} >= set(lost)
    assert (world.dispatch.counts["failed"], world.dispatch.counts["lost_groups"]) == (0, 1)
    world.check()


def test_a_failure_of_one_server_is_counted_there_until_it_answers() -> None:
    world = World(eta=0)
    world.pump()
    for _ in range(2):
        flight = next(f for f in world.dispatch.flying.values() if f.replica == "a")
        world.dispatch.failed(flight.ticket, "server", {}, server_fault=True)
        world.dispatch.rejected(next(iter(world.dispatch.flying)), "", {})
        world.pump()
        if world.dispatch.router.replicas["a"].prompts == 0:
            break
    assert world.dispatch.router.replicas["a"].faults_in_a_row >= 1
    for _ in range(8):
        world.finish(0)
        world.train()
        world.pump()
    assert world.dispatch.router.replicas["a"].faults_in_a_row == 0


def test_a_server_that_fails_three_attempts_in_a_row_is_faulty_until_it_is_back() -> None:
    world = World(eta=3, attempts=9)
    for number in range(3):
        assert world.dispatch.faulty() == {}
        world.pump()
        flight = next(f for f in world.dispatch.flying.values() if f.replica == "a")
        world.dispatch.failed(flight.ticket, f"malformed {number}", {}, server_fault=True)
    assert world.dispatch.faulty() == {"a": "malformed 2"}
    world.dispatch.replica_down("a")
    assert world.dispatch.faulty() == {}
    world.dispatch.replica_up("a")
    assert world.dispatch.faulty() == {}


def test_with_every_server_gone_prompts_wait_and_none_has_failed() -> None:
    world = World(eta=0)
    world.pump()
    before = sorted(key(f) for f in world.dispatch.flying.values())
    for name in list(world.dispatch.router.replicas):
        world.dispatch.replica_down(name)
        world.dispatch.withdrawn([f.ticket for f in world.dispatch.flying.values() if f.replica == name])
        world.pump()
    assert not world.dispatch.flying and len(world.dispatch.retry) == len(before)
    world.dispatch.replica_up("b")
    world.pump()
    assert sorted(key(f) for f in world.dispatch.flying.values()) == before
    assert (world.dispatch.counts["failed"], world.dispatch.counts["retried"]) == (0, 0)
    world.check()


def test_all_prompts_poisoned_ends_the_run() -> None:
    world = World(eta=0, rows=3, attempts=1)
    for _ in range(3):
        world.pump()
        world.fail(0)
    with pytest.raises(RolloutFailed, match="all 3 prompts of the data are poisoned; the last: boom"):
        world.dispatch.check_progress()
    assert world.dispatch.submissions(0.0) == []


# --- routing


def router(group_size: int = 1, max_prompts: int = 100) -> Router:
    made = Router(max_prompts, group_size=group_size, expected_tokens=100.0)
    for name in ("a", "b"):
        made.joined(name)
    return made


def prompt(text: str) -> Any:
    return group("g", [{}]).prompt.__class__(id=text[:8], epoch=0, row={"id": text[:8], "prompt": text, "answer": ""})


def test_a_prompt_goes_where_the_fewest_tokens_are_outstanding() -> None:
    routes, long, short = router(), prompt("x" * 4000 + "0"), prompt("1")
    assert [routes.route(p).replica for p in (long, short, short, short)] == ["a", "b", "b", "b"]


def test_a_prefix_draws_its_prompts_until_the_replica_is_too_busy() -> None:
    routes = router()
    shared = "a long system prompt " * 60  # 1260 characters: four whole blocks
    chosen = [routes.route(prompt(shared + str(i))).replica for i in range(8)]
    assert chosen[0] == "a"
    assert chosen.count("a") == chosen.count("b")  # a prefix is not worth an idle replica
    routes = router()
    assert [routes.route(prompt(text)).replica for text in ("one", shared, "two", "three", "four", "five")] == [
        "a",
        "b",
        "a",
        "a",
        "a",
        "a",
    ]
    assert routes.route(prompt(shared + "again")).replica == "b"  # although a has less to do
    routes.forget_prefixes()
    assert routes.route(prompt(shared + "once more")).replica == "a"


def test_what_is_to_be_avoided_is_taken_only_alone() -> None:
    routes = router()
    assert routes.route(prompt("x"), {"a"}).replica == "b"
    assert routes.route(prompt("x"), {"a", "b"}).replica == "a"


def test_prefixes_are_equal_up_to_where_they_differ() -> None:
    one, other = prefix_blocks({"prompt": "x" * 600}), prefix_blocks({"prompt": "x" * 300 + "y" * 300})
    assert len(one) == 2 and one[0] == other[0] and one[1] != other[1]
    messages = [{"role": "system", "content": "s" * 400}, {"role": "user", "content": "hi"}]
    assert len(prefix_blocks({"messages": messages})) == 1
