"""Rollout workers without processes: the methods that the controller calls, with episodes that end when a test says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_samples import group, keys_of, prompt

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.schema import Recipe
from areal_mega.controller.rollout import RolloutController
from areal_mega.core.types import Group, Prompt
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.dispatch import Dispatch
from areal_mega.rollout.results import EpisodeResult, Outcome, Purpose
from areal_mega.rollout.staleness import StalenessControl


class FakeWorker:
    """A client and its worker in one. ``held`` are the keys in its store."""

    def __init__(self, rank: int = 0) -> None:
        self.address, self.peer = f"w:{rank}", f"rollout rank {rank}"
        self.version = 0
        self.submitted: list[tuple[Prompt, int, Purpose]] = []
        self.running: list[tuple[Prompt, int, int]] = []
        """(prompt, step, version at submission) of train episodes."""
        self.tickets: dict[tuple[str, int], int] = {}
        self.cancelled: list[int] = []
        self.suspended = False
        self.held: set[str] = set()
        self.made: list[Group] = []
        self.fault: Exception | None = None
        self.automatic: Callable[[Prompt], None] | None = None
        """Called for every submitted prompt: a worker that answers at once."""
        self._finished: dict[Purpose, deque[EpisodeResult]] = {"train": deque(), "eval": deque()}
        self._arrival = asyncio.Condition()

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        return await getattr(self, method)(**kwargs)

    async def submit(self, prompts: Mapping[int, Prompt], step: int, purpose: Purpose = "train") -> int:
        for ticket, each in prompts.items():
            self.submitted.append((each, step, purpose))
            self.tickets[each.id, each.epoch] = ticket
            if purpose == "train":
                self.running.append((each, step, self.version))
            if self.automatic is not None:
                self.automatic(each)
        await asyncio.sleep(0)
        return len(self.running)

    async def collect(self, max_groups: int, wait_s: float, purpose: Purpose = "train") -> list[EpisodeResult]:
        finished = self._finished[purpose]
        async with self._arrival:
            try:
                async with asyncio.timeout(wait_s):
                    await self._arrival.wait_for(lambda: finished or self.fault)
            except TimeoutError:
                return []
        if self.fault is not None:
            raise self.fault
        return [finished.popleft() for _ in range(min(max_groups, len(finished)))]

    async def release(self, keys: Sequence[str]) -> int:
        assert set(keys) <= self.held, "released twice, or never held"
        assert len(set(keys)) == len(keys)
        self.held -= set(keys)
        await asyncio.sleep(0)
        return len(keys)

    async def cancel(self, tickets: Sequence[int], purpose: Purpose = "train") -> None:
        self.cancelled += tickets
        self.running = [each for each in self.running if self.tickets[each[0].id, each[0].epoch] not in tickets]

    async def suspend(self) -> None:
        self.suspended = True

    async def withdraw(self, purpose: Purpose = "train") -> list[int]:
        gone, self.running = self.running, []
        return [self.tickets[each.id, each.epoch] for each, _, _ in gone]

    async def resume(self, deadline_s: float) -> None:
        self.suspended = False

    async def measures(self) -> dict[str, dict[int, int]]:
        return {"tokens": {4: 10}, "ms": {4: 100}}

    async def status(self) -> dict[str, Any]:
        return {"oldest": [(each.id, 7.0) for each, _, _ in self.running[:3]]}

    async def finish(
        self,
        index: int = 0,
        outcome: Outcome = "group",
        members: Sequence[Mapping[str, Any]] = ({"reward": 1.0}, {"reward": 0.0}),
        reason: str = "",
        dropped: Mapping[str, int] | None = None,
    ) -> Group | None:
        """End the ``index``-th running train episode. Members without versions are as old as the episode."""
        of, step, began = self.running.pop(index)
        made = None
        if outcome == "group":
            made = group(
                f"{of.id}/{of.epoch}/{len(self.made)}", [{"versions": {began: 2}, **m} for m in members], of=of, worker=self.address
            )
            self.made.append(made)
            self.held |= keys_of([made])
        await self.deliver(result(of, outcome, made, reason, dropped, step, ticket=self.tickets[of.id, of.epoch]))
        return made

    async def deliver(self, *results: EpisodeResult) -> None:
        for each in results:
            self._finished[each.purpose].append(each)
        async with self._arrival:
            self._arrival.notify_all()

    def evaluated(self, of: Prompt) -> None:
        """For ``automatic``: evaluation prompts are answered at once, others never."""
        if (of, "eval") in [(each, purpose) for each, _, purpose in self.submitted[-1:]]:
            self._finished["eval"].append(result(of, purpose="eval", ticket=self.tickets[of.id, of.epoch]))

    async def wake(self) -> None:
        await self.deliver()


def result(
    of: Prompt,
    outcome: Outcome = "group",
    made: Group | None = None,
    reason: str = "",
    dropped: Mapping[str, int] | None = None,
    step: int = 0,
    purpose: Purpose = "train",
    ticket: int = 0,
) -> EpisodeResult:
    return EpisodeResult(
        purpose=purpose, step=step, prompt=of, ticket=ticket, outcome=outcome, seconds=0.1, group=made, reason=reason, dropped=dropped or {}
    )


class World:
    """A controller over fake workers; use as an async context manager, with its listener beside."""

    def __init__(
        self,
        *,
        workers: int = 1,
        batch: int = 2,
        eta: int = 0,
        rows: int = 1000,
        overlapped: bool = True,
        total: int | None = None,
        **changes: Any,
    ) -> None:
        self.recipe = recipe(batch, eta, **changes)
        self.workers = [FakeWorker(rank) for rank in range(workers)]
        self.staleness = StalenessControl(batch, eta, total=total)
        self.stream = PromptStream([dict(prompt(i).row) for i in range(rows)], seed=1, shuffle=False)
        algorithm = algorithm_of(self.recipe)
        self.control = RolloutController(dict(enumerate(self.workers)), self.stream, self.staleness, self.recipe, algorithm)  # type: ignore[arg-type]
        self.batch, self.eta, self.overlapped, self.version = batch, eta, overlapped, 0

    async def __aenter__(self) -> World:
        self.listener = asyncio.create_task(self.control.listen())
        if self.overlapped:
            await self.control.generate_always()
        await settle()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.listener.cancel()
        await asyncio.gather(self.listener, return_exceptions=True)

    def add(self, worker: FakeWorker) -> FakeWorker:
        """Another worker, for the controller to be told of."""
        worker.version = self.version
        self.workers.append(worker)
        return worker

    async def advance(self) -> None:
        """The weights of a further version reach every server."""
        self.version += 1
        for worker in self.workers:
            worker.version = self.version
        await self.control.set_version(self.version, step=self.version)
        await settle()

    @property
    def submitted(self) -> list[str]:
        return [each.id for worker in self.workers for each, _, purpose in worker.submitted if purpose == "train"]

    @property
    def dispatch(self) -> Dispatch:
        return self.control._dispatch

    @property
    def running(self) -> int:
        return sum(len(worker.running) for worker in self.workers)

    @property
    def held(self) -> set[str]:
        return {key for worker in self.workers for key in worker.held}


def recipe(
    batch: int,
    eta: int,
    *,
    action: str = "mask_token",
    timeout_s: float = 60.0,
    rollout: Mapping[str, Any] | None = None,
    **algorithm: Any,
) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "r", "steps": 10},
            "model": {"path": "p"},
            "rollout": {"group_size": 2, **(rollout or {})},
            "train": {"batch_size": batch},
            "staleness": {"max_staleness": eta, "action": action},
            "algorithm": {"correction": "decoupled", **algorithm},
            "launch": {"rpc_timeout_s": timeout_s},
        }
    )


async def settle() -> None:
    """Let everything that can run without a further event run."""
    for _ in range(100):
        await asyncio.sleep(0)
