"""The executor: every prompt ends in one result, concurrency is bounded, faults are named, nothing leaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_fakes import FakeEngine, ScriptedWorkflow, context, prompts, tickets, trajectory

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.core.types import VersionCount
from areal_mega.rollout.executor import Executor, fault_of
from areal_mega.rollout.inference import ServerFault
from areal_mega.rollout.results import EpisodeResult, Purpose
from areal_mega.rollout.store import TrajectoryStore


class Setting:
    def __init__(self, script: dict[str, Any] | None = None, *, max_concurrent: int = 4, timeout_s: float = 60.0) -> None:
        self.workflow = ScriptedWorkflow(context(), script)
        self.evaluation = ScriptedWorkflow(context(evaluation=True), script)
        self.store = TrajectoryStore("host:1", limit=1 << 30, folder=Path("nothing-is-spilled"))
        self.executor = Executor(
            run="run",
            engine=FakeEngine(),
            workflows={"train": self.workflow, "eval": self.evaluation},
            store=self.store,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
        )

    async def results(self, n: int, purpose: Purpose = "train") -> dict[str, EpisodeResult]:
        out: list[EpisodeResult] = []
        async with asyncio.timeout(60):
            while len(out) < n:
                out += await self.executor.collect(n - len(out), wait_s=30, purpose=purpose)
        return {r.prompt.id: r for r in out}


async def test_every_prompt_ends_in_one_result() -> None:
    script = {"p1": None, "p2": RuntimeError("boom"), "p3": [], "p4": [trajectory(reward=float("nan")), trajectory()]}
    setting = Setting(script)
    setting.executor.submit(tickets(prompts(6)), step=5, purpose="train")
    results = await setting.results(6)
    assert {i: r.outcome for i, r in results.items()} == {
        "p0": "group",
        "p1": "rejected",
        "p2": "failed",
        "p3": "failed",
        "p4": "group",
        "p5": "group",
    }
    assert results["p2"].reason == "RuntimeError: boom"
    assert results["p3"].reason == "the workflow returned 0 trajectories"
    assert results["p4"].dropped == {"reward not finite": 1}
    assert results["p4"].group is not None and len(results["p4"].group.samples) == 1
    assert await setting.executor.collect(1, wait_s=0.0, purpose="train") == []
    assert setting.executor.counts["train/group"] == 3 and setting.executor.counts["train/failed"] == 2
    await setting.executor.close()


async def test_group_describes_its_trajectories() -> None:
    setting = Setting({"p0": [trajectory(member=2, scores={"correct": True}), trajectory(member=0, turn=1, reward=0.0)]})
    setting.executor.submit(tickets(prompts(1)), step=5, purpose="train")
    group = (await setting.results(1))["p0"].group
    assert group is not None
    first, second = group.samples
    assert (first.id.run, first.id.step, first.id.prompt_id, first.id.epoch, first.id.member, first.id.turn) == ("run", 5, "p0", 0, 2, 0)
    assert (second.id.member, second.id.turn) == (0, 1)
    assert first.id.group_id == second.id.group_id == group.id
    assert (first.length, first.prompt_length, first.loss_tokens, first.reward, first.scores) == (3, 1, 2, 1.0, {"correct": 1.0})
    assert first.versions == (VersionCount(version=4, tokens=1), VersionCount(version=5, tokens=1))
    assert set(first.tensors) == {"input_ids", "loss_mask", "logprobs", "versions"}
    (ids,) = setting.store.get([first.tensors["input_ids"].key])
    assert ids.tolist() == [5, 6, 7]
    assert setting.store.nbytes == sum(h.nbytes for s in group.samples for h in s.tensors.values())
    await setting.executor.close()


async def test_the_same_prompt_twice_in_a_step_makes_two_groups() -> None:
    setting = Setting()
    for _ in range(2):
        setting.executor.submit(tickets(prompts(1)), step=0, purpose="train")
    found = []
    for _ in range(2):
        found += await setting.executor.collect(1, wait_s=30, purpose="train")
    assert len({r.group.id for r in found if r.group}) == 2
    await setting.executor.close()


async def test_concurrency_is_bounded_and_order_kept() -> None:
    setting = Setting(max_concurrent=3)
    setting.executor.submit(tickets(prompts(20)), step=0, purpose="train")
    await setting.results(20)
    assert setting.workflow.most_at_once == 3
    assert setting.workflow.started == [f"p{i}" for i in range(20)]
    await setting.executor.close()


async def test_a_slow_episode_holds_up_nobody() -> None:
    setting = Setting(max_concurrent=2)
    setting.workflow.hold("p0")
    setting.executor.submit(tickets(prompts(10)), step=0, purpose="train")
    assert len(await setting.results(9)) == 9
    assert setting.executor.queued("train") == (0, 1, 0)
    assert [i for i, _ in setting.executor.oldest()] == ["p0"]
    setting.workflow.gates["p0"].set()
    assert set(await setting.results(1)) == {"p0"}
    await setting.executor.close()


async def test_evaluation_is_apart_goes_first_and_keeps_no_arrays() -> None:
    setting = Setting(max_concurrent=1)
    setting.workflow.hold("p0")
    setting.executor.submit(tickets(prompts(3)), step=0, purpose="train")
    await asyncio.sleep(0.01)
    setting.executor.submit(tickets(prompts(2, start=10)), step=0, purpose="eval")
    setting.workflow.gates["p0"].set()
    evaluated = await setting.results(2, "eval")
    assert set(evaluated) == {"p10", "p11"}
    for result in evaluated.values():
        assert result.purpose == "eval" and result.group is not None
        assert all(s.tensors == {} and s.reward == 1.0 for s in result.group.samples)
    await setting.results(3)
    assert len(setting.store) == 3 * 2 * 4
    await setting.executor.close()


async def test_an_episode_that_takes_too_long_is_ended_and_says_so() -> None:
    setting = Setting({"p1": TimeoutError("of the workflow's own")}, timeout_s=0.2)
    setting.workflow.hold("p0")
    setting.executor.submit(tickets(prompts(3), first=7), step=0, purpose="train")
    results = await setting.results(3)
    assert {i: (r.ticket, r.outcome) for i, r in results.items()} == {"p0": (7, "timed_out"), "p1": (8, "failed"), "p2": (9, "group")}
    assert results["p0"].reason == "the episode took longer than rollout.prompt_timeout_s=0.2 s"
    assert results["p1"].reason == "TimeoutError: of the workflow's own"
    assert setting.workflow.at_once == 0
    await setting.executor.close()


async def test_the_time_in_the_queue_does_not_count() -> None:
    setting = Setting(max_concurrent=1, timeout_s=0.5)
    setting.workflow.hold("p0")
    setting.executor.submit(tickets(prompts(2)), step=0, purpose="train")
    results = await setting.results(2)
    assert [results[i].outcome for i in ("p0", "p1")] == ["timed_out", "group"]
    await setting.executor.close()


async def test_whose_fault_a_failure_is() -> None:
    script = {
        "p0": ServerFault("http://s", "/generate answered 500: boom", status=500),
        "p1": ServerFault("http://s", "/generate answered 400: too long", status=400),
        "p2": DeadlineExceeded("inference server http://s did not answer"),
        "p3": ValueError("of the workflow"),
    }
    setting = Setting(script)
    setting.executor.submit(tickets(prompts(4)), step=0, purpose="train")
    results = await setting.results(4)
    assert {i: r.server_fault for i, r in results.items()} == {"p0": True, "p1": False, "p2": True, "p3": False}
    await setting.executor.close()


async def test_what_is_cancelled_gives_no_result_wherever_it_is() -> None:
    setting = Setting(max_concurrent=2)
    setting.workflow.hold("p1", "p2")
    setting.executor.submit(tickets(prompts(6)), step=0, purpose="train")  # p0 finishes, p1 and p2 run, p3 to p5 wait
    async with asyncio.timeout(30):
        while setting.executor.queued("train") != (3, 2, 1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await setting.executor.cancel([0, 1, 4, 99], purpose="train")
    setting.workflow.gates["p2"].set()
    assert set(await setting.results(3)) == {"p2", "p3", "p5"}
    assert await setting.executor.collect(1, wait_s=0.1, purpose="train") == []
    assert len(setting.store) == 3 * 2 * 4  # nothing of p0 is left
    await setting.executor.close()


async def test_what_is_suspended_begins_again_in_its_order() -> None:
    setting = Setting(max_concurrent=2)
    setting.workflow.hold("p1", "p2")
    setting.executor.submit(tickets(prompts(5)), step=0, purpose="train")  # p0 finishes, p1 and p2 run, p3 and p4 wait
    async with asyncio.timeout(30):
        while setting.executor.queued("train") != (2, 2, 1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await setting.executor.suspend()
    assert setting.executor.queued("train") == (4, 0, 1)
    setting.workflow.gates.clear()
    await asyncio.sleep(0.05)
    assert setting.executor.queued("train") == (4, 0, 1), "nothing starts without a server"
    setting.executor.resume()
    results = await setting.results(5)
    assert {result.outcome for result in results.values()} == {"group"}
    assert setting.workflow.started == ["p0", "p1", "p2", "p1", "p2", "p3", "p4"]
    await setting.executor.close()


class Stubborn(ScriptedWorkflow):
    """Does not end before its gate opens, whoever cancels it."""

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        while not self.gates[data.id].is_set():
            try:
                await self.gates[data.id].wait()
            except asyncio.CancelledError:
                self.cancelled = True
        if data.id in self.script:
            raise self.script[data.id]
        return [trajectory()]


@pytest.mark.parametrize("end", ["with a result", "cancelled"])
@pytest.mark.parametrize("withdrawn", [True, False], ids=["withdrawn", "kept"])
async def test_what_takes_long_to_cancel_is_withdrawn_or_begins_again(end: str, withdrawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_mega.rollout.executor._CANCEL_S", 0.05)
    setting = Setting(max_concurrent=2)
    stubborn = setting.executor._workflows["train"] = Stubborn(context(), {"p0": asyncio.CancelledError()} if end == "cancelled" else {})  # type: ignore[index]
    stubborn.hold("p0", "p1")
    setting.executor.submit(tickets(prompts(2)), step=0, purpose="train")
    await asyncio.sleep(0.01)
    await setting.executor.suspend()
    assert setting.executor.queued("train") == (0, 2, 0)
    if withdrawn:
        assert sorted(setting.executor.withdraw("train")) == [0, 1]
    for gate in stubborn.gates.values():
        gate.set()
    await asyncio.sleep(0.05)
    waiting, running, finished = setting.executor.queued("train")
    assert running == 0 and waiting + finished == (0 if withdrawn else 2), "each ticket is in one place"
    assert waiting == (end == "cancelled" and not withdrawn)
    assert len(setting.store) == finished * 4, "what was withdrawn leaves nothing behind"
    await setting.executor.close()


async def test_a_workflow_that_ends_with_a_cancellation_of_its_own_has_failed() -> None:
    setting = Setting()
    setting.workflow.script["p0"] = lambda ctx: (_ for _ in ()).throw(asyncio.CancelledError())
    setting.executor.submit(tickets(prompts(2)), step=0, purpose="train")
    results = await setting.results(2)
    assert (results["p0"].outcome, results["p1"].outcome) == ("failed", "group") and "CancelledError" in results["p0"].reason
    await setting.executor.close()


async def test_a_full_disk_ends_collection_and_leaves_nothing_of_the_group(tmp_path: Path) -> None:
    """Of two members the first has room in memory, and the file of the second does not open."""
    setting = Setting({"p0": [trajectory(), trajectory()]})
    (tmp_path / "file").write_text("no folder")
    size = sum(array.nbytes for array in trajectory().arrays().values())
    setting.executor._store = store = TrajectoryStore("host:1", limit=size, folder=tmp_path / "file" / "spill")
    setting.executor.submit(tickets(prompts(1)), step=0, purpose="train")
    with pytest.raises(UserError, match=r"cannot write .* bytes of trajectories to .*spill \(Not a directory\).*raise rollout.store_mb"):
        await setting.executor.collect(1, wait_s=30, purpose="train")
    assert len(store) == store.nbytes == 0
    await setting.executor.close()


async def test_drops_are_counted_for_their_own_episode() -> None:
    def dropping(ctx: Any) -> Any:
        ctx.drop("reward timeout: slow")
        ctx.drop("reward timeout: slow")
        return [trajectory()]

    def dropping_all(ctx: Any) -> Any:
        ctx.drop("generation aborted")
        return []

    setting = Setting({"p0": dropping, "p1": dropping_all})
    setting.executor.submit(tickets(prompts(3)), step=0, purpose="train")
    results = await setting.results(3)
    assert (results["p0"].outcome, results["p0"].dropped) == ("group", {"reward timeout: slow": 2})
    assert (results["p1"].outcome, results["p1"].reason) == ("failed", "no member is left: 1 x generation aborted")
    assert results["p2"].dropped == {}
    assert setting.executor.counts["train/dropped/reward timeout"] == 2
    await setting.executor.close()


async def test_a_users_mistake_ends_collection_in_one_line() -> None:
    setting = Setting({"p0": UserError("no chat template")})
    setting.executor.submit(tickets(prompts(1)), step=0, purpose="train")
    for _ in range(2):
        with pytest.raises(UserError, match="no chat template"):
            await setting.executor.collect(1, wait_s=30, purpose="train")
    await setting.executor.close()


async def test_twin_members_are_a_fault_of_the_workflow_and_leave_nothing_behind() -> None:
    setting = Setting({"p0": [trajectory(member=1), trajectory(member=1)]})
    setting.executor.submit(tickets(prompts(1)), step=0, purpose="train")
    result = (await setting.results(1))["p0"]
    assert result.outcome == "failed" and "(member, turn): [(1, 0)]" in result.reason
    assert len(setting.store) == 0
    await setting.executor.close()


async def test_close_cancels_what_runs() -> None:
    setting = Setting()
    setting.workflow.hold("p0", "p1")
    setting.executor.submit(tickets(prompts(2)), step=0, purpose="train")
    await asyncio.sleep(0.01)
    assert setting.workflow.at_once == 2
    await setting.executor.close()
    assert setting.workflow.at_once == 0


async def test_thousands_of_groups_leave_nothing() -> None:
    setting = Setting(max_concurrent=32)
    seen: Counter[str] = Counter()
    for start in range(0, 2000, 100):
        setting.executor.submit(tickets(prompts(100, start)), step=0, purpose="train")
        for result in (await setting.results(100)).values():
            assert result.group is not None
            seen[result.prompt.id] += 1
            setting.store.release([h.key for s in result.group.samples for h in s.tensors.values()])
    assert len(seen) == 2000 and set(seen.values()) == {1}
    assert (len(setting.store), setting.store.nbytes) == (0, 0)
    assert setting.executor.queued("train") == (0, 0, 0)
    await setting.executor.close()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"loss_mask": np.zeros(3, dtype=bool)}, "no trained token"),
        ({"reward": float("inf")}, "reward not finite"),
        ({"logprobs": np.array([0.0, np.nan, -1.0])}, "log-probabilities not finite"),
        ({"logprobs": np.array([np.nan, -1.0, -1.0])}, None),  # of the prompt: not trained
        ({"logprobs": np.array([0.0, 0.5, -1.0])}, "log-probabilities above 0"),
        ({"versions": np.array([-1, -1, 3])}, "tokens without a weight version"),
    ],
)
def test_trajectories_that_cannot_be_right_are_named(changes: dict[str, Any], fault: str | None) -> None:
    assert fault_of(trajectory(**changes)) == fault
