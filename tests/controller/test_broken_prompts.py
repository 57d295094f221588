"""Rewards and workflows that never give a group: the controller and a real rollout worker with real verifier processes, in one process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.schema import Recipe
from areal_mega.controller.rollout import RolloutController, RolloutFailed
from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.core.types import Prompt, Trajectory
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.inference import GenerateRequest, Generation
from areal_mega.rollout.staleness import StalenessControl
from areal_mega.rollout.worker import RolloutWorker
from areal_mega.rollout.workflow import GenerationEngine, Workflow

MODEL = Path(__file__).resolve().parents[2] / "recipes/quickstart_model"
ROWS = [{"id": f"p{i}", "prompt": f"{i:02d}+01=", "answer": str(i + 1)} for i in range(50)]


def raises(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    raise KeyError("no such column")


def says_none(prompt: str, completion: str, row: Mapping[str, Any]) -> None:
    return None


def hangs(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    while True:
        pass


class Rejects(Workflow):
    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        return None


class Raises(Workflow):
    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        raise ZeroDivisionError("in the workflow")


class ReturnsNothing(Workflow):
    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        return []


class NeverEnds(Workflow):
    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        await asyncio.Event().wait()
        return None


class DigitEngine:
    """Answers every request with one digit and the end of the sequence."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return [
            Generation(
                output_ids=(4, 1), logprobs=(-1.0, -1.0), versions=(0, 0), finish_reason="stop", prompt_tokens=len(r.input_ids), text="2"
            )
            for r in requests
        ]  # fmt: skip


class LocalClient:
    """A worker of this process behind the interface of its RPC client."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker, self.address, self.peer = worker, "w:0", "rollout rank 0"

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        return await getattr(self._worker, method)(**kwargs)


@asynccontextmanager
async def control(monkeypatch: pytest.MonkeyPatch, *, timeout_s: float = 60.0, **sections: Any) -> AsyncIterator[RolloutController]:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r", "steps": 10},
            "model": {"path": str(MODEL)},
            "rollout": {"group_size": 2},
            "train": {"batch_size": 2},
            "algorithm": {"correction": "decoupled"},
            "launch": {"rpc_timeout_s": timeout_s},
            "reward": {"path": "areal_mega.rewards.arithmetic.arithmetic_reward"},
            **sections,
        }
    )
    worker = RolloutWorker(recipe, address="w:0", spill=Path("spill-of-nothing"))
    try:
        await worker.start()
        worker.use(DigitEngine())
        stream = PromptStream(ROWS, seed=1, shuffle=False)
        made = RolloutController({0: LocalClient(worker)}, stream, StalenessControl(2, 1), recipe, algorithm_of(recipe))  # type: ignore[dict-item]
        await made.generate_always()
        yield made
    finally:
        await worker.close()


async def end_of(control: RolloutController) -> Exception:
    """How a run ends that wants a batch: as the trainer does, beside the listener."""
    tasks = {asyncio.create_task(control.listen()), asyncio.create_task(control.next_batch(2))}
    try:
        async with asyncio.timeout(240):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, Exception)
        assert "\n" not in str(error)
        return error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "no member is left: 2 x reward error: KeyError: 'no such column'"),
        ("says_none", "no member is left: 2 x reward error: the reward function returned None, not a finite number"),
    ],
)
async def test_a_reward_that_always_fails(monkeypatch: pytest.MonkeyPatch, function: str, reason: str) -> None:
    async with control(monkeypatch, reward={"path": f"test_broken_prompts.{function}"}) as broken:
        error = await end_of(broken)
    assert isinstance(error, RolloutFailed)
    assert f"prompts in a row failed; the last: {reason}" in str(error)


async def test_a_verifier_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with control(monkeypatch, reward={"path": "test_broken_prompts.hangs", "timeout_s": 0.2}) as broken:
        error = await end_of(broken)
    assert isinstance(error, UserError)
    assert str(error).startswith("reward 'test_broken_prompts.hangs': none of its first ")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Rejects", "rejected); the last: rejected by the workflow"),
        ("Raises", "prompts in a row failed; the last: ZeroDivisionError: in the workflow"),
        ("ReturnsNothing", "prompts in a row failed; the last: the workflow returned 0 trajectories"),
    ],
)
async def test_a_workflow_that_gives_nothing(monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    async with control(monkeypatch, workflow={"path": f"test_broken_prompts.{name}"}) as broken:
        error = await end_of(broken)
    assert isinstance(error, RolloutFailed)
    assert reason in str(error)


async def test_a_workflow_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with control(monkeypatch, timeout_s=0.5, workflow={"path": "test_broken_prompts.NeverEnds"}) as broken:
        error = await end_of(broken)
    assert isinstance(error, DeadlineExceeded)
    assert str(error).startswith("no episode finished within launch.rpc_timeout_s=0.5 s: rollout rank 0 runs prompt p0 for ")


async def test_a_sound_one_makes_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with control(monkeypatch) as sound:
        listening = asyncio.create_task(sound.listen())
        async with asyncio.timeout(120):
            ready = await sound.next_batch(2)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    assert [g.prompt.id for g in ready.groups] == ["p0", "p1"]
    assert [s.reward for s in ready.groups[1].samples] == [1.0, 1.0]  # 01+01=2
