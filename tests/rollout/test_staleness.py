"""Staleness: admission never exceeds the bound, the strict bound leaves no token beyond it, counters survive recovery."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.core.types import Group, Prompt, Sample, SampleId, VersionCount, count_versions
from areal_mega.rollout.staleness import (
    StaleAction,
    StalenessControl,
    age_histogram,
    apply_bound,
    apply_bound_to_groups,
    fresh_mask,
)

ACTIONS: tuple[StaleAction, ...] = ("mask_token", "drop_sample", "refill_prompt")


def sample(*versions: int, member: int = 0, group: str = "g") -> Sample:
    """A sample with one trained token per given version."""
    counts = count_versions(np.array(versions, dtype=np.int32), np.ones(len(versions), dtype=bool))
    identity = SampleId(run="r", step=0, prompt_id=group, epoch=0, group_id=group, member=member)
    return Sample(
        id=identity,
        length=len(versions) + 1,
        prompt_length=1,
        loss_tokens=len(versions),
        versions=counts,
        reward=0.0,
        finish_reason="stop",
        scores={},
        tensors={},
    )


def group(*samples: Sample, name: str = "g") -> Group:
    return Group(id=name, prompt=Prompt(id=name, epoch=0, row={}), samples=samples, worker="w:1", seconds=0.0)


class Simulation:
    """Groups that generate one token per tick under the version of that tick, in any order, and a trainer that consumes batches."""

    def __init__(self, batch: int, eta: int, start_version: int = 0, fifo: bool = False) -> None:
        self.control = StalenessControl(batch, eta, start_version=start_version)
        self.batch, self.eta, self.start, self.version, self.fifo = batch, eta, start_version, start_version, fifo
        self.running: list[tuple[int, list[int]]] = []
        self.ready: deque[tuple[int, list[int]]] = deque()
        self.submitted = 0
        self.gone = 0
        self.oldest_seen = 0

    def submit(self, wanted: int) -> None:
        n = min(wanted, self.control.capacity(self.version))
        self.control.on_submitted(n)
        for _ in range(n):
            self.running.append((self.submitted, [self.version]))
            self.submitted += 1
        self.check()

    def tick(self) -> None:
        for _, versions in self.running:
            versions.append(self.version)

    def finish(self, index: int) -> None:
        if self.running:
            self.ready.append(self.running.pop(index % len(self.running)))
            self.control.on_accepted()
            self.check()

    def reject(self, index: int) -> None:
        if self.running:
            self.running.pop(index % len(self.running))
            self.gone += 1
            self.control.on_rejected()
            self.check()

    def discard(self) -> None:
        if self.ready:
            self.ready.pop()
            self.gone += 1
            self.control.on_discarded()
            self.check()

    def train(self) -> None:
        ready = sorted(self.ready) if self.fifo else list(self.ready)
        if self.fifo and self.running:
            first_running = min(order for order, _ in self.running)
            ready = [r for r in ready if r[0] < first_running]
        if len(ready) < self.batch:
            return
        for taken in ready[: self.batch]:
            self.ready.remove(taken)
            self.oldest_seen = max(self.oldest_seen, self.version - min(taken[1]))
        self.control.on_consumed(self.batch)
        self.version += 1
        self.check()

    def check(self) -> None:
        live = self.submitted - self.gone
        assert live <= (self.eta + self.version - self.start + 1) * self.batch, "more groups under way than the bound allows"
        assert (self.control.running, self.control.ready) == (len(self.running), len(self.ready))
        assert self.control.consumed == (self.version - self.start) * self.batch


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["finish", "reject"]), st.integers(0, 30)),
        st.tuples(st.sampled_from(["tick", "train", "discard"])),
    ),
    max_size=120,
)


def play(simulation: Simulation, moves: list[tuple[Any, ...]]) -> None:
    for name, *arguments in moves:
        getattr(simulation, name)(*arguments)


@settings(deadline=None)
@given(batch=st.integers(1, 5), eta=st.integers(0, 4), start=st.integers(0, 3), moves=MOVES)
def test_admission_never_exceeds_the_bound(batch: int, eta: int, start: int, moves: list[tuple[Any, ...]]) -> None:
    play(Simulation(batch, eta, start), moves)


@settings(deadline=None)
@given(batch=st.integers(1, 4), eta=st.integers(0, 3), moves=MOVES)
def test_in_order_of_submission_no_token_is_older_than_the_bound(batch: int, eta: int, moves: list[tuple[Any, ...]]) -> None:
    """What admission alone guarantees: groups that leave make room for younger ones, which can only be fresher."""
    simulation = Simulation(batch, eta, fifo=True)
    play(simulation, moves)
    assert simulation.oldest_seen <= eta


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_training_never_stalls_and_uses_the_whole_bound(eta: int) -> None:
    simulation, chance = Simulation(3, eta), random.Random(eta)
    for _ in range(400):
        simulation.submit(100)
        simulation.tick()
        simulation.finish(chance.randrange(100))
        simulation.train()
    assert simulation.version > 100
    simulation.submit(100)
    assert simulation.control.capacity(simulation.version) == 0
    assert simulation.control.running + simulation.control.ready == (eta + 1) * 3


def test_synchronous_admits_one_batch_per_version() -> None:
    control = StalenessControl(4, 0)
    assert control.capacity(0) == 4
    control.on_submitted(4)
    control.on_accepted(4)
    control.on_consumed(4)
    assert (control.capacity(0), control.capacity(1)) == (0, 4)


def test_warm_up_versions_admit_nothing_more() -> None:
    assert StalenessControl(4, 1, start_version=7).capacity(7) == StalenessControl(4, 1).capacity(0) == 8


def test_what_leaves_makes_room() -> None:
    control = StalenessControl(2, 0)
    control.on_submitted(2)
    control.on_rejected()
    assert control.capacity(0) == 1
    control.on_accepted()
    control.on_discarded()
    assert control.capacity(0) == 2


def test_more_cannot_leave_than_is_there() -> None:
    with pytest.raises(AssertionError, match="state running"):
        StalenessControl(2, 0).on_accepted()


@given(batch=st.integers(1, 5), eta=st.integers(0, 3), moves=MOVES)
@settings(deadline=None)
def test_recovery_forgets_what_was_under_way_and_nothing_else(batch: int, eta: int, moves: list[tuple[Any, ...]]) -> None:
    simulation = Simulation(batch, eta)
    play(simulation, moves)
    restored = StalenessControl(batch, eta)
    restored.restore(simulation.control.snapshot())
    assert restored.capacity(simulation.version) == (eta + 1) * batch
    larger = StalenessControl(batch + 1, eta)
    larger.restore(simulation.control.snapshot())
    assert larger.capacity(simulation.version) == (eta + 1) * (batch + 1)


@given(
    before=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    steps=st.integers(0, 30),
    more=st.integers(1, 20),
    eta=st.integers(0, 3),
)
@settings(deadline=None)
def test_a_recovered_run_trains_all_its_steps_under_another_schedule(
    before: tuple[int, int], after: tuple[int, int], steps: int, more: int, eta: int
) -> None:
    """Batch size and steps per version as (B, every) before and after: never a step for which nothing may start."""
    (old, every), (new, then) = before, after
    control = StalenessControl(old, eta, every=every, total=old * steps)
    version = 0
    for step in range(steps):
        version = one_step(control, version, step, old, every)
    restored = StalenessControl(new, eta, every=then, total=new * (steps + more))
    restored.restore(control.snapshot())
    rest = then - steps % then
    assert restored.capacity(version) == new * min(more, eta * then + rest), "what is left of the interval, and the bound beyond it"
    for step in range(steps, steps + more):
        version = one_step(restored, version, step, new, then)
    assert restored.capacity(version + 5) == 0


def one_step(control: StalenessControl, version: int, step: int, batch: int, every: int) -> int:
    """Train step ``step``; the version after it."""
    assert control.capacity(version) >= batch
    control.on_submitted(batch)
    control.on_accepted(batch)
    control.on_consumed(batch)
    return version + ((step + 1) % every == 0)


def test_a_version_that_no_schedule_made_buys_nothing() -> None:
    control = StalenessControl(2, 1, every=3)
    control.on_submitted(5)
    before = control.capacity(4)
    control.unscheduled(1)
    assert control.capacity(5) == before
    assert control.capacity(6) == before + 6, "the next scheduled one does"


VERSIONS = st.lists(st.integers(0, 8), min_size=1, max_size=12)


@given(versions=VERSIONS, current=st.integers(8, 10), eta=st.integers(0, 9), action=st.sampled_from(ACTIONS))
def test_nothing_beyond_the_bound_is_trained(versions: list[int], current: int, eta: int, action: StaleAction) -> None:
    before = sample(*versions)
    bounded = apply_bound(before, current, eta, action)
    stale = sum(current - v > eta for v in versions)
    assert bounded.stale_tokens == stale
    if stale == 0:
        assert bounded.sample is before
    if bounded.sample is None:
        assert stale and (action != "mask_token" or stale == len(versions))
        return
    kept = [v for v in versions if current - v <= eta]
    assert max(age_histogram([bounded.sample], current)) <= eta
    assert bounded.sample.loss_tokens == len(kept) == sum(v.tokens for v in bounded.sample.versions)
    mask = fresh_mask(np.ones(len(versions), dtype=bool), np.array(versions), current - eta)
    assert mask.sum() == bounded.sample.loss_tokens, "the arrays, masked, hold what the sample says"


@given(groups=st.lists(st.lists(VERSIONS, min_size=1, max_size=4), max_size=5), eta=st.integers(0, 9), action=st.sampled_from(ACTIONS))
def test_every_group_is_kept_or_refilled(groups: list[list[list[int]]], eta: int, action: StaleAction) -> None:
    made = [group(*(sample(*v, member=i, group=str(g)) for i, v in enumerate(members)), name=str(g)) for g, members in enumerate(groups)]
    bounded = apply_bound_to_groups(made, 8, eta, action)
    assert sorted([g.id for g in bounded.groups] + [g.id for g in bounded.refill]) == sorted(g.id for g in made)
    assert all(g.samples for g in bounded.groups)
    tokens = [8 - v for members in groups for versions in members for v in versions]
    assert bounded.ages == {age: tokens.count(age) for age in sorted(set(tokens))}
    assert bounded.stale_tokens == sum(age > eta for age in tokens)
    for kept in bounded.groups:
        assert max(age_histogram(kept.samples, 8)) <= eta
        if action == "refill_prompt":
            assert kept in made, "kept as it was, or generated again as a whole"
    survivors = sum(len(g.samples) for g in bounded.groups)
    assert bounded.dropped_samples == sum(len(g.samples) for g in made) - survivors


def test_actions_on_one_mixed_group() -> None:
    mixed = group(sample(3, 5, member=0), sample(5, 5, member=1))
    masked = apply_bound_to_groups([mixed], 5, 1, "mask_token")
    assert [s.versions for s in masked.groups[0].samples] == [(VersionCount(version=5, tokens=1),), (VersionCount(version=5, tokens=2),)]
    dropped = apply_bound_to_groups([mixed], 5, 1, "drop_sample")
    assert [s.id.member for s in dropped.groups[0].samples] == [1]
    refilled = apply_bound_to_groups([mixed], 5, 1, "refill_prompt")
    assert refilled.groups == () and refilled.refill == (mixed,)


def test_fresh_mask_keeps_what_was_masked_before() -> None:
    mask = fresh_mask(np.array([False, True, True]), np.array([9, 2, 3]), 3)
    assert mask.tolist() == [False, False, True]
