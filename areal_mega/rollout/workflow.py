"""What a workflow is: the program that turns one prompt into trajectories.

A user's own workflow subclasses `Workflow`, calls ``engine.generate`` as often as it likes (turns, tools, judges), scores with
``self.context.score``, and returns trajectories. The recipe names it by import path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from areal_mega.core.types import Prompt, Trajectory, sampling_seed
from areal_mega.rewards.result import RewardResult
from areal_mega.rollout.inference import GenerateRequest, Generation


class GenerationEngine(Protocol):
    """Whatever generates: the client of an inference server, or a test's own."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One generation per request, in their order. Requests with equal ``input_ids`` share a prefill."""
        ...


class Scorer(Protocol):
    """Whatever verifies: `areal_mega.rewards.runner.RewardRunner`, or a test's own."""

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> RewardResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """How a workflow is to sample. For evaluation these are the evaluation's settings, not the training's."""

    group_size: int
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()


drops: ContextVar[Counter[str]] = ContextVar("drops")
"""Members of the running episode that gave no trajectory, by reason. The executor sets it for the task of each episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """What every episode of a run shares.

    ``tokenizer`` is the model's (transformers), ``settings`` how to sample, ``reward`` the verifier, ``run_seed`` the run's seed,
    ``evaluation`` True where nothing will be trained on.
    """

    tokenizer: Any
    settings: GenerationSettings
    reward: Scorer
    run_seed: int
    evaluation: bool

    def requests(self, input_ids: Sequence[int], prompt: Prompt, members: Sequence[int] | None = None) -> list[GenerateRequest]:
        """One request per member of a group (default: all of them) that continues ``input_ids``, each with a seed of its own."""
        s = self.settings
        eos = self.tokenizer.eos_token_id
        return [
            GenerateRequest(
                input_ids=tuple(input_ids),
                max_new_tokens=s.max_new_tokens,
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                stop=s.stop,
                # The server stops at the model's own end-of-sequence tokens besides; a tokenizer's may be another (chat models).
                stop_token_ids=() if eos is None else (int(eos),),
                seed=sampling_seed(self.run_seed, prompt.id, prompt.epoch, member),
            )
            for member in (range(s.group_size) if members is None else members)
        ]

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> RewardResult | None:
        """Verify one completion in an isolated process. None where no reward is known (time-out, broken verifier): the member is
        then counted as dropped, and must not be returned with a made-up reward."""
        result = await self.reward.score(prompt, completion, row)
        if result.value is None:
            self.drop(f"reward {result.status}: {result.message}")
            return None
        return result

    def drop(self, reason: str) -> None:
        """Count a member of the running episode that gives no trajectory. Shown with the episode's result."""
        drops.get()[reason] += 1


class Workflow(ABC):
    """One instance runs all episodes of a purpose, many at once: keep no state of an episode on it.

    Args:
        context: what every episode shares.
        kwargs: ``workflow.kwargs`` of the recipe, for a subclass's own constructor.
    """

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    @abstractmethod
    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        """Run one prompt.

        Returns:
            One trajectory per member, fewer where members were dropped; None to reject the prompt (it is then counted, and another
            prompt takes its place). An exception is reported with the prompt, and ends nothing else.
        """
