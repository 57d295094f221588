"""Runs many episodes at once and turns what they return into groups.

Every submission ends in exactly one `EpisodeResult`, unless it is cancelled: nothing is retried here (the client of the inference
server sends a failed request again; whether a prompt is tried again is decided by `areal_mega.rollout.dispatch`) and nothing is
dropped without a word.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.core.types import Group, Prompt, Sample, SampleId, Trajectory, count_versions
from areal_mega.rollout.inference import ServerFault
from areal_mega.rollout.results import PURPOSES, EpisodeResult, Purpose
from areal_mega.rollout.store import TrajectoryStore
from areal_mega.rollout.workflow import GenerationEngine, Workflow, drops

log = logging.getLogger(__name__)

_CANCEL_S = 5.0


@dataclass(frozen=True, slots=True)
class _Episode:
    prompt: Prompt
    ticket: int
    step: int
    purpose: Purpose
    submitted: float
    """time.monotonic() at submission."""


class Executor:
    """Bounded concurrency, first submitted first started; evaluation prompts go before training prompts that have not started.

    Args:
        run: name of the run, for sample ids.
        engine: generates.
        workflows: one workflow per purpose that will be submitted.
        store: keeps the trajectories of training groups.
        max_concurrent: episodes at once.
        timeout_s: an episode that takes longer, from its start, is ended.
    """

    def __init__(
        self,
        *,
        run: str,
        engine: GenerationEngine,
        workflows: Mapping[Purpose, Workflow],
        store: TrajectoryStore,
        max_concurrent: int,
        timeout_s: float,
    ) -> None:
        self._run, self._engine, self._workflows, self._store = run, engine, workflows, store
        self._max_concurrent, self._timeout_s = max_concurrent, timeout_s
        self._waiting: dict[Purpose, deque[_Episode]] = {purpose: deque() for purpose in PURPOSES}
        self._running: dict[asyncio.Task[None], _Episode] = {}
        self._finished: dict[Purpose, deque[EpisodeResult]] = {purpose: deque() for purpose in PURPOSES}
        self._arrival = asyncio.Condition()
        self._wake = asyncio.Event()
        self._starter: asyncio.Task[None] | None = None
        self._fatal: BaseException | None = None
        self._suspended = False
        self.counts: Counter[str] = Counter()
        """Since start: outcomes (``train/group``, …), tokens (``train/tokens``: generated), dropped members by kind."""

    def submit(self, prompts: Mapping[int, Prompt], *, step: int, purpose: Purpose) -> None:
        """Queue prompts by ticket. Never blocks: how many may be under way is the business of whoever submits."""
        assert purpose in self._workflows, f"no workflow for purpose {purpose}"
        if self._starter is None:
            self._starter = asyncio.create_task(self._start_episodes())
        now = time.monotonic()
        self._waiting[purpose].extend(_Episode(prompt, ticket, step, purpose, now) for ticket, prompt in prompts.items())
        self._wake.set()

    async def collect(self, max_results: int, *, wait_s: float, purpose: Purpose) -> list[EpisodeResult]:
        """Up to ``max_results`` finished episodes, in the order they finished; waits for the first one at most ``wait_s``.

        Raises:
            UserError: an episode met a mistake that every other prompt would meet too (a tokenizer without a chat template, …).
        """
        finished = self._finished[purpose]
        async with self._arrival:
            try:
                async with asyncio.timeout(wait_s):
                    await self._arrival.wait_for(lambda: finished or self._fatal)
            except TimeoutError:
                return []
            if self._fatal is not None:
                raise self._fatal
            return [finished.popleft() for _ in range(min(max_results, len(finished)))]

    async def cancel(self, tickets: Iterable[int], *, purpose: Purpose) -> None:
        """End episodes without a result, whether they run, wait, or have finished and were not collected."""
        gone = set(tickets)
        self._waiting[purpose] = deque(e for e in self._waiting[purpose] if e.ticket not in gone)
        for result in [r for r in self._finished[purpose] if r.ticket in gone]:
            self._finished[purpose].remove(result)
            if result.group is not None:
                self._store.release(handle.key for sample in result.group.samples for handle in sample.tensors.values())
        tasks = [task for task, e in self._running.items() if e.purpose == purpose and e.ticket in gone]
        for task in tasks:
            task.cancel()
        if tasks:  # a workflow may take its time to end, or swallow its cancellation: nobody waits for it longer than this
            await asyncio.wait(tasks, timeout=_CANCEL_S)

    async def suspend(self) -> None:
        """The engine is gone: end what runs and put it back to the head of what waits, in its order. Nothing starts until ``resume``."""
        self._suspended = True
        running = list(self._running.items())
        for task, _ in running:
            task.cancel()
        if running:
            await asyncio.wait([task for task, _ in running], timeout=_CANCEL_S)
        # One that could not be cancelled has finished, or will, with a result of its own.
        for task, episode in reversed(running):
            if task.cancelled():
                self._waiting[episode.purpose].appendleft(episode)

    def withdraw(self, purpose: Purpose) -> list[int]:
        """Give back what waits (while suspended: everything but what has finished), by its tickets; none of it gives a result here."""
        tickets = [episode.ticket for episode in self._waiting[purpose]]
        self._waiting[purpose].clear()
        return tickets

    def resume(self) -> None:
        """The engine is back."""
        self._suspended = False
        self._wake.set()

    def under_way(self, purpose: Purpose) -> list[Prompt]:
        """Prompts submitted and not finished: running ones first."""
        return [e.prompt for e in self._running.values() if e.purpose == purpose] + [e.prompt for e in self._waiting[purpose]]

    def oldest(self, n: int = 3) -> list[tuple[str, float]]:
        """Prompt ids of the longest-running episodes, with their seconds since submission."""
        now = time.monotonic()
        oldest = sorted(self._running.values(), key=lambda episode: episode.submitted)[:n]
        return [(episode.prompt.id, now - episode.submitted) for episode in oldest]

    def queued(self, purpose: Purpose) -> tuple[int, int, int]:
        """Numbers of waiting, running and finished (not yet collected) episodes."""
        running = sum(e.purpose == purpose for e in self._running.values())
        return len(self._waiting[purpose]), running, len(self._finished[purpose])

    async def close(self) -> None:
        """Cancel everything under way and wait until it has ended. What was not finished gives no result."""
        tasks = [*self._running, *([self._starter] if self._starter else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()

    async def _start_episodes(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not self._suspended and len(self._running) < self._max_concurrent and (episode := self._next()) is not None:
                task = asyncio.create_task(self._episode(episode))
                self._running[task] = episode
                task.add_done_callback(self._ended)

    def _next(self) -> _Episode | None:
        if self._waiting["eval"]:
            return self._waiting["eval"].popleft()
        return self._waiting["train"].popleft() if self._waiting["train"] else None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)  # still there only when it was cancelled
        self._wake.set()

    async def _episode(self, episode: _Episode) -> None:
        dropped: Counter[str] = Counter()
        drops.set(dropped)  # this task's own context: what the workflow counts, it counts for this episode
        task = asyncio.current_task()
        assert task is not None
        try:
            result = await self._run_workflow(episode, dropped)
        except UserError as error:
            self._fatal = error
        else:
            self.counts[f"{episode.purpose}/{result.outcome}"] += 1
            for reason, n in dropped.items():
                self.counts[f"{episode.purpose}/dropped/{reason.partition(':')[0]}"] += n
            # In one go: a prompt is never both under way and finished, nor neither, whoever looks.
            self._finished[episode.purpose].append(result)
            self._running.pop(task, None)
        async with self._arrival:
            self._arrival.notify_all()

    async def _run_workflow(self, episode: _Episode, dropped: Counter[str]) -> EpisodeResult:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                trajectories = await self._workflows[episode.purpose].arun_episode(self._engine, episode.prompt)
            if trajectories is None:
                return self._result(episode, dropped, outcome="rejected", reason="rejected by the workflow")
            sound = [t for t in trajectories if self._is_sound(t, dropped)]
            if not sound:
                return self._result(episode, dropped, outcome="failed", reason=_none_left(len(trajectories), dropped))
            return self._result(episode, dropped, outcome="group", group=self._group(episode, sound))
        except UserError:
            raise
        except Exception as error:  # a user's workflow may raise anything: it concerns this prompt, and is reported with it
            if limit.expired():
                reason = f"the episode took longer than rollout.prompt_timeout_s={self._timeout_s:g} s"
                return self._result(episode, dropped, outcome="timed_out", reason=reason)
            log.warning("prompt %s failed", episode.prompt.id, exc_info=error)
            # A server that refuses a request (4xx) found fault with the request.
            to_blame = isinstance(error, DeadlineExceeded) or (isinstance(error, ServerFault) and not error.is_refusal)
            reason = f"{type(error).__name__}: {error}"
            return self._result(episode, dropped, outcome="failed", reason=reason, server_fault=to_blame)

    def _result(self, episode: _Episode, dropped: Counter[str], **fields: object) -> EpisodeResult:
        return EpisodeResult(
            purpose=episode.purpose,
            step=episode.step,
            prompt=episode.prompt,
            ticket=episode.ticket,
            seconds=time.monotonic() - episode.submitted,
            dropped=dict(dropped),
            **fields,  # type: ignore[arg-type]
        )

    def _is_sound(self, trajectory: Trajectory, dropped: Counter[str]) -> bool:
        fault = fault_of(trajectory)
        if fault is not None:
            dropped[fault] += 1
        return fault is None

    def _group(self, episode: _Episode, trajectories: Sequence[Trajectory]) -> Group:
        # Unique over the whole run: a prompt that is refilled within one step forms another group, under other weights.
        group_id = f"{episode.prompt.id}/{episode.prompt.epoch}/{uuid.uuid4().hex[:12]}"
        ids = [self._sample_id(episode, group_id, i, t) for i, t in enumerate(trajectories)]
        twins = [key for key, n in Counter((i.member, i.turn) for i in ids).items() if n > 1]
        if twins:
            raise ValueError(f"the workflow returned several trajectories for one (member, turn): {twins}")
        described = [describe(i, t) for i, t in zip(ids, trajectories, strict=True)]
        if episode.purpose == "train":  # last, so that nothing stays in the store of a group that could not be made
            arrays = [t.arrays() for t in trajectories]
            described = [
                replace(sample, tensors=self._store.put(a, f"{group_id}/{sample.id.member}/{sample.id.turn}"))
                for sample, a in zip(described, arrays, strict=True)
            ]
        self.counts[f"{episode.purpose}/tokens"] += sum(s.loss_tokens for s in described)
        self.counts[f"{episode.purpose}/samples"] += len(described)
        seconds = time.monotonic() - episode.submitted
        return Group(id=group_id, prompt=episode.prompt, samples=tuple(described), worker=self._store.owner, seconds=seconds)

    def _sample_id(self, episode: _Episode, group_id: str, order: int, trajectory: Trajectory) -> SampleId:
        return SampleId(
            run=self._run,
            step=episode.step,
            prompt_id=episode.prompt.id,
            epoch=episode.prompt.epoch,
            group_id=group_id,
            member=order if trajectory.member is None else trajectory.member,
            turn=trajectory.turn,
        )


def describe(sample_id: SampleId, trajectory: Trajectory) -> Sample:
    """The sample that stands for a trajectory at the controller, without handles yet."""
    trained = np.flatnonzero(trajectory.loss_mask)
    return Sample(
        id=sample_id,
        length=len(trajectory.input_ids),
        prompt_length=int(trained[0]),
        loss_tokens=len(trained),
        versions=count_versions(trajectory.versions, trajectory.loss_mask),
        reward=float(trajectory.reward),
        finish_reason=trajectory.finish_reason,
        scores={name: float(value) for name, value in trajectory.scores.items()},
        tensors={},
    )


def fault_of(trajectory: Trajectory) -> str | None:
    """Why a trajectory cannot be trained on, or None. A server's NaN would otherwise surface as a NaN loss, hours later."""
    mask = np.asarray(trajectory.loss_mask, dtype=bool)
    if not mask.any():
        return "no trained token"
    if not np.isfinite(trajectory.reward):
        return "reward not finite"
    logprobs = np.asarray(trajectory.logprobs)[mask]
    if not np.isfinite(logprobs).all():
        return "log-probabilities not finite"
    if (logprobs > 1e-3).any():
        return "log-probabilities above 0"
    if (np.asarray(trajectory.versions)[mask] < 0).any():
        return "tokens without a weight version"
    return None


def _none_left(returned: int, dropped: Mapping[str, int]) -> str:
    if not dropped:
        return f"the workflow returned {returned} trajectories"
    parts = ", ".join(f"{n} x {reason}" for reason, n in sorted(dropped.items(), key=lambda item: -item[1]))
    return f"no member is left: {parts}"
