"""What the controller asks of rollout workers, and what it makes of their answers. No process, no network: see `fake_workers`."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from fake_workers import FakeWorker, World, result, settle
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import group, keys_of, prompt

from areal_mega.controller.rollout import ReadyBatch, RolloutFailed
from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.rpc.client import PeerUnreachable, RpcError


def prompt_ids(ready: ReadyBatch) -> list[str]:
    return [g.prompt.id for g in ready.groups]


async def batch_of(world: World, groups: int | None = None) -> ReadyBatch:
    async with asyncio.timeout(20):
        return await world.control.next_batch(groups or world.batch)


# --- admission


async def test_overlapped_as_much_is_under_way_as_the_bound_allows() -> None:
    async with World(batch=3, eta=2) as world:
        assert world.running == 9
        for _ in range(3):
            await world.workers[0].finish()
        await settle()
        assert world.running == 6  # finished groups still count until they are trained, and then a version comes
        await batch_of(world)
        await settle()
        assert world.running == 6
        await world.advance()
        assert world.running == 9


async def test_plain_nothing_is_under_way_but_the_batch_that_is_wanted() -> None:
    async with World(batch=3, eta=2, overlapped=False) as world:
        assert world.running == 0
        wanted = asyncio.create_task(batch_of(world))
        await settle()
        assert world.running == 3
        await world.workers[0].finish(outcome="rejected")
        await settle()
        assert world.running == 3  # another takes its place
        for _ in range(3):
            await world.workers[0].finish()
        assert len((await wanted).groups) == 3
        await world.advance()
        assert world.running == 0


async def test_prompts_carry_the_step_in_which_they_were_submitted() -> None:
    async with World(batch=1, eta=0) as world:
        await world.workers[0].finish()
        await batch_of(world)
        await world.advance()
        assert [step for _, step, _ in world.workers[0].submitted] == [0, 1]


async def test_prompts_go_where_the_least_is_under_way() -> None:
    async with World(workers=3, batch=6, eta=0) as world:
        assert [len(w.running) for w in world.workers] == [2, 2, 2]
        for _ in range(2):  # the first is fast
            await world.workers[0].finish(outcome="rejected")
            await settle()
        assert [len(w.running) for w in world.workers] == [2, 2, 2]
        assert [len(w.submitted) for w in world.workers] == [4, 2, 2]


# --- batches


async def test_batches_are_made_in_the_order_of_submission() -> None:
    async with World(batch=2, eta=1) as world:
        for index in (3, 1, 0, 0):  # p3, p1, p0, p2
            await world.workers[0].finish(index)
        await settle()
        assert prompt_ids(await batch_of(world)) == ["p0", "p1"]
        assert prompt_ids(await batch_of(world)) == ["p2", "p3"]


async def test_a_slow_prompt_does_not_hold_up_others_and_comes_first_when_it_is_there() -> None:
    async with World(batch=2, eta=1) as world:
        await world.workers[0].finish(1)
        await world.workers[0].finish(1)
        await settle()
        assert prompt_ids(await batch_of(world)) == ["p1", "p2"]
        await world.workers[0].finish(1)
        await world.workers[0].finish(0)
        await settle()
        assert prompt_ids(await batch_of(world)) == ["p0", "p3"]


async def test_ages_and_stale_tokens_cover_everything_that_came_in() -> None:
    async with World(batch=1, eta=1) as world:
        await world.advance()
        await world.advance()
        await world.workers[0].finish(members=[{"versions": {0: 3, 1: 2, 2: 1}}, {"versions": {2: 4}}])
        ready = await batch_of(world)
        assert ready.ages == {0: 5, 1: 2, 2: 3}
        assert (ready.stale_tokens, ready.dropped_samples, ready.refilled) == (3, 0, 0)
        assert [s.loss_tokens for s in ready.groups[0].samples] == [3, 4]


async def test_dropped_samples_are_released_with_their_group() -> None:
    async with World(batch=1, eta=0, action="drop_sample", singleton="batch_mean") as world:
        await world.advance()
        made = await world.workers[0].finish(members=[{"versions": {0: 1, 1: 5}}, {"versions": {1: 4}}])
        ready = await batch_of(world)
        assert [s.id.member for s in ready.groups[0].samples] == [1]
        assert (ready.stale_tokens, ready.dropped_samples) == (1, 1)
        assert made is not None
        assert world.held == keys_of([made])
        await world.control.release(ready.taken)
        assert world.held == set()


@pytest.mark.parametrize("action", ["refill_prompt", "drop_sample", "mask_token"])
async def test_a_prompt_that_lost_everything_is_generated_again_first(action: str) -> None:
    async with World(batch=1, eta=0, action=action) as world:
        await world.advance()
        assert world.submitted == ["p0", "p1"]
        await world.workers[0].finish(members=[{"versions": {0: 1}}, {"versions": {0: 2}}])
        wanted = asyncio.create_task(batch_of(world))
        await settle()
        assert world.submitted == ["p0", "p1", "p0"]
        assert world.held == set()  # what it had made is forgotten
        await world.workers[0].finish(1)
        ready = await wanted
        assert prompt_ids(ready) == ["p0"]
        assert (ready.refilled, ready.stale_tokens, ready.dropped_samples) == (1, 3, 2)
        assert world.control.counts["group"] == 2


async def test_one_stale_sample_refills_the_whole_prompt_where_asked() -> None:
    async with World(batch=1, eta=0, action="refill_prompt") as world:
        await world.advance()
        await world.workers[0].finish(members=[{"versions": {0: 1}}, {"versions": {1: 2}}])
        wanted = asyncio.create_task(batch_of(world))
        await settle()
        assert world.submitted == ["p0", "p1", "p0"]
        await world.workers[0].finish(1, members=[{"versions": {1: 1}}] * 3)
        assert len((await wanted).groups[0].samples) == 3


async def test_groups_without_a_signal_are_filtered_released_and_replaced() -> None:
    async with World(batch=2, eta=0, filter_uniform_groups=True) as world:
        wanted = asyncio.create_task(batch_of(world))
        await world.workers[0].finish(members=[{"reward": 1.0}, {"reward": 1.0}])
        await settle()
        assert world.held == set()
        assert world.submitted == ["p0", "p1", "p2"]
        await world.workers[0].finish()
        await world.workers[0].finish()
        assert prompt_ids(await wanted) == ["p1", "p2"]
        assert world.control.counts["uniform"] == 1


async def test_a_group_of_which_one_member_is_left_is_replaced_where_it_could_not_be_trained() -> None:
    async with World(batch=1, eta=0) as world:
        wanted = asyncio.create_task(batch_of(world))
        await world.workers[0].finish(members=[{}], dropped={"reward timeout: slow": 1})
        await settle()
        assert (world.held, world.submitted, world.control.counts["lone"]) == (set(), ["p0", "p1"], 1)
        await world.workers[0].finish()
        assert prompt_ids(await wanted) == ["p1"]


async def test_a_group_of_which_the_bound_left_one_member_is_generated_again() -> None:
    async with World(batch=1, eta=0, action="drop_sample") as world:
        await world.advance()
        await world.workers[0].finish(members=[{"versions": {0: 1}}, {"versions": {1: 2}}])
        wanted = asyncio.create_task(batch_of(world))
        await settle()
        assert (world.held, world.submitted) == (set(), ["p0", "p1", "p0"])
        await world.workers[0].finish(1)
        assert (await wanted).refilled == 1


# --- what goes wrong


async def test_servers_that_never_report_the_new_version_end_the_run() -> None:
    async with World(batch=1, eta=0) as world:
        await world.advance()
        worker = world.workers[0]
        worker.version = 0
        worker.automatic = lambda _: asyncio.ensure_future(worker.finish(-1)) and None
        await worker.finish()
        with pytest.raises(RolloutFailed, match=r"in a row failed.*used weights of version 0 although it had confirmed version 1 before"):
            await batch_of(world)


async def test_rejected_and_failed_prompts_are_counted_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async with World(batch=2, eta=0) as world:
        wanted = asyncio.create_task(batch_of(world))
        await world.workers[0].finish(outcome="rejected", reason="rejected by the workflow")
        await world.workers[0].finish(outcome="failed", reason="ValueError: no", dropped={"reward error: x": 2})
        await settle()
        assert world.submitted == ["p0", "p1", "p1", "p2"]  # what was rejected is replaced, what failed is tried again
        await world.workers[0].finish(outcome="timed_out", reason="too long")
        await settle()
        assert world.submitted == ["p0", "p1", "p1", "p2", "p3"]  # twice is enough
        await world.workers[0].finish(dropped={"reward timeout: slow": 1})
        await world.workers[0].finish()
        await wanted
        counts = world.control.counts
        assert {name: counts[name] for name in ("rejected", "failed", "timed_out", "retried", "poisoned", "group", "dropped_samples")} == {
            "rejected": 1, "failed": 1, "timed_out": 1, "retried": 1, "poisoned": 1, "group": 2, "dropped_samples": 3,
        }  # fmt: skip
        assert (counts["samples"], counts["tokens"]) == (4, 8)
        assert world.control.poisoned == {"p1": "too long"}
        assert "prompt p1 (epoch 0) failed: ValueError: no; it is tried again" in caplog.text
        assert "prompt p1 (epoch 0) failed: too long; it is not tried again" in caplog.text


async def test_a_poisoned_prompt_never_comes_again() -> None:
    async with World(batch=1, eta=0, rows=2, rollout={"prompt_attempts": 1}) as world:
        await world.workers[0].finish(outcome="failed", reason="poison")
        await settle()
        for _ in range(3):
            await world.workers[0].finish()
            await batch_of(world)
            await world.advance()
        assert world.submitted == ["p0", "p1", "p1", "p1", "p1"]


async def test_a_run_tolerates_so_many_poisoned_prompts_and_no_more() -> None:
    async with World(batch=2, eta=0, rollout={"prompt_attempts": 1, "max_poisoned_prompts": 2}) as world:
        wanted = asyncio.create_task(batch_of(world))
        for number in range(3):
            await settle()
            assert not wanted.done()
            await world.workers[0].finish(outcome="rejected")  # not in a row
            await settle()
            await world.workers[0].finish(outcome="failed", reason=f"poison {number}")
        with pytest.raises(RolloutFailed) as caught:
            await wanted
        assert str(caught.value) == (
            "3 prompts failed 1 times each, and rollout.max_poisoned_prompts is 2; the last: p1: poison 0; p3: poison 1; p5: poison 2"
        )


async def test_an_attempt_that_failed_at_one_replica_goes_to_another() -> None:
    async with World(workers=2, batch=2, eta=0) as world:
        first, second = world.workers
        (of, *_), *_ = first.running
        await first.finish(outcome="failed", reason="ServerFault")
        await settle()
        assert [len(w.running) for w in world.workers] == [0, 2]
        assert second.running[-1][0] == of


async def test_a_worker_that_never_ends_a_prompt_is_told_to_and_the_prompt_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_mega.controller.rollout._POLL_S", 0.02)
    async with World(workers=2, batch=2, eta=0, timeout_s=0.3, rollout={"prompt_timeout_s": 0.05}) as world:
        async with asyncio.timeout(20):
            while len(world.submitted) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert world.control.counts["timed_out"] >= 2
        assert all(w.cancelled for w in world.workers)
        assert sorted(world.submitted)[:4] == ["p0", "p0", "p1", "p1"]


async def test_a_prompt_that_a_busy_worker_lost_is_found() -> None:
    async with World(batch=2, eta=0, overlapped=False, rollout={"prompt_attempts": 2}) as world:
        clocks = world.dispatch.settings
        world.dispatch.settings = replace(clocks, deadline_s=0.2)
        wanted = asyncio.create_task(world.control.next_batch(4))
        await settle()
        async with asyncio.timeout(20):
            while not world.control.counts["timed_out"]:
                # Every collection brings something: late answers of prompts that were given up long ago.
                await world.workers[0].deliver(result(prompt(99), "rejected", reason="no", ticket=10_000))
                await asyncio.sleep(0.01)
        wanted.cancel()
        await asyncio.gather(wanted, return_exceptions=True)


async def test_a_batch_that_was_begun_under_another_version_is_bounded_anew() -> None:
    """What the old bound left of a group would count tokens as trained that the new bound masks."""
    async with World(batch=2, eta=1) as world:
        await world.advance()
        await world.workers[0].finish(members=[{"versions": {0: 1, 1: 2}}, {"versions": {1: 2}}])
        await world.workers[0].finish(members=[{"versions": {0: 1}}, {"versions": {0: 1}}])
        await settle()
        world.version = 2
        world.dispatch.version_changed(2)
        assert world.dispatch.take(2) is None and len(world.dispatch._batch.kept) == 1, "the second is beyond the bound"
        world.dispatch.version_changed(3, scheduled=False)
        assert [len(world.dispatch.ready), world.dispatch._batch.kept, world.dispatch._batch.stale_tokens] == [1, [], 0]
        assert world.dispatch.take(1) is None, "at version 3 nothing of the first is left either"
        assert world.control.counts["refilled"] == 2


async def test_a_wait_that_is_given_up_loses_nothing() -> None:
    async with World(batch=2, eta=0) as world:
        waits = 0

        async def sometimes(work: Coroutine[Any, Any, None]) -> None:
            nonlocal waits
            waits += 1
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if waits in (2, 3):
                await world.workers[0].finish()
                await settle()

        async with asyncio.timeout(20):
            ready = await world.control.next_batch(2, sometimes)
        assert prompt_ids(ready) == ["p0", "p1"] and waits >= 3


async def test_nothing_is_submitted_that_the_last_step_cannot_use() -> None:
    async with World(batch=2, eta=1, total=6) as world:
        for _ in range(3):
            for _ in range(2):
                await world.workers[0].finish()
            await batch_of(world)
            await world.advance()
        assert (world.submitted, world.running) == ([f"p{i}" for i in range(6)], 0)


async def test_a_recovered_controller_goes_on_where_the_other_was() -> None:
    async with World(batch=2, eta=1, rollout={"prompt_attempts": 2}) as world:
        await world.workers[0].finish(1, outcome="failed", reason="first time")  # p1, tried again
        await settle()
        for _ in range(3):
            await world.workers[0].finish(0)  # p0, p2, p3
        ready = await batch_of(world)
        await world.control.release(ready.taken)
        await world.advance()
        state = json.loads(json.dumps(world.control.state()))
    assert prompt_ids(ready) == ["p0", "p2"]
    again = World(batch=2, eta=1)
    again.control.restore(state)
    async with again:
        # p3 was ready, p1 under way for the second time, p4 and p5 submitted since: all are given again, oldest first.
        assert again.submitted == ["p1", "p3", "p4", "p5"]
        assert again.control.counts == Counter(state["dispatch"]["counts"])
        await again.workers[0].finish(outcome="failed", reason="second time")
        await settle()
        assert again.control.poisoned == {"p1": "second time"}


async def test_what_dropping_late_samples_would_have_done_is_measured_under_every_action() -> None:
    for action in ("mask_token", "drop_sample", "refill_prompt"):
        async with World(batch=1, eta=0, action=action, singleton="batch_mean") as world:
            await world.advance()
            await world.workers[0].finish(members=[{"versions": {0: 30, 1: 10}, "reward": 1.0}, {"versions": {1: 20}, "reward": 0.0}])
            if action == "refill_prompt":
                await world.workers[0].finish(members=[{"versions": {1: 20}, "reward": 0.0}] * 2)
            bias = (await batch_of(world)).bias
            assert (bias.late.samples, bias.late.tokens, bias.late.reward, bias.late.lengths) == (1, 40, 1.0, {40: 1})
            assert (bias.fresh.lengths[20], bias.fresh.reward) == (bias.fresh.samples, 0.0)
            assert bias.length_shift == pytest.approx(20 / ((40 + 20 * bias.fresh.samples) / (1 + bias.fresh.samples)) - 1)
            assert bias.reward_shift is not None and bias.reward_shift < 0


async def drain(world: World, outcome: Any, **kwargs: Any) -> None:
    """Workers that answer whatever is asked, at once, until the controller gives up."""
    while True:
        for worker in world.workers:
            while worker.running:
                await worker.finish(outcome=outcome, **kwargs)
        await settle()


async def fails_while_draining(world: World, outcome: Any, **kwargs: Any) -> RolloutFailed:
    draining = asyncio.create_task(drain(world, outcome, **kwargs))
    try:
        with pytest.raises(RolloutFailed) as caught:
            await batch_of(world)
    finally:
        draining.cancel()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("overlapped", [True, False])
async def test_a_run_whose_prompts_all_fail_ends_soon(overlapped: bool) -> None:
    async with World(batch=2, eta=1, overlapped=overlapped) as world:
        error = await fails_while_draining(world, "failed", reason="no member is left: 2 x reward error: boom")
        assert str(error).endswith("prompts in a row failed; the last: no member is left: 2 x reward error: boom")
        assert len(world.submitted) <= 16


@pytest.mark.parametrize("overlapped", [True, False])
async def test_a_run_whose_prompts_are_all_rejected_ends(overlapped: bool) -> None:
    async with World(batch=2, eta=1, overlapped=overlapped) as world:
        error = await fails_while_draining(world, "rejected", reason="rejected by the workflow")
        assert "prompts in a row gave no group to train on (since the start: " in str(error)
        assert "rejected); the last: rejected by the workflow" in str(error)
        assert len(world.submitted) <= 136


async def test_a_run_whose_groups_are_all_filtered_ends() -> None:
    async with World(batch=1, eta=0, filter_uniform_groups=True) as world:
        error = await fails_while_draining(world, "group", members=[{"reward": 0.0}, {"reward": 0.0}])
        assert "128 uniform" in str(error) and "algorithm.filter_uniform_groups" in str(error)
        assert world.held == set()


async def test_failures_between_good_groups_end_nothing() -> None:
    async with World(batch=2, eta=0) as world:
        for _ in range(5):
            wanted = asyncio.create_task(batch_of(world))
            for _ in range(3):
                await settle()
                await world.workers[0].finish(outcome="failed", reason="now and then")
            for _ in range(2):
                await settle()
                await world.workers[0].finish()
            await wanted
            await world.advance()
        assert world.control.counts["failed"] == 15


async def test_where_nothing_finishes_the_deadline_names_the_episodes() -> None:
    async with World(workers=2, batch=2, eta=0, timeout_s=0.2) as world:
        with pytest.raises(DeadlineExceeded) as caught:
            await batch_of(world)
        assert str(caught.value) == (
            "no episode finished within launch.rpc_timeout_s=0.2 s: "
            "rollout rank 0 runs prompt p0 for 7 s; rollout rank 1 runs prompt p1 for 7 s"
        )


async def test_a_mistake_that_a_worker_finds_ends_the_listener() -> None:
    async with World() as world:
        world.workers[0].fault = UserError("the tokenizer has no chat template")
        await world.workers[0].wake()
        with pytest.raises(UserError, match="no chat template"):
            await world.listener


# --- evaluation


async def test_evaluation_gives_one_result_per_prompt_and_touches_no_count() -> None:
    async with World(workers=2, batch=1, eta=0) as world:
        for worker in world.workers:
            worker.automatic = lambda p, w=worker: w.evaluated(p)
        asked = [prompt(f"e{i}") for i in range(5)]
        results = await world.control.evaluate(asked)
        assert Counter(r.prompt.id for r in results) == Counter(p.id for p in asked)
        assert [sum(purpose == "eval" for *_, purpose in w.submitted) for w in world.workers] == [3, 2]
        assert not world.control.counts
        assert world.running == 1


async def test_evaluation_that_does_not_end_is_a_deadline() -> None:
    async with World(batch=1, eta=0, timeout_s=0.2) as world:
        with pytest.raises(DeadlineExceeded, match="no episode finished within"):
            await world.control.evaluate([prompt("e")])


async def test_groups_of_evaluation_have_nothing_to_release() -> None:
    async with World() as world:
        bare = group("g", [{}])
        await world.control.release([type(bare)(id="g", prompt=bare.prompt, samples=(), worker="w:0", seconds=0.0)])


# --- all of it at once

RUN_STEPS = 5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3),
    st.sampled_from(["mask_token", "drop_sample", "refill_prompt"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_run(seed: int, workers: int, batch: int, eta: int, action: str, overlapped: bool, filtered: bool) -> None:
    """Episodes end in any order and any way; the bound, the books and the stores are in order at every step."""
    trained = asyncio.run(any_run(random.Random(seed), workers, batch, eta, action, overlapped, filtered))
    assert len(trained) == len(set(trained)) == RUN_STEPS * batch, "every step trains on groups of its own"


async def any_run(rng: random.Random, workers: int, batch: int, eta: int, action: str, overlapped: bool, filtered: bool) -> list[str]:
    trained: list[str] = []
    refilled = 0
    # Few rows: epochs turn over, and the same prompt comes again.
    world = World(workers=workers, batch=batch, eta=eta, action=action, overlapped=overlapped, rows=5, filter_uniform_groups=filtered)
    async with world:
        for _ in range(RUN_STEPS):
            wanted = asyncio.create_task(batch_of(world))
            await settle()
            for _ in range(2000):
                check_books(world, trained, refilled)
                if wanted.done():
                    break
                await finish_one(world, rng)
                await settle()
            ready = await wanted
            refilled += ready.refilled
            assert len(ready.groups) == batch
            for g in ready.groups:
                assert all(v.version >= world.version - eta for s in g.samples for v in s.versions)
            trained += [g.id for g in ready.groups]
            assert len(set(trained)) == len(trained)
            await world.control.release(ready.taken)
            await world.advance()
            ready_keys = keys_of([g for _, g in world.dispatch.ready])
            assert ready_keys == world.held
    return trained


async def finish_one(world: World, rng: random.Random) -> None:
    busy = [w for w in world.workers if w.running]
    assert busy, "nothing runs and a batch is wanted"
    worker = rng.choice(busy)
    index = rng.randrange(len(worker.running))
    outcome: Any = rng.choices(["group", "rejected", "failed"], [8, 1, 1])[0]
    began = worker.running[index][2]
    members: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 3)):
        versions = {rng.randint(began, world.version): rng.randint(1, 4) for _ in range(2)}
        members.append({"reward": rng.choice([0.0, 1.0]), "versions": versions})
    await worker.finish(index, outcome, members, reason="as it happens")


def check_books(world: World, trained: list[str], refilled: int) -> None:
    """Every submission is in exactly one place, and no more are under way than the bound allows."""
    staleness, counts = world.staleness, world.control.counts
    assert staleness.running == world.running
    assert [r.prompts for r in world.dispatch.router.replicas.values()] == [len(w.running) for w in world.workers]
    assert len(world.submitted) == counts["group"] + counts["rejected"] + counts["failed"] + world.running
    started = staleness.running + staleness.ready + staleness.consumed
    assert started <= (world.eta + world.version + 1) * world.batch
    if not world.overlapped:
        assert staleness.running + staleness.ready <= world.batch
    under_way = Counter((p.id, p.epoch) for w in world.workers for p, _, _ in w.running)
    assert all(n == 1 for n in under_way.values())
    assert under_way.keys() == {(f.prompt.id, f.prompt.epoch) for f in world.dispatch.flying.values()}


# --- servers that go and come back


async def test_prompts_of_a_server_that_is_gone_are_tried_elsewhere_and_it_gets_none_until_it_is_back() -> None:
    async with World(workers=2, batch=4, eta=0) as world:
        first, second = world.workers
        mine = [each.id for each, _, _ in first.running]
        assert len(mine) == 2
        await world.control.suspend(0, deadline_s=5.0)
        await settle()
        assert first.suspended and not first.running and {each.id for each, _, _ in second.running} >= set(mine)
        await second.finish(outcome="rejected")
        await settle()
        assert not first.running and len(second.running) == 4
        await world.control.resume(0, deadline_s=5.0)
        await second.finish(outcome="rejected")
        await settle()
        assert not first.suspended and len(first.running) == 1
        assert (world.dispatch.counts["failed"], world.dispatch.counts["withdrawn"]) == (0, 2)


async def test_with_no_server_prompts_wait_and_the_deadline_says_so() -> None:
    async with World(batch=2, eta=0, timeout_s=1.0) as world:
        await world.control.suspend(0, deadline_s=5.0)
        await settle()
        assert not world.running and len(world.dispatch.retry) == 2
        with pytest.raises(DeadlineExceeded, match="rollout rank 0 has no inference server"):
            await batch_of(world)


async def test_a_prompt_on_its_way_to_a_server_that_goes_is_not_lost() -> None:
    async with World(workers=2, batch=2, eta=0, overlapped=False) as world:
        gate = world.control._workers[0].submitting
        await gate.acquire()
        wanted = asyncio.create_task(batch_of(world))
        await settle()  # one prompt waits for the gate
        world.dispatch.replica_down(world.workers[0].address)
        gate.release()
        await settle()
        assert not world.workers[0].running and len(world.workers[1].running) == 2
        for _ in range(2):
            await world.workers[1].finish()
        assert sorted(prompt_ids(await wanted)) == ["p0", "p1"]


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_submitted_arrives_though_whoever_asked_for_it_is_cancelled(fails: bool) -> None:
    async with World(workers=2, batch=4, eta=0, overlapped=False) as world:
        gates = [worker.submitting for worker in world.control._workers.values()]
        for gate in gates:
            await gate.acquire()
        wanted = asyncio.create_task(batch_of(world))
        await settle()
        wanted.cancel()
        await settle()
        if fails:
            world.workers[1].fault = UserError("it refuses")
        for gate in gates:
            gate.release()
        await settle()
        if fails:
            with pytest.raises(UserError, match="it refuses"):
                await batch_of(world)
        else:
            assert [len(worker.running) for worker in world.workers] == [2, 2]


async def test_what_is_taken_back_arrives_though_whoever_asked_for_it_is_cancelled() -> None:
    """The worker has let go of its prompts, and its answer is on its way."""
    async with World(workers=2, batch=4, eta=0, overlapped=False) as world:
        first, second = world.workers
        answered, withdraw = asyncio.Event(), first.withdraw

        async def slow() -> list[int]:
            tickets = await withdraw()
            await answered.wait()
            return tickets

        first.withdraw = slow  # type: ignore[method-assign]
        wanted = asyncio.create_task(batch_of(world))
        await settle()
        mine = {each.id for each, _, _ in first.running}
        suspending = asyncio.create_task(world.control.suspend(0, deadline_s=5.0))
        await settle()
        suspending.cancel()
        answered.set()
        await settle()
        await world.control.pump()
        assert mine and {each.id for each, _, _ in second.running} > mine
        wanted.cancel()


async def test_evaluation_goes_elsewhere_when_a_server_is_given_up() -> None:
    async with World(workers=2, batch=1, eta=0, overlapped=False) as world:
        first, second = world.workers

        async def withdraw(purpose: str = "train") -> list[int]:
            return [] if purpose == "train" else [first.tickets["p0", 0]]

        first.withdraw = withdraw  # type: ignore[method-assign]
        evaluation = asyncio.create_task(world.control.evaluate([prompt(i) for i in range(3)]))  # p0 and p2 to the first
        await settle()
        await second.deliver(result(prompt(1), "rejected", purpose="eval", ticket=second.tickets["p1", 0]))
        await world.control.suspend(0, deadline_s=5.0, for_good=True)
        await first.deliver(result(prompt(2), "rejected", purpose="eval", ticket=first.tickets["p2", 0]))
        await settle()
        await second.deliver(result(prompt(0), "rejected", purpose="eval", ticket=second.tickets["p0", 0]))
        results = await asyncio.wait_for(evaluation, 60)
        assert sorted(each.prompt.id for each in results) == ["p0", "p1", "p2"]


# --- workers that are lost, and others in their place


async def test_a_lost_worker_takes_its_groups_along_and_another_one_gets_prompts() -> None:
    async with World(workers=2, batch=4, eta=0) as world:
        first, second = world.workers
        await first.finish()  # p0 is ready, p2 runs
        await settle()
        first.fault = unreachable(first)
        await first.wake()  # its listener meets it before anybody knows
        await settle()
        assert not world.listener.done()
        world.control.lose(0)
        assert not world.control.has(0)
        await world.control.pump()
        await settle()
        assert sorted(each.id for each, _, _ in second.running) == ["p0", "p1", "p2", "p3"]
        assert world.control.counts["lost_groups"] == 1 and world.control.counts["failed"] == 0
        third = world.add(FakeWorker(2))
        await world.control.join(0, third)  # type: ignore[arg-type]
        for _ in range(4):
            await second.finish()
        assert sorted(prompt_ids(await batch_of(world))) == ["p0", "p1", "p2", "p3"]
        await world.advance()
        assert [len(worker.running) for worker in (second, third)] == [2, 2]
        for worker in (second, third):
            await worker.finish()
            await worker.finish()
        assert len((await batch_of(world)).groups) == 4, "the new one is listened to"


def unreachable(worker: FakeWorker) -> PeerUnreachable:
    return PeerUnreachable(peer=worker.peer, address=worker.address, method="m", reason="gone")


async def test_a_worker_that_cannot_be_reached_and_is_not_dead_ends_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_mega.controller.workers.NEWS_S", 0.1)
    async with World() as world:
        world.workers[0].fault = unreachable(world.workers[0])
        await world.workers[0].wake()
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(world.listener, 20)


async def test_a_batch_that_lost_a_worker_before_it_was_fetched_is_made_anew() -> None:
    async with World(workers=2, batch=2, eta=0) as world:
        first, second = world.workers
        await first.finish()
        await second.finish()
        ready = await batch_of(world)
        assert prompt_ids(ready) == ["p0", "p1"]
        assert not await world.control.is_torn(RpcError(peer="p", method="load", kind="AssertionError", message="m"))
        torn = asyncio.create_task(world.control.is_torn(unreachable(first)))
        await settle()
        assert not torn.done(), "the news may come after the failure"
        world.control.lose(0)
        assert await asyncio.wait_for(torn, 20)
        assert await world.control.give_back() == 1
        await settle()
        assert [each.id for each, _, _ in second.running] == ["p0"]
        await second.finish()
        again = await batch_of(world)
        assert prompt_ids(again) == ["p1", "p0"], "the one that is left, and the one that is made again"
        await world.control.release(again.taken)
        assert second.held == set()


async def test_evaluation_goes_on_where_a_worker_is_left_and_waits_where_none_is() -> None:
    async with World(workers=2, batch=1, eta=0) as world:
        first, second = world.workers
        first.automatic = lambda p: first.evaluated(p) if p.id == "pe0" else None
        second.automatic = second.evaluated
        asked = [prompt(f"e{i}") for i in range(4)]
        evaluation = asyncio.create_task(world.control.evaluate(asked))
        await settle()
        await first.wake()
        await settle()
        assert not evaluation.done()
        world.control.lose(0)
        results = await asyncio.wait_for(evaluation, 20)
        assert Counter(r.prompt.id for r in results) == Counter(p.id for p in asked)
        assert [p.id for p, _, purpose in second.submitted if purpose == "eval"] == ["pe1", "pe3", "pe2"]
        world.control.lose(1)
        evaluation = asyncio.create_task(world.control.evaluate(asked))
        await asyncio.sleep(0.1)
        assert not evaluation.done()
        third = world.add(FakeWorker(2))
        third.automatic = third.evaluated
        await world.control.join(1, third)  # type: ignore[arg-type]
        assert len(await asyncio.wait_for(evaluation, 20)) == 4


async def test_with_nobody_there_nothing_is_late() -> None:
    async with World(workers=1, batch=1, eta=0, timeout_s=0.1) as world:
        world.control.lose(0)
        wanted = asyncio.create_task(batch_of(world))
        await asyncio.sleep(0.5)
        assert not wanted.done()
        await world.control.join(0, world.add(FakeWorker(1)))  # type: ignore[arg-type]
        with pytest.raises(DeadlineExceeded):
            await wanted
