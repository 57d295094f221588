"""The training loop: plain first, then overlapped. They differ in one line.

Plain: prompts are submitted when a batch is wanted, and nothing generates while the trainer works. Overlapped: generation goes on all
the time, as far ahead as the staleness bound allows.
"""

from __future__ import annotations

from areal_mega.controller.run import Run


async def plain_loop(run: Run) -> None:
    await run.begin()
    for step in range(run.first_step, run.recipe.run.steps):
        groups = await run.rollout_batch(step)
        await run.train_step(step, groups)
        await run.sync_weights(step)
        await run.finish_step(step)


async def overlapped_loop(run: Run) -> None:
    await run.begin()
    await run.rollout.generate_always()
    for step in range(run.first_step, run.recipe.run.steps):
        groups = await run.rollout_batch(step)
        await run.train_step(step, groups)
        await run.sync_weights(step)
        await run.finish_step(step)
