"""The controller's side of the rollout workers: carries out what `areal_mega.rollout.dispatch` decides, and tells it what happened."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.controller.calls import Uncut, gather_all
from areal_mega.controller.workers import NEWS_S, Wait, Worker, WorkerGone, follow, simply, what_runs
from areal_mega.core.errors import DeadlineExceeded
from areal_mega.core.types import Group, Prompt
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.dispatch import Dispatch, DispatchSettings, ReadyBatch, RolloutFailed
from areal_mega.rollout.results import EpisodeResult, Purpose
from areal_mega.rollout.staleness import StalenessControl
from areal_mega.rpc.client import PeerUnreachable, RpcClient, RpcError

__all__ = ["ReadyBatch", "RolloutController", "RolloutFailed"]

log = logging.getLogger(__name__)

_POLL_S = 20.0
_COLLECT = 256
_LOOK_S = 0.05


class RolloutController:
    """All rollout workers of the run.

    Args:
        clients: of those that are there from the start, by rank.
        stream: where train prompts come from.
        staleness: how many groups may be under way.
    """

    def __init__(
        self, clients: Mapping[int, RpcClient], stream: PromptStream, staleness: StalenessControl, recipe: Recipe, algorithm: Algorithm
    ) -> None:
        self._recipe = recipe
        self._dispatch = Dispatch(stream, staleness, DispatchSettings.of(recipe, algorithm))
        self._workers: dict[int, Worker] = {}
        """Those that are there, by rank."""
        self._changed = asyncio.Condition()
        self._came = asyncio.Event()
        """A worker has come since somebody looked."""
        self._step = 0
        self._eval_tickets = count()
        self._given_up: set[int] = set()
        """Ranks whose server will not come back, while their worker is still there."""
        self._withdrawn_evals: set[int] = set()
        self._drains = False
        self._uncut = Uncut()
        for rank, client in clients.items():
            self._add(rank, client)

    @property
    def counts(self) -> Counter[str]:
        """Since the start of the run, recoveries included: groups by outcome, dropped members, generated ``tokens``, ``samples``."""
        return self._dispatch.counts

    @property
    def poisoned(self) -> Mapping[str, str]:
        """Prompts that failed every time, with the last reason; never tried again."""
        return self._dispatch.poisoned

    async def drain_decode(self) -> dict[str, dict[int, int]]:
        """Tokens and milliseconds of all servers by number of running sequences, since the last call; as histograms."""
        answers = await self._ask_all("measures")
        out: dict[str, Counter[int]] = {"rollout/decode_tokens": Counter(), "rollout/decode_ms": Counter()}
        for answer in answers:
            out["rollout/decode_tokens"].update(answer["tokens"])
            out["rollout/decode_ms"].update(answer["ms"])
        return {name: dict(bins) for name, bins in out.items()}

    def drain_lengths(self) -> dict[int, int]:
        """Samples by generated tokens (lower edges of bins), of the groups that finished since the last call."""
        lengths, self._dispatch.lengths = self._dispatch.lengths, Counter()
        return dict(lengths)

    def state(self) -> dict[str, Any]:
        """Everything that a recovered run needs, as plain JSON types: cursor, prompts under way, counters, poisoned prompts."""
        return {"dispatch": self._dispatch.state(), "step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; call before anything is submitted.

        Raises:
            UserError: the data changed since.
        """
        self._dispatch.restore(state["dispatch"])
        self._step = state["step"]

    async def generate_always(self) -> None:
        """From now on keep as many groups under way as the staleness bound allows: the overlapped loop."""
        self._dispatch.generate_always()
        await self.pump()

    async def set_version(self, version: int, step: int, *, scheduled: bool = True) -> None:
        """The servers have new weights: more groups may start, where the schedule had them (`Dispatch.version_changed`)."""
        self._step = step
        self._dispatch.version_changed(version, scheduled=scheduled)
        await self.pump()

    def faulty(self) -> dict[int, str]:
        """Ranks whose server failed attempt after attempt, with the last reason."""
        found = self._dispatch.faulty()
        return {rank: found[worker.name] for rank, worker in self._workers.items() if worker.name in found}

    # --- who is there

    def has(self, rank: int) -> bool:
        """Whether the worker of ``rank`` is there, with or without a server."""
        return rank in self._workers

    def lose(self, rank: int) -> None:
        """The worker of ``rank`` is gone, if it was there, with everything that it held; call ``pump`` for its prompts to go elsewhere."""
        worker = self._workers.pop(rank, None)
        if worker is not None:
            self._given_up.discard(rank)
            self._dispatch.replica_lost(worker.name)
            worker.lose()

    async def join(self, rank: int, client: RpcClient) -> None:
        """A worker is there, with a server that has the current weights: it takes prompts from now on."""
        if closed := self._drains:
            await client.call("close_gate", timeout_s=self._timeout_s)
        self._add(rank, client)
        if closed and not self._drains:
            await self._ask_all("open_gate")
        await self.pump()
        await self._notify()

    async def suspend(self, rank: int, *, deadline_s: float, for_good: bool = False) -> None:
        """The server of ``rank`` is gone. What it had not finished is tried elsewhere, or waits until there is a server.

        Args:
            for_good: it will not come back, so that evaluation goes elsewhere too.
        """
        worker = self._workers[rank]
        self._dispatch.replica_down(worker.name)
        if for_good:
            self._given_up.add(rank)
        await self._uncut.do(self._take_back(worker, deadline_s, for_good))
        await self.pump()

    async def _take_back(self, worker: Worker, deadline_s: float, for_good: bool) -> None:
        with suppress(WorkerGone):  # and its prompts with it
            async with worker.submitting:
                await worker.call("suspend", timeout_s=deadline_s)
                self._dispatch.withdrawn(await worker.call("withdraw", timeout_s=deadline_s))
                if for_good:
                    self._withdrawn_evals.update(await worker.call("withdraw", purpose="eval", timeout_s=deadline_s))

    async def resume(self, rank: int, *, deadline_s: float) -> None:
        """The server of ``rank`` is back, with the current weights."""
        worker = self._workers[rank]
        try:
            await worker.call("resume", deadline_s=deadline_s, timeout_s=deadline_s)
        except WorkerGone:
            return
        self._dispatch.replica_up(worker.name)
        await self.pump()
        await self._notify()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Within, no request is under way and none begins. A server that dies meanwhile ends what it had.

        Raises:
            DeadlineExceeded: requests do not end within ``rollout.request_timeout_s``.
        """
        # A request has this deadline itself; the call outlasts it by another of a call.
        limit = self._recipe.rollout.request_timeout_s + self._timeout_s
        self._drains = True
        try:
            await self._ask_all("close_gate", timeout_s=limit)
            yield
        finally:
            self._drains = False
            await asyncio.shield(self._ask_all("open_gate"))

    async def listen(self) -> None:
        """Collect finished train episodes from every worker, for ever. Run as a task beside the training loop."""
        await follow(lambda: self._workers.values(), self._came, self._listen)

    # --- batches

    async def next_batch(self, groups: int, wait: Wait = simply) -> ReadyBatch:
        """Wait for ``groups`` finished groups that survive the staleness bound, oldest submission first (hops 1 to 4).

        Args:
            wait: awaits that something comes in. It may give that up and return early, and until it returns no group is taken: what it
                changes meanwhile (the version) concerns the whole batch.

        Raises:
            RolloutFailed: prompt after prompt ends without a usable group, or too many are poisoned.
            DeadlineExceeded: no episode finished within ``launch.rpc_timeout_s``; names the longest running.
        """
        while True:
            batch = self._dispatch.take(groups)
            await self.pump()
            if batch is not None:
                return batch
            await wait(self._arrival(groups))

    async def _arrival(self, groups: int) -> None:
        async with self._changed:
            while not self._dispatch.takeable(groups):
                self._dispatch.check_progress()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._changed.wait()
                except TimeoutError:
                    # With nobody there the wait is for somebody, and whoever keeps the replicas has a deadline for that.
                    if self._workers.keys() - self._given_up:
                        raise await self._stalled() from None

    async def is_torn(self, error: BaseException | None) -> bool:
        """Whether a worker with arrays of the last batch is lost. ``error``: why they could not be fetched; such news may come after it."""
        silent = isinstance(error, PeerUnreachable | DeadlineExceeded) or (isinstance(error, RpcError) and error.kind == "PeerUnreachable")
        end = time.monotonic() + (NEWS_S if silent else 0.0)
        while not self._dispatch.torn:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def give_back(self) -> int:
        """The last batch is torn, and not trained: make another of what is left of it. Returns the groups that are generated again."""
        lost = self._dispatch.give_back()
        await self.pump()
        return lost

    async def release(self, groups: Sequence[Group]) -> None:
        """Let the workers forget what was trained on or thrown away."""
        keys: dict[str, list[str]] = {}
        for group in groups:
            for sample in group.samples:
                keys.setdefault(group.worker, []).extend(handle.key for handle in sample.tensors.values())
        there = [worker for worker in self._workers.values() if keys.get(worker.name)]
        await gather_all(self._unless_gone(worker, "release", keys=keys[worker.name]) for worker in there)

    # --- evaluation

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[EpisodeResult]:
        """Run ``prompts`` under the evaluation's settings; one result each, in no particular order."""
        results: list[EpisodeResult] = []
        left = list(prompts)
        while left:
            workers = [worker for rank, worker in sorted(self._workers.items()) if rank not in self._given_up]
            if not workers:  # the run waits for one, or ends with the last
                await asyncio.sleep(_LOOK_S)
                continue
            shares = {place: left[place :: len(workers)] for place in range(len(workers))}
            parts = await gather_all(self._evaluate(workers[place], share) for place, share in shares.items() if share)
            results += [result for part, _ in parts for result in part]
            left = [prompt for _, rest in parts for prompt in rest]
        return results

    async def _evaluate(self, worker: Worker, prompts: list[Prompt]) -> tuple[list[EpisodeResult], list[Prompt]]:
        """Results of one worker, and the prompts that it gives none of because it is lost, or its server was given up."""
        tickets = {next(self._eval_tickets): prompt for prompt in prompts}
        results: list[EpisodeResult] = []
        with suppress(WorkerGone):
            await self._evaluate_at(worker, tickets, results)
        done = {result.ticket for result in results}
        return results, [prompt for ticket, prompt in tickets.items() if ticket not in done]

    async def _evaluate_at(self, worker: Worker, tickets: Mapping[int, Prompt], results: list[EpisodeResult]) -> None:
        purpose: Purpose = "eval"
        async with worker.submitting:
            if worker.rank in self._given_up:
                return
            await worker.call("submit", prompts=tickets, step=self._step, purpose=purpose, timeout_s=self._timeout_s)
        last = time.monotonic()
        while len(results) + len(tickets.keys() & self._withdrawn_evals) < len(tickets):
            arrived = await worker.call("collect", max_groups=_COLLECT, wait_s=self._poll_s, purpose=purpose, timeout_s=self._timeout_s)
            if not arrived and time.monotonic() - last > self._timeout_s:
                raise await self._stalled()
            last = time.monotonic() if arrived else last
            results += arrived

    # --- inside

    @property
    def _timeout_s(self) -> float:
        return self._recipe.launch.rpc_timeout_s

    @property
    def _poll_s(self) -> float:
        return min(_POLL_S, self._timeout_s / 2)

    def _add(self, rank: int, client: RpcClient) -> None:
        assert rank not in self._workers, f"rollout rank {rank} is there already"
        worker = self._workers[rank] = Worker(rank, client)
        self._dispatch.replica_joined(worker.name)
        self._came.set()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _unless_gone(self, worker: Worker, method: str, *, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """A call that is of no use any more where the worker is lost meanwhile; None then."""
        with suppress(WorkerGone):
            return await worker.call(method, timeout_s=timeout_s or self._timeout_s, **kwargs)

    async def _ask_all(self, method: str, *, timeout_s: float | None = None) -> list[Any]:
        """The same call to the workers that are there; answers of those that are not lost meanwhile."""
        answers = await gather_all(self._unless_gone(worker, method, timeout_s=timeout_s) for worker in self._workers.values())
        return [answer for answer in answers if answer is not None]

    async def _listen(self, worker: Worker) -> None:
        """Until the worker is lost."""
        try:
            while True:
                results = await worker.call("collect", max_groups=_COLLECT, wait_s=self._poll_s, timeout_s=self._timeout_s)
                for result in results:
                    self._tell(result)
                # Looked for at every answer: a worker that is never idle may have lost a prompt too.
                ended = await self._end_overdue(worker)
                if not results and not ended:
                    continue
                await self.pump()
                await self._notify()
        except WorkerGone:
            return

    def _tell(self, result: EpisodeResult) -> None:
        """One event from one result."""
        dispatch, ticket, prompt = self._dispatch, result.ticket, result.prompt
        if result.outcome == "group":
            assert result.group is not None
            if reason := dispatch.finished(ticket, result.group, result.dropped):
                log.warning("a group of prompt %s (epoch %d) was not taken: %s", prompt.id, prompt.epoch, reason)
        elif result.outcome == "rejected":
            dispatch.rejected(ticket, result.reason, result.dropped)
        else:
            if result.outcome == "failed":
                again = dispatch.failed(ticket, result.reason, result.dropped, server_fault=result.server_fault)
            else:
                again = dispatch.timed_out(ticket, result.reason)
            then = "it is tried again" if again else "it is not tried again"
            log.warning("prompt %s (epoch %d) failed: %s; %s", prompt.id, prompt.epoch, result.reason, then)

    async def _end_overdue(self, worker: Worker) -> bool:
        """Give up prompts that this worker should have ended long ago. Whether there were any."""
        overdue = [flight for flight in self._dispatch.overdue(time.monotonic()) if flight.replica == worker.name]
        if overdue:
            await worker.call("cancel", tickets=[flight.ticket for flight in overdue], timeout_s=self._timeout_s)
        for flight in overdue:
            reason = f"{worker.peer} did not end it within {self._dispatch.settings.deadline_s:g} s"
            self._dispatch.timed_out(flight.ticket, reason)
            log.warning("prompt %s (epoch %d) was given up: %s", flight.prompt.id, flight.prompt.epoch, reason)
        return bool(overdue)

    async def pump(self) -> None:
        """Carry out what dispatch decides: submit what may start, release what nobody will want.

        To the end, whoever is cancelled in it: what dispatch takes for submitted would be known to no worker.
        """
        await self._uncut.do(self._pump())

    async def _pump(self) -> None:
        shares: dict[str, dict[int, Prompt]] = {}
        for flight in self._dispatch.submissions(time.monotonic()):
            shares.setdefault(flight.replica, {})[flight.ticket] = flight.prompt
        discarded, self._dispatch.discarded = self._dispatch.discarded, []
        there = {worker.name: worker for worker in self._workers.values()}
        await gather_all(self._submit(there[name], share) for name, share in shares.items())
        await self.release(discarded)

    async def _submit(self, worker: Worker, share: Mapping[int, Prompt]) -> None:
        try:
            async with worker.submitting:
                replica = self._dispatch.router.replicas.get(worker.name)
                if replica is None or not replica.down:
                    await worker.call("submit", prompts=share, step=self._step, purpose="train", timeout_s=self._timeout_s)
                    return
        except WorkerGone:
            return  # its prompts are known to be lost, and are submitted again by whoever lost it
        self._dispatch.withdrawn(share)  # its server went while these were on their way; whoever saw that will submit them again
        await self.pump()

    async def _stalled(self) -> DeadlineExceeded:
        """Nothing finishes any more. Which episodes have run longest, and where."""
        serving = {replica.name for replica in self._dispatch.router.replicas.values() if not replica.down}
        lines = await what_runs(list(self._workers.values()), serving)
        return DeadlineExceeded(f"no episode finished within launch.rpc_timeout_s={self._timeout_s:g} s: {'; '.join(lines)}")
