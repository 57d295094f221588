"""Engines, verifiers and workflows that the tests of rollout control."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_mega.core.types import Prompt, Trajectory
from areal_mega.rewards.result import RewardResult
from areal_mega.rollout.inference import GenerateRequest, Generation
from areal_mega.rollout.workflow import GenerationEngine, GenerationSettings, Workflow, WorkflowContext


class FakeEngine:
    """Answers each request with digits of its seed and a stop token; remembers what it was asked."""

    def __init__(self, version: int = 3) -> None:
        self.version = version
        self.asked: list[GenerateRequest] = []
        self.change: dict[int, dict[str, Any]] = {}
        """Fields to replace in the generation of the n-th member."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.asked.extend(requests)
        await asyncio.sleep(0)
        return [self._one(i, request) for i, request in enumerate(requests)]

    def _one(self, member: int, request: GenerateRequest) -> Generation:
        ids = tuple(3 + int(d) for d in str(request.seed)[:3]) + (1,)
        fields: dict[str, Any] = {
            "output_ids": ids,
            "logprobs": tuple(-0.5 - i for i in range(len(ids))),
            "versions": (self.version,) * len(ids),
            "finish_reason": "stop",
            "prompt_tokens": len(request.input_ids),
            "text": "",
        }
        return Generation(**{**fields, **self.change.get(member, {})})


class FakeScorer:
    """Rewards by a function of the completion's order of arrival."""

    def __init__(self, *results: RewardResult) -> None:
        self.results = list(results) or [RewardResult(value=1.0, status="ok")]
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> RewardResult:
        self.asked.append((prompt, completion, row))
        return self.results[(len(self.asked) - 1) % len(self.results)]


def context(tokenizer: Any = None, reward: Any = None, evaluation: bool = False, **settings: Any) -> WorkflowContext:
    fields: dict[str, Any] = {"group_size": 2, "max_new_tokens": 8, "temperature": 1.0, **settings}
    return WorkflowContext(
        tokenizer=tokenizer, settings=GenerationSettings(**fields), reward=reward or FakeScorer(), run_seed=7, evaluation=evaluation
    )


def prompts(n: int, start: int = 0) -> list[Prompt]:
    return [Prompt(id=f"p{i}", epoch=0, row={"id": f"p{i}", "prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(start, start + n)]


def tickets(of: list[Prompt], first: int = 0) -> dict[int, Prompt]:
    """Prompts as they are submitted: by ticket."""
    return dict(enumerate(of, first))


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "input_ids": np.array([5, 6, 7], dtype=np.int32),
        "loss_mask": np.array([False, True, True]),
        "logprobs": np.array([0.0, -1.0, -2.0], dtype=np.float32),
        "versions": np.array([-1, 4, 5], dtype=np.int32),
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return Trajectory(**{**fields, **changes})


class ScriptedWorkflow(Workflow):
    """Does what ``script[prompt id]`` says; waits for ``gate`` first where there is one."""

    def __init__(self, context: WorkflowContext, script: Mapping[str, Any] | None = None) -> None:
        super().__init__(context)
        self.script = dict(script or {})
        self.gates: dict[str, asyncio.Event] = {}
        self.started: list[str] = []
        self.at_once = 0
        self.most_at_once = 0

    def hold(self, *ids: str) -> None:
        self.gates |= {i: asyncio.Event() for i in ids}

    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        self.started.append(data.id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if data.id in self.gates:
                await self.gates[data.id].wait()
            await asyncio.sleep(0)
            action = self.script.get(data.id, [trajectory(), trajectory()])
            if isinstance(action, Exception):
                raise action
            if callable(action):
                return action(self.context)
            return action
        finally:
            self.at_once -= 1


def length_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The completion's length, and the process that measured it."""
    return {"reward": float(len(completion)), "pid": float(os.getpid())}
