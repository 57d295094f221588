"""A run under way: what one step of the loops does, and what is measured of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.controller import exports
from areal_mega.controller.batch import StepBatch, batch_metrics, bias_metrics, mean_reward, plan_step, score_metrics
from areal_mega.controller.keeper import ReplicaKeeper
from areal_mega.controller.recover import RecoverPoint, Recovery, Stopped, recover_folder
from areal_mega.controller.rollout import ReadyBatch, RolloutController, RolloutFailed
from areal_mega.controller.sync import WeightSync
from areal_mega.controller.train import NotLoaded, TrainController
from areal_mega.core import metrics as m
from areal_mega.core import points
from areal_mega.core.metrics import Metrics, merge
from areal_mega.core.types import Prompt
from areal_mega.observe.jsonl import LineLog
from areal_mega.observe.observer import Observer
from areal_mega.parallel.balance import CostModel
from areal_mega.rollout.staleness import oldest_allowed

log = logging.getLogger(__name__)

TRAINED_FILE = "trained.jsonl"
"""In the run directory: the prompts (id and epoch) that each step was trained on."""
_MOVED = ("late", "withdrawn", "refilled", "lost_groups")
"""Counts of groups that came too late to count, prompts that a dead server had, prompts that the bound had generated again, and groups
that were lost with their worker."""
_WARMUP_CALL = 25
"""Supervised steps per call: few enough that progress is seen, many enough that the calls cost nothing."""


class Run:
    """State of the training loop between its processes.

    Args:
        valid: evaluation prompts; empty: no evaluation.
        cost: relative cost of a sequence, for balancing.
        run_dir: exports go below it.
        resumed: the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        *,
        train: TrainController,
        rollout: RolloutController,
        sync: WeightSync,
        replicas: ReplicaKeeper,
        observer: Observer,
        valid: Sequence[Prompt],
        cost: CostModel,
        run_dir: Path,
        resumed: RecoverPoint | None = None,
    ) -> None:
        self.recipe, self.algorithm = recipe, algorithm
        self.train, self.rollout, self.sync, self.replicas, self.observer = train, rollout, sync, replicas, observer
        self._valid, self._cost, self._run_dir = valid, cost, run_dir
        self.version = 0
        self._steps_unsent = 0
        """Steps that the servers' weights are behind the trainer's."""
        self.first_eval: float | None = None
        self.last_eval: float | None = None
        self.export_path: Path | None = None
        self._step_started = time.perf_counter()
        self._tokens_seen = 0
        self._metrics: list[Metrics] = []
        self._histograms: dict[str, dict[int, int]] = {}
        self._poisoned_seen = 0
        self.first_step = 0
        """Train steps done before this attempt."""
        self._stop = asyncio.Event()
        self._resumed = resumed
        self._trained = LineLog(run_dir / TRAINED_FILE)
        self.recovery = Recovery(
            train, recipe.checkpoint, recover_folder(recipe, run_dir), self._state, timeout_s=recipe.launch.rpc_timeout_s
        )

    @property
    def stop_asked(self) -> bool:
        """Set from outside: save after the step under way, or before it where its groups are still waited for, and end."""
        return self._stop.is_set()

    @stop_asked.setter
    def stop_asked(self, asked: bool) -> None:
        (self._stop.set if asked else self._stop.clear)()

    async def begin(self) -> None:
        """Supervised warm-up, the first weight sync (version 0), and the evaluation before the first step (logged as step 0)."""
        if self._resumed is not None:
            await self._restore(self._resumed)
        else:
            await self._warm_up()
        await self.sync.connect()
        await self._push()
        await self.rollout.set_version(self.version, step=self.first_step)
        if self._resumed is not None:
            # Its first step begins here: what the start took is none of that step's.
            now = time.perf_counter()
            self.observer.note(f"weights of version {self.version} sent; {now - self._step_started:.1f} s since the processes were ready")
            self._metrics, self._step_started = [], now
            return
        if self.recipe.eval.at_start:
            await self._evaluated(0, last=False)
            self.first_eval = self.last_eval
        self._log(0)

    async def rollout_batch(self, step: int) -> ReadyBatch:
        """Wait for the groups of one train step."""
        clock = time.perf_counter()
        ready = await self.rollout.next_batch(self.recipe.train.batch_size, lambda arrival: self._or_catch_up(arrival, step))
        await points.reached("rollout.batch")
        self._metrics.append({"time/wait_rollout": m.total(time.perf_counter() - clock)})
        self._histograms = {
            "staleness/age": ready.ages,
            "staleness/fresh_length": ready.bias.fresh.lengths,
            "staleness/late_length": ready.bias.late.lengths,
        }
        return ready

    async def train_step(self, step: int, ready: ReadyBatch) -> None:
        """Plan, train, and let the workers forget the batch. Steps count from 0 here and from 1 in what is logged."""
        while (trained := await self._train_on(ready, step)) is None:
            ready = await self.rollout_batch(step)
        self._metrics += trained
        self._steps_unsent += 1
        self._trained.write({"step": step + 1, "prompts": [[group.prompt.id, group.prompt.epoch] for group in ready.groups]})
        await points.reached("train.logged")
        await self.rollout.release(ready.taken)
        self._metrics.append(
            {"staleness/dropped_samples": m.total(ready.dropped_samples), "staleness/refilled_prompts": m.total(ready.refilled)}
        )
        self._metrics.append(bias_metrics(ready.bias))

    async def _train_on(self, ready: ReadyBatch, step: int) -> list[Metrics] | None:
        """The updates of one step, and what was measured; None where samples were lost with their worker before the ranks had them."""
        batch = self._plan(ready)
        if not any(batch.trained_tokens):
            raise RolloutFailed(
                f"step {step + 1}: none of the {len(batch.samples)} samples has a token to train on (stale or truncated); raise "
                "staleness.max_staleness or rollout.max_new_tokens, or set algorithm.mask_truncated to false"
            )
        try:
            measured = await self.train.step(batch, step=step, version=self.version)
        except NotLoaded as error:
            if not await self.rollout.is_torn(error.__cause__):
                raise
            lost = await self.rollout.give_back()
            self.observer.note(
                f"step {step + 1}: {lost} of {len(ready.groups)} groups were lost with their rollout worker; generated again"
            )
            return None
        return [batch_metrics(ready.groups, batch, self.version, ready.ages, ready.stale_tokens), measured]

    async def sync_weights(self, step: int) -> None:
        """Send the new weights, where the schedule has it (always after the last step), and let more prompts start."""
        every, last = self.recipe.sync.every_steps, step + 1 == self.recipe.run.steps
        if (step + 1) % every and not last:
            return
        self.version += 1
        await self._push()
        await self.rollout.set_version(self.version, step=step + 1)
        await points.reached("step.synced")

    async def finish_step(self, step: int) -> None:
        """Evaluation and export by schedule, then the step's line in every log."""
        done, last = step + 1, step + 1 == self.recipe.run.steps
        every, evaluated = self.recipe.eval.every_steps, False
        if last or (every and done % every == 0):
            evaluated = await self._evaluated(done, last=last)
            await points.reached("step.evaluated")
        section = self.recipe.checkpoint
        if (last and section.export_at_end) or (section.export_every_steps and done % section.export_every_steps == 0):
            await self._export("final" if last else f"step-{done}", done, self.last_eval if evaluated else None)
            await points.reached("step.exported")
        self._histograms |= await self.rollout.drain_decode()
        self._log(done)
        await points.reached("step.logged")
        stops = self.stop_asked and not last
        if self.recovery.due(done) or stops:
            await self.recovery.save(done)
        if stops:
            await self._end_as_asked(done)
        if last:
            await self._finish_saving()
        self._metrics += await self.recovery.drain()

    async def _end_as_asked(self, done: int) -> NoReturn:
        """Between two steps, ``done`` of them done: end with a checkpoint of now."""
        await self._finish_saving()
        if not done:
            raise Stopped("ended before the first step as asked, with nothing to save; run.resume=true begins again")
        if not self.recovery.has(done):
            await self.recovery.save(done)
            await self._finish_saving()
        raise Stopped(f"ended after step {done} as asked, with everything saved; run.resume=true goes on")

    async def _finish_saving(self) -> None:
        await self.recovery.finish()
        if saved := m.results(merge(await self.recovery.drain())):  # no step's line is to come
            self.observer.note(f"last recover checkpoint: {', '.join(f'{name} {value:.4g}' for name, value in saved.items())}")

    async def _restore(self, point: RecoverPoint) -> None:
        """Go on from a checkpoint: weights and optimizer on the train ranks, everything else here."""
        clock = time.perf_counter()
        state = point.state()
        self.rollout.restore(state["rollout"])
        await self.train.call("recover_load", place=str(point.path), counters=state["train"])
        self.first_step, self.version = int(state["step"]), int(state["version"])
        self.first_eval, self.last_eval = state["first_eval"], state["last_eval"]
        self._tokens_seen, self._poisoned_seen = self.rollout.counts["tokens"], len(self.rollout.poisoned)
        self.observer.note(f"going on after step {self.first_step} from {point.path}, {time.perf_counter() - clock:.1f} s")

    def _state(self) -> dict[str, Any]:
        """The controller's part of a recover checkpoint, as plain JSON types; see ``_restore``."""
        return {
            "version": self.version,
            "rollout": self.rollout.state(),
            "first_eval": self.first_eval,
            "last_eval": self.last_eval,
        }

    def _plan(self, ready: ReadyBatch) -> StepBatch:
        train = self.recipe.train
        strategy = self.train.layout.strategy
        return plan_step(
            ready.groups,
            min_version=oldest_allowed(self.version, self.recipe.staleness.max_staleness),
            mask_truncated=self.algorithm.mask_truncated,
            dp=strategy.dp,
            minibatches=train.minibatches,
            microbatch_tokens=train.microbatch_tokens,
            cost=self._cost,
            multiple_of=strategy.microbatch_multiple,
            sequence_multiple=strategy.sequence_multiple,
        )

    async def _push(self) -> None:
        """Weights to every server, those included that were started again and have none yet."""
        if self.recipe.sync.pause != "drain":
            return await self._push_now()
        clock = time.perf_counter()
        async with self.rollout.drained():
            self._metrics.append({"sync/drain_s": m.total(time.perf_counter() - clock)})
            await self._push_now()

    async def _push_now(self) -> None:
        while True:
            await self.replicas.settled()
            with self.replicas.steady():
                new = self.replicas.admit()  # within: who died before is out, and who dies from here on ends the run
                if self.sync.members:
                    self._metrics.append(await self.sync.push(self.version))
                    break
            await self.replicas.revived()  # or the keeper gives the last one up, which ends the run
        self._steps_unsent = 0
        await self.replicas.resume(new, self.version)

    async def _catch_up(self, step: int) -> None:
        """Weights to servers that were started again, at a moment when the trainer is idle.

        Where it has trained since the last sync (``sync.every_steps``), what it holds is a version of its own.
        """
        if self._steps_unsent:
            self.version += 1
        await self._push()
        await self.rollout.set_version(self.version, step=step, scheduled=False)

    async def _or_catch_up(self, arrival: Coroutine[Any, Any, None], step: int) -> None:
        """Await ``arrival``, or end that wait for a server that comes back: never beside it, for a batch is of one version.

        Raises:
            Stopped: the run was asked to end, which may be long before another step is: with no replica there nothing arrives.
        """
        task = asyncio.ensure_future(arrival)
        news = asyncio.ensure_future(self.replicas.revived()), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, *news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (task, *news):
                each.cancel()
            await asyncio.gather(task, *news, return_exceptions=True)
        if not task.cancelled():
            return task.result()
        if self.stop_asked:
            await self._end_as_asked(step)
        await self._catch_up(step)

    async def _evaluated(self, step: int, *, last: bool) -> bool:
        """Evaluate, which leaves the trainer idle; a server that comes back meanwhile gets its weights.

        Returns:
            Whether it was done to the end: a run that is asked to end (but not in its ``last`` step) has no time for it.
        """
        task = asyncio.ensure_future(self._evaluate())
        revived, stop = asyncio.ensure_future(self.replicas.revived()), asyncio.ensure_future(self._stop.wait())
        try:
            while True:
                await asyncio.wait({task, revived} if last else {task, revived, stop}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    task.result()
                    return True
                if stop.done() and not last:
                    self.observer.note(f"the evaluation after step {step} is cut short: the run was asked to end")
                    return False
                await self._catch_up(step)
                revived = asyncio.ensure_future(self.replicas.revived())
        finally:
            for each in (task, revived, stop):
                each.cancel()
            await asyncio.gather(task, revived, stop, return_exceptions=True)

    async def _warm_up(self) -> None:
        section = self.recipe.warmup
        clock = time.perf_counter()
        for start in range(0, section.steps, _WARMUP_CALL):
            count = min(_WARMUP_CALL, section.steps - start)
            metrics = m.results(await self.train.warmup(count))
            self.observer.note(f"warm-up {start + count}/{section.steps}: {metrics['sft/nll']:.3f} nats per token")
        if section.steps:
            self._metrics.append({"time/warmup": m.total(time.perf_counter() - clock)})

    async def _evaluate(self) -> None:
        if not self._valid:
            return
        clock = time.perf_counter()
        results = await self.rollout.evaluate(self._valid)
        samples = [sample for result in results if result.group is not None for sample in result.group.samples]
        failed = [result for result in results if result.group is None]
        if not samples:
            raise RolloutFailed(f"all {len(failed)} evaluation prompts failed; the last: {failed[-1].reason}")
        accuracy = mean_reward(samples)
        self.last_eval = accuracy.result
        measured: Metrics = {
            "eval/accuracy": accuracy,
            "rollout/eval_prompts": m.total(len(results)),
            "rollout/eval_failed_prompts": m.total(len(failed)),
            "rollout/eval_dropped_samples": m.total(sum(sum(result.dropped.values()) for result in results)),
            "time/eval": m.total(time.perf_counter() - clock),
        }
        self._metrics.append(measured | score_metrics("eval", samples, measured))

    async def _export(self, name: str, step: int, evaluation: float | None) -> None:
        """A complete model with its card; ``evaluation`` as measured at this step."""
        clock = time.perf_counter()
        folder = self._run_dir / "export" / name
        await asyncio.to_thread(exports.make_room, folder)
        await self.train.call("export", folder=str(folder))
        resolved = (self._run_dir / "recipe.yaml").read_text(encoding="utf-8")
        exports.describe(folder, self.recipe, step=step, version=self.version, evaluation=evaluation, resolved=resolved)
        await asyncio.to_thread(exports.tidy, folder.parent, self.recipe.checkpoint.keep_exports, step=step)
        self.export_path = folder
        self._metrics.append({"time/export": m.total(time.perf_counter() - clock)})

    def _log(self, step: int) -> None:
        now = time.perf_counter()
        seconds, self._step_started = now - self._step_started, now
        generated, self._tokens_seen = self.rollout.counts["tokens"] - self._tokens_seen, self.rollout.counts["tokens"]
        metrics = merge(self._metrics)
        metrics["time/total"] = m.total(seconds)
        if step:
            metrics["rollout/tokens"] = m.total(generated)
            metrics["rollout/tokens_per_s"] = m.last(generated / seconds)
            metrics["train/tokens"] = metrics["batch/trained_tokens"]
            metrics["throughput/samples_per_s"] = m.last(metrics["batch/samples"].value / seconds)
            for name in ("rejected", "failed", "timed_out", "retried", "poisoned", "uniform", "lone", "dropped_samples", *_MOVED):
                metrics[f"rollout/{name}"] = m.last(self.rollout.counts[name])
        lengths = {"rollout/length": self.rollout.drain_lengths()}
        self.observer.log(step, metrics, lengths | self._histograms)
        self._metrics, self._histograms = [], {}
        poisoned = list(self.rollout.poisoned.items())
        for prompt, reason in poisoned[self._poisoned_seen :]:
            self.observer.note(f"prompt {prompt} is poisoned, and not tried again: {reason}")
        self._poisoned_seen = len(poisoned)
