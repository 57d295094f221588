"""The controller's side of the rollout workers: carries out what `areal_mega.rollout.dispatch` decides, and tells it what happened."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.controller.calls import gather_all
from areal_mega.core.errors import DeadlineExceeded
from areal_mega.core.types import Group, Prompt
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.dispatch import Dispatch, DispatchSettings, ReadyBatch, RolloutFailed
from areal_mega.rollout.results import EpisodeResult, Purpose
from areal_mega.rollout.staleness import StalenessControl
from areal_mega.rpc.client import PeerUnreachable, RpcClient

__all__ = ["ReadyBatch", "RolloutController", "RolloutFailed"]

log = logging.getLogger(__name__)

_POLL_S = 20.0
_COLLECT = 256
_STATUS_S = 5.0

Wait = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


async def simply(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` alone."""
    await work


class RolloutController:
    """All rollout workers of the run.

    Args:
        clients: by rank.
        stream: where train prompts come from.
        staleness: how many groups may be under way.
    """

    def __init__(
        self, clients: Sequence[RpcClient], stream: PromptStream, staleness: StalenessControl, recipe: Recipe, algorithm: Algorithm
    ) -> None:
        self._clients, self._recipe = clients, recipe
        self._by_address = {client.address: client for client in clients}
        self._dispatch = Dispatch(stream, staleness, DispatchSettings.of(recipe, algorithm))
        for address in self._by_address:
            self._dispatch.replica_joined(address)
        self._changed = asyncio.Condition()
        self._step = 0
        self._eval_tickets = count()
        self._submitting = {address: asyncio.Lock() for address in self._by_address}
        """Prompts are given to a worker and taken back from it one after the other."""
        self._given_up: set[int] = set()
        """Ranks whose server will not come back."""
        self._withdrawn_evals: set[int] = set()

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
        answers = await gather_all(client.call("measures", timeout_s=self._timeout_s) for client in self._clients)
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
        await self._pump()

    async def set_version(self, version: int, step: int, *, scheduled: bool = True) -> None:
        """The servers have new weights: more groups may start, where the schedule had them (`Dispatch.version_changed`)."""
        self._step = step
        self._dispatch.version_changed(version, scheduled=scheduled)
        await self._pump()

    def faulty(self) -> dict[int, str]:
        """Ranks whose server failed attempt after attempt, with the last reason."""
        found = self._dispatch.faulty()
        return {rank: found[client.address] for rank, client in enumerate(self._clients) if client.address in found}

    async def suspend(self, rank: int, *, deadline_s: float, for_good: bool = False) -> None:
        """The server of ``rank`` is gone. What it had not finished is tried elsewhere, or waits until there is a server.

        Args:
            for_good: it will not come back, so that evaluation goes elsewhere too.
        """
        client = self._clients[rank]
        self._dispatch.replica_down(client.address)
        if for_good:
            self._given_up.add(rank)
        async with self._submitting[client.address]:
            await client.call("suspend", timeout_s=deadline_s)
            tickets = await client.call("withdraw", timeout_s=deadline_s)
            if for_good:
                self._withdrawn_evals.update(await client.call("withdraw", purpose="eval", timeout_s=deadline_s))
        self._dispatch.withdrawn(tickets)
        await self._pump()

    async def resume(self, rank: int, *, deadline_s: float) -> None:
        """The server of ``rank`` is back, with the current weights."""
        await self._clients[rank].call("resume", deadline_s=deadline_s, timeout_s=deadline_s)
        self._dispatch.replica_up(self._clients[rank].address)
        await self._pump()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Within, no request is under way and none begins. A server that dies meanwhile ends what it had.

        Raises:
            DeadlineExceeded: requests do not end within ``rollout.request_timeout_s``.
        """
        # A request has this deadline itself; the call outlasts it by another of a call.
        limit = self._recipe.rollout.request_timeout_s + self._timeout_s
        try:
            await gather_all(_unless_gone(client.call("close_gate", timeout_s=limit)) for client in self._clients)
            yield
        finally:
            openings = [_unless_gone(client.call("open_gate", timeout_s=self._timeout_s)) for client in self._clients]
            await asyncio.shield(gather_all(openings))

    async def listen(self) -> None:
        """Collect finished train episodes from every worker, for ever. Run as a task beside the training loop."""
        await gather_all(self._listen(client) for client in self._clients)

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
            await self._pump()
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
                    raise await self._stalled() from None

    async def release(self, groups: Sequence[Group]) -> None:
        """Let the workers forget what was trained on or thrown away."""
        keys: dict[str, list[str]] = {}
        for group in groups:
            for sample in group.samples:
                keys.setdefault(group.worker, []).extend(handle.key for handle in sample.tensors.values())
        await gather_all(
            self._by_address[worker].call("release", keys=mine, timeout_s=self._timeout_s) for worker, mine in keys.items() if mine
        )

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[EpisodeResult]:
        """Run ``prompts`` under the evaluation's settings; one result each, in no particular order."""
        results: list[EpisodeResult] = []
        left = list(prompts)
        while left:
            ranks = [rank for rank in range(len(self._clients)) if rank not in self._given_up]
            assert ranks, "the run ends with its last server"
            shares = {rank: left[place :: len(ranks)] for place, rank in enumerate(ranks)}
            parts = await gather_all(self._evaluate(rank, share) for rank, share in shares.items() if share)
            results += [result for part, _ in parts for result in part]
            left = [prompt for _, rest in parts for prompt in rest]
        return results

    async def _evaluate(self, rank: int, prompts: list[Prompt]) -> tuple[list[EpisodeResult], list[Prompt]]:
        """Results of one worker, and the prompts that it gives none of because its server was given up."""
        purpose: Purpose = "eval"
        client = self._clients[rank]
        tickets = {next(self._eval_tickets): prompt for prompt in prompts}
        async with self._submitting[client.address]:
            if rank in self._given_up:
                return [], prompts
            await client.call("submit", prompts=tickets, step=self._step, purpose=purpose, timeout_s=self._timeout_s)
        results: list[EpisodeResult] = []
        last = time.monotonic()
        while len(results) + len(gone := tickets.keys() & self._withdrawn_evals) < len(prompts):
            arrived = await client.call("collect", max_groups=_COLLECT, wait_s=self._poll_s, purpose=purpose, timeout_s=self._timeout_s)
            if not arrived and time.monotonic() - last > self._timeout_s:
                raise await self._stalled()
            last = time.monotonic() if arrived else last
            results += arrived
        return results, [tickets[ticket] for ticket in gone]

    @property
    def _timeout_s(self) -> float:
        return self._recipe.launch.rpc_timeout_s

    @property
    def _poll_s(self) -> float:
        return min(_POLL_S, self._timeout_s / 2)

    async def _listen(self, client: RpcClient) -> None:
        while True:
            results = await client.call("collect", max_groups=_COLLECT, wait_s=self._poll_s, timeout_s=self._timeout_s)
            for result in results:
                self._tell(result)
            # Looked for at every answer: a worker that is never idle may have lost a prompt too.
            ended = await self._end_overdue(client)
            if not results and not ended:
                continue
            await self._pump()
            async with self._changed:
                self._changed.notify_all()

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

    async def _end_overdue(self, client: RpcClient) -> bool:
        """Give up prompts that this worker should have ended long ago. Whether there were any."""
        overdue = [flight for flight in self._dispatch.overdue(time.monotonic()) if flight.replica == client.address]
        if overdue:
            await client.call("cancel", tickets=[flight.ticket for flight in overdue], timeout_s=self._timeout_s)
        for flight in overdue:
            reason = f"{client.peer} did not end it within {self._dispatch.settings.deadline_s:g} s"
            self._dispatch.timed_out(flight.ticket, reason)
            log.warning("prompt %s (epoch %d) was given up: %s", flight.prompt.id, flight.prompt.epoch, reason)
        return bool(overdue)

    async def _pump(self) -> None:
        """Carry out what dispatch decides: submit what may start, release what nobody will want."""
        shares: dict[str, dict[int, Prompt]] = {}
        for flight in self._dispatch.submissions(time.monotonic()):
            shares.setdefault(flight.replica, {})[flight.ticket] = flight.prompt
        discarded, self._dispatch.discarded = self._dispatch.discarded, []
        await gather_all(self._submit(address, share) for address, share in shares.items())
        await self.release(discarded)

    async def _submit(self, address: str, share: Mapping[int, Prompt]) -> None:
        async with self._submitting[address]:
            if not self._dispatch.router.replicas[address].down:
                client = self._by_address[address]
                await client.call("submit", prompts=share, step=self._step, purpose="train", timeout_s=self._timeout_s)
                return
        self._dispatch.withdrawn(share)  # its server went while these were on their way; whoever saw that will submit them again
        await self._pump()

    async def _stalled(self) -> DeadlineExceeded:
        """Nothing finishes any more. Which episodes have run longest, and where."""
        calls = [asyncio.wait_for(client.call("status", timeout_s=_STATUS_S), _STATUS_S) for client in self._clients]
        lines = []
        for client, answer in zip(self._clients, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                lines.append(f"{client.peer} does not answer")
            elif self._dispatch.router.replicas[client.address].down:
                lines.append(f"{client.peer} has no inference server")
            else:
                oldest = [f"prompt {prompt} for {seconds:.0f} s" for prompt, seconds in answer["oldest"]]
                lines.append(f"{client.peer} runs {', '.join(oldest) or 'nothing'}")
        return DeadlineExceeded(f"no episode finished within launch.rpc_timeout_s={self._timeout_s:g} s: {'; '.join(lines)}")


async def _unless_gone(call: Coroutine[Any, Any, Any]) -> None:
    """A worker that is gone has no request under way; whoever watches over it tells of its death."""
    try:
        await call
    except PeerUnreachable as error:
        log.warning("%s", error)
