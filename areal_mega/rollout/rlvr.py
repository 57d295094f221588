"""Reinforcement learning with verifiable rewards: one turn, n samples, each scored by a verifier."""

from __future__ import annotations

import asyncio

import numpy as np

from areal_mega.core.types import NOT_GENERATED, Prompt, Trajectory
from areal_mega.data.prompts import prompt_tokens
from areal_mega.rollout.inference import Generation
from areal_mega.rollout.workflow import GenerationEngine, Workflow


class RLVRWorkflow(Workflow):
    """Tokenise the prompt once, generate ``group_size`` answers that share its prefill, verify each.

    The verifier sees the answer without special tokens. Answers are never tokenised again: what was sampled is what is trained.
    """

    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        tokenizer = self.context.tokenizer
        prompt_ids = prompt_tokens(tokenizer, data.row)
        prompt_text = tokenizer.decode(prompt_ids)
        requests = self.context.requests(prompt_ids, data)
        generations = await engine.generate(requests)
        if len(generations) != len(requests):
            raise RuntimeError(f"asked for {len(requests)} samples, and the inference server gave {len(generations)}")
        members = await asyncio.gather(*(self._member(i, prompt_ids, prompt_text, data, g) for i, g in enumerate(generations)))
        return [trajectory for trajectory in members if trajectory is not None]

    async def _member(
        self, member: int, prompt_ids: list[int], prompt_text: str, data: Prompt, generation: Generation
    ) -> Trajectory | None:
        if generation.finish_reason == "abort":
            self.context.drop("generation aborted")
            return None
        completion = self.context.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        result = await self.context.score(prompt_text, completion, data.row)
        if result is None:
            return None
        assert result.value is not None
        return single_turn(prompt_ids, generation, reward=result.value, scores=dict(result.scores), member=member)


def single_turn(prompt_ids: list[int], generation: Generation, *, reward: float, scores: dict[str, float], member: int) -> Trajectory:
    """The trajectory of a prompt and what was generated after it: the prompt is not trained, every generated token is."""
    before, new = len(prompt_ids), len(generation.output_ids)
    return Trajectory(
        input_ids=np.array([*prompt_ids, *generation.output_ids], dtype=np.int32),
        loss_mask=np.array([False] * before + [True] * new, dtype=np.bool_),
        logprobs=np.array([0.0] * before + list(generation.logprobs), dtype=np.float32),
        versions=np.array([NOT_GENERATED] * before + list(generation.versions), dtype=np.int32),
        reward=reward,
        finish_reason=generation.finish_reason,
        scores=scores,
        member=member,
    )
