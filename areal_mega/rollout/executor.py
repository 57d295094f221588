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
from itertools import count
from typing import Literal

import numpy as np

from areal_mega.core import points
from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.core.types import Group, Prompt, Sample, SampleId, Trajectory, count_versions
from areal_mega.rollout.inference import ServerFault
from areal_mega.rollout.results import PURPOSES, EpisodeResult, Purpose
from areal_mega.rollout.store import TrajectoryStore
from areal_mega.rollout.workflow import GenerationEngine, Workflow, drops

log = logging.getLogger(__name__)

_CANCEL_S = 5.0

_Fate = Literal["again", "gone"]
"""What becomes of an episode that was ended from outside: it waits again, or gives no result here, whatever it does."""


@dataclass(frozen=True, slots=True)
class _Episode:
    prompt: Prompt
    ticket: int
    step: int
    purpose: Purpose
    submitted: float
    """time.monotonic() at submission."""
    order: int


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
        self._fates: dict[asyncio.Task[None], _Fate] = {}
        """Of running episodes that were told to end."""
        self._orders = count()
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
        self._waiting[purpose].extend(
            _Episode(prompt, ticket, step, purpose, now, next(self._orders)) for ticket, prompt in prompts.items()
        )
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
            self._forget(result)
        await self._end([task for task, e in self._running.items() if e.purpose == purpose and e.ticket in gone], "gone")

    async def suspend(self) -> None:
        """The engine is gone: end what runs and put it back to the head of what waits, in its order. Nothing starts until ``resume``."""
        self._suspended = True
        await self._end([task for task in self._running if task not in self._fates], "again")

    def withdraw(self, purpose: Purpose) -> list[int]:
        """Give back what waits (while suspended: everything but what has finished), by its tickets; none of it gives a result here."""
        tickets = [episode.ticket for episode in self._waiting[purpose]]
        self._waiting[purpose].clear()
        for task, episode in self._running.items():
            if episode.purpose == purpose and self._fates.get(task) == "again":  # suspended, and has not ended yet
                self._fates[task] = "gone"
                tickets.append(episode.ticket)
        return tickets

    def resume(self) -> None:
        """The engine is back."""
        self._suspended = False
        self._wake.set()

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
        self._fates |= dict.fromkeys(self._running, "gone")
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

    async def _end(self, tasks: Sequence[asyncio.Task[None]], fate: _Fate) -> None:
        """Cancel episodes. One may take its time to end, or swallow its cancellation: nobody waits for it longer than ``_CANCEL_S``."""
        for task in tasks:
            self._fates[task] = fate
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        episode, fate = self._running.pop(task, None), self._fates.pop(task, None)
        if episode is not None and fate == "again":  # it has no result; otherwise it had left what runs
            self._waiting[episode.purpose] = deque(sorted([*self._waiting[episode.purpose], episode], key=lambda e: e.order))
        self._wake.set()

    def _forget(self, result: EpisodeResult) -> None:
        if result.group is not None:
            self._store.release(handle.key for sample in result.group.samples for handle in sample.tensors.values())

    async def _episode(self, episode: _Episode) -> None:
        dropped: Counter[str] = Counter()
        drops.set(dropped)  # this task's own context: what the workflow counts, it counts for this episode
        task = asyncio.current_task()
        assert task is not None
        await points.reached("rollout.episode")
        try:
            result = await self._run_workflow(episode, dropped)
        except UserError as error:
            self._fatal = error
        else:
            self.counts[f"{episode.purpose}/{result.outcome}"] += 1
            for reason, n in dropped.items():
                self.counts[f"{episode.purpose}/dropped/{reason.partition(':')[0]}"] += n
            # In one go: a prompt is never both under way and finished, nor neither, whoever looks.
            self._running.pop(task, None)
            if self._fates.get(task) == "gone":
                self._forget(result)
            else:
                self._finished[episode.purpose].append(result)
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
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task in self._fates:
                raise
            # Nobody here has cancelled it: something of the workflow's own was, and it let that out.
            return self._result(episode, dropped, outcome="failed", reason="CancelledError: the workflow ended with it")
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
            described = self._stored(group_id, described, [t.arrays() for t in trajectories])
        self.counts[f"{episode.purpose}/tokens"] += sum(s.loss_tokens for s in described)
        self.counts[f"{episode.purpose}/samples"] += len(described)
        seconds = time.monotonic() - episode.submitted
        return Group(id=group_id, prompt=episode.prompt, samples=tuple(described), worker=self._store.owner, seconds=seconds)

    def _stored(self, group_id: str, samples: Sequence[Sample], arrays: Sequence[Mapping[str, np.ndarray]]) -> list[Sample]:
        """The samples with handles to their arrays: all are in the store, or none is."""
        out: list[Sample] = []
        try:
            for sample, mine in zip(samples, arrays, strict=True):
                out.append(replace(sample, tensors=self._store.put(mine, f"{group_id}/{sample.id.member}/{sample.id.turn}")))
        except UserError:
            self._store.release(handle.key for sample in out for handle in sample.tensors.values())
            raise
        return out

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
