"""The controller's side of the rollout workers: how many prompts are under way, where they go, and what is ready to train on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from areal_mega.algorithms.advantages import is_uniform
from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.controller.calls import gather_all
from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.core.types import Group, Prompt
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.results import EpisodeResult, Purpose
from areal_mega.rollout.staleness import StalenessControl, apply_bound_to_groups
from areal_mega.rpc.client import RpcClient

log = logging.getLogger(__name__)

_POLL_S = 20.0
_COLLECT = 256
_HOPELESS, _HOPELESS_LEAST = 16, 128
"""Give up when so many times a batch's prompts (and at least so many) ended in a row without a group to train on: rejecting and
filtering are part of some methods, and may hit many prompts."""
_BROKEN, _BROKEN_LEAST = 2, 8
"""The same for prompts that failed in a row: a workflow or verifier that fails every time is broken."""
_STATUS_S = 5.0


class RolloutFailed(RunFailed):
    """Rollout makes no progress. The message says what became of the prompts."""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """Groups to train on. ``ages`` counts every token that came in by age in versions; ``stale_tokens`` of them were taken out."""

    groups: tuple[Group, ...]
    taken: tuple[Group, ...]
    """The same groups before the bound took samples out: what is to be released after the step."""
    ages: dict[int, int]
    stale_tokens: int
    dropped_samples: int
    refilled: int


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
        self._clients, self._stream, self._staleness = clients, stream, staleness
        self._recipe, self._algorithm = recipe, algorithm
        self._by_address = {client.address: client for client in clients}
        self._under_way = [0] * len(clients)
        self._order: dict[tuple[str, int], int] = {}
        """When each prompt that is under way or ready was submitted: batches are made oldest first."""
        self._submitted = 0
        self._ready: list[Group] = []
        self._changed = asyncio.Condition()
        self._wanted = 0
        """Groups that the plain loop is waiting for; the overlapped loop asks staleness control instead."""
        self._overlapped = False
        self._version = self._step = 0
        self._since_accepted = self._failed_in_a_row = 0
        self._last_reason = ""
        self.counts: Counter[str] = Counter()
        """Since start: groups by outcome, dropped members, generated tokens (``tokens``), samples."""

    async def generate_always(self) -> None:
        """From now on keep as many groups under way as the staleness bound allows: the overlapped loop."""
        self._overlapped = True
        await self._top_up()

    async def set_version(self, version: int, step: int) -> None:
        """The servers have new weights: more groups may start."""
        self._version, self._step = version, step
        await self._top_up()

    async def listen(self) -> None:
        """Collect finished train episodes from every worker, for ever. Run as a task beside the training loop."""
        await gather_all(self._listen(rank) for rank in range(len(self._clients)))

    async def next_batch(self, groups: int) -> ReadyBatch:
        """Wait for ``groups`` finished groups that survive the staleness bound, oldest submission first (hops 1 to 4).

        Raises:
            RolloutFailed: prompt after prompt ends without a usable group, or with one that is too old.
            DeadlineExceeded: no episode finished within ``launch.rpc_timeout_s``; names the longest running.
        """
        kept: list[Group] = []
        originals: list[Group] = []
        ages: Counter[int] = Counter()
        stale_tokens = dropped = refilled = 0
        while len(kept) < groups:
            self._wanted = groups - len(kept)
            await self._top_up()
            taken = await self._take(self._wanted)
            section = self._recipe.staleness
            bounded = apply_bound_to_groups(taken, self._version, section.max_staleness, section.action)
            lone = tuple(group for group in bounded.groups if self._is_lone(group))
            kept += [group for group in bounded.groups if not self._is_lone(group)]
            # The groups as they were taken: what the bound took out of them is to be released too.
            lost = {group.id for group in (*bounded.refill, *lone)}
            again = [group for group in taken if group.id in lost]
            originals += [group for group in taken if group.id not in lost]
            ages.update(bounded.ages)
            stale_tokens, dropped = stale_tokens + bounded.stale_tokens, dropped + bounded.dropped_samples
            refilled += len(again)
            self._check_refills(refilled)
            await self._refill(again)
        self._wanted = 0
        self._staleness.on_consumed(len(kept))
        for group in kept:
            self._order.pop(_key(group.prompt), None)
        return ReadyBatch(tuple(kept), tuple(originals), dict(ages), stale_tokens, dropped, refilled)

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
        shares = [list(prompts[rank :: len(self._clients)]) for rank in range(len(self._clients))]
        results = await gather_all(self._evaluate(rank, share) for rank, share in enumerate(shares) if share)
        return [result for part in results for result in part]

    async def _evaluate(self, rank: int, prompts: list[Prompt]) -> list[EpisodeResult]:
        purpose: Purpose = "eval"
        client = self._clients[rank]
        await client.call("submit", prompts=prompts, step=self._step, purpose=purpose, timeout_s=self._timeout_s)
        results: list[EpisodeResult] = []
        last = time.monotonic()
        while len(results) < len(prompts):
            arrived = await client.call("collect", max_groups=_COLLECT, wait_s=self._poll_s, purpose=purpose, timeout_s=self._timeout_s)
            if not arrived and time.monotonic() - last > self._timeout_s:
                raise await self._stalled()
            last = time.monotonic() if arrived else last
            results += arrived
        return results

    @property
    def _timeout_s(self) -> float:
        return self._recipe.launch.rpc_timeout_s

    @property
    def _poll_s(self) -> float:
        return min(_POLL_S, self._timeout_s / 2)

    async def _listen(self, rank: int) -> None:
        while True:
            results = await self._clients[rank].call("collect", max_groups=_COLLECT, wait_s=self._poll_s, timeout_s=self._timeout_s)
            if results:
                self._under_way[rank] -= len(results)
                await self._accept(results)
                await self._top_up()

    async def _accept(self, results: Sequence[EpisodeResult]) -> None:
        unwanted: list[Group] = []
        for result in results:
            self.counts[result.outcome] += 1
            for reason, number in result.dropped.items():
                self.counts["dropped_samples"] += number
                self._last_reason = reason
            if result.group is None:
                self._staleness.on_rejected()
                self._note_lost(result)
                continue
            self._failed_in_a_row = 0
            self._staleness.on_accepted()
            self.counts["samples"] += len(result.group.samples)
            self.counts["tokens"] += sum(s.loss_tokens for s in result.group.samples)
            if (useless := self._useless(result.group)) is not None:
                kind, self._last_reason = useless
                self.counts[kind] += 1
                self._staleness.on_discarded()
                self._order.pop(_key(result.prompt), None)
                self._since_accepted += 1
                unwanted.append(result.group)
                continue
            self._since_accepted = 0
            self._ready.append(result.group)
        await self.release(unwanted)
        async with self._changed:
            self._changed.notify_all()

    def _useless(self, group: Group) -> tuple[str, str] | None:
        """Why nothing could be learned from a group: what to count it as, and the reason; None where something can."""
        if self._is_lone(group):
            return "lone", f"one member of {self._recipe.rollout.group_size} was left (algorithm.singleton is error)"
        if self._algorithm.filter_uniform_groups and is_uniform([s.reward for s in group.samples]):
            return "uniform", "all rewards of the group were equal (algorithm.filter_uniform_groups)"
        return None

    def _is_lone(self, group: Group) -> bool:
        """Its other members were dropped, and a group of one has no statistic: training on it would stop the run."""
        return len(group.samples) == 1 and self._algorithm.singleton == "error"

    def _note_lost(self, result: EpisodeResult) -> None:
        self._order.pop(_key(result.prompt), None)
        self._since_accepted += 1
        self._last_reason = result.reason
        self._failed_in_a_row = self._failed_in_a_row + 1 if result.outcome == "failed" else 0
        if result.outcome == "failed":
            log.warning("prompt %s (epoch %d) failed: %s", result.prompt.id, result.prompt.epoch, result.reason)

    async def _take(self, n: int) -> list[Group]:
        """The ``n`` oldest ready groups, when there are so many."""
        async with self._changed:
            while len(self._ready) < n:
                self._check_progress()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._changed.wait()
                except TimeoutError:
                    raise await self._stalled() from None
        self._ready.sort(key=lambda group: self._order[_key(group.prompt)])
        taken, self._ready = self._ready[:n], self._ready[n:]
        return taken

    def _check_progress(self) -> None:
        batch = self._recipe.train.batch_size
        if self._failed_in_a_row >= max(_BROKEN * batch, _BROKEN_LEAST):
            raise RolloutFailed(f"{self._failed_in_a_row} prompts in a row failed; the last: {self._last_reason}")
        if self._since_accepted >= max(_HOPELESS * batch, _HOPELESS_LEAST):
            counts = ", ".join(f"{self.counts[name]} {name}" for name in ("rejected", "failed", "uniform", "lone") if self.counts[name])
            raise RolloutFailed(
                f"{self._since_accepted} prompts in a row gave no group to train on (since the start: {counts}); "
                f"the last: {self._last_reason}"
            )

    def _check_refills(self, refilled: int) -> None:
        """What is under way may be too old; what is generated while the trainer waits cannot be, unless its versions are wrong."""
        bound = self._staleness.max_staleness
        if refilled >= max(_HOPELESS * (bound + 1) * self._staleness.batch_size, _HOPELESS_LEAST):
            raise RolloutFailed(
                f"{refilled} groups in a row were beyond staleness.max_staleness={bound} at version {self._version}, although the trainer "
                "waited for them: do the servers report the versions of their weights?"
            )

    async def _stalled(self) -> DeadlineExceeded:
        """Nothing finishes any more. Which episodes have run longest, and where."""
        calls = [asyncio.wait_for(client.call("status", timeout_s=_STATUS_S), _STATUS_S) for client in self._clients]
        lines = []
        for client, answer in zip(self._clients, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                lines.append(f"{client.peer} does not answer")
            else:
                oldest = [f"prompt {prompt} for {seconds:.0f} s" for prompt, seconds in answer["oldest"]]
                lines.append(f"{client.peer} runs {', '.join(oldest) or 'nothing'}")
        return DeadlineExceeded(f"no episode finished within launch.rpc_timeout_s={self._timeout_s:g} s: {'; '.join(lines)}")

    async def _refill(self, groups: Sequence[Group]) -> None:
        """Prompts whose answers came too late are generated again: they are the long and hard ones."""
        if not groups:
            return
        self._staleness.on_discarded(len(groups))
        self._stream.put_back(group.prompt for group in groups)
        for group in groups:
            self._order.pop(_key(group.prompt), None)
        await self.release(groups)

    async def _top_up(self) -> None:
        """Submit what may be submitted, to the workers with the least under way."""
        room = self._staleness.capacity(self._version)
        if not self._overlapped:
            room = min(room, self._wanted - len(self._ready) - self._staleness.running)
        if room <= 0:
            return
        prompts = self._stream.next(room)
        self._staleness.on_submitted(len(prompts))
        shares: list[list[Prompt]] = [[] for _ in self._clients]
        for prompt in prompts:
            self._order[_key(prompt)] = self._submitted
            self._submitted += 1
            rank = min(range(len(self._clients)), key=lambda r: (self._under_way[r], r))
            self._under_way[rank] += 1
            shares[rank].append(prompt)
        await gather_all(
            self._clients[rank].call("submit", prompts=share, step=self._step, purpose="train", timeout_s=self._timeout_s)
            for rank, share in enumerate(shares)
            if share
        )


def _key(prompt: Prompt) -> tuple[str, int]:
    return prompt.id, prompt.epoch
