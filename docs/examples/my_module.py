"""A workflow that gives a wrong answer a second try."""

import asyncio

import numpy as np

from areal_mega.core.types import NOT_GENERATED, Trajectory
from areal_mega.data.prompts import prompt_tokens
from areal_mega.rollout.workflow import Workflow


class SecondTry(Workflow):
    def __init__(self, context, hint="?"):
        super().__init__(context)
        self.hint = context.tokenizer.encode(hint, add_special_tokens=False)

    async def arun_episode(self, engine, data):
        prompt = prompt_tokens(self.context.tokenizer, data.row)
        first = await engine.generate(self.context.requests(prompt, data))
        members = await asyncio.gather(*(self.member(engine, data, prompt, i, g) for i, g in enumerate(first)))
        return [trajectory for trajectory in members if trajectory is not None]

    async def member(self, engine, data, prompt, member, generation):
        turns, result = [generation], await self.score(data, generation)
        if result is not None and result.value < 1.0:
            ids = [*prompt, *generation.output_ids, *self.hint]
            turns += await engine.generate(self.context.requests(ids, data, [member]))
            result = await self.score(data, turns[-1])
        return None if result is None else self.trajectory(prompt, turns, result, member)

    async def score(self, data, generation):
        text = self.context.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        return await self.context.score(data.row["prompt"], text, data.row)

    def trajectory(self, prompt, turns, result, member):
        ids, logprobs, versions = list(prompt), [0.0] * len(prompt), [NOT_GENERATED] * len(prompt)
        for number, turn in enumerate(turns):
            given = self.hint if number else []  # tokens that no server made: never trained
            ids += [*given, *turn.output_ids]
            logprobs += [0.0] * len(given) + list(turn.logprobs)
            versions += [NOT_GENERATED] * len(given) + list(turn.versions)
        return Trajectory(
            input_ids=np.array(ids, dtype=np.int32),
            loss_mask=np.array(versions) != NOT_GENERATED,
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
            reward=result.value,
            finish_reason=turns[-1].finish_reason,
            scores=dict(result.scores),
            member=member,
        )
