"""Weight sync (hop 7): pause, send, verify, resume. Every server must acknowledge version and digest, or the run stops.

Generation is resumed whatever happens in between; a failed sync is an error all the same, because some servers may hold new weights
and others old ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_mega.config.schema import Recipe
from areal_mega.controller.sync_report import Sent, mismatch, sent_by
from areal_mega.controller.train import TrainController
from areal_mega.core import metrics as m
from areal_mega.core import points
from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.core.metrics import Metrics
from areal_mega.rollout.inference import Capabilities, InferenceServer, ServerDigest
from areal_mega.sync.digest import DigestKind, combine, with_sampled
from areal_mega.sync.plan import WireSpec, bucket_bytes, plan_buckets, total_order, with_fused

log = logging.getLogger(__name__)

_RELEASE_S = 30.0
"""How long a failed sync waits for servers to let go. One that failed may never answer, and the failure itself is to be heard."""
_WORTH = 0.95
"""Tensors that have not changed are left out if what is sent is less than this part of all bytes."""
_HEALTH_S = 5.0
"""Within this a healthy peer answers a health check, however busy it is."""

Jobs = Mapping[str, Coroutine[Any, Any, Any]]
"""Calls to make at once, by the name of who is called."""


class SyncMismatch(RunFailed):
    """A server does not hold what the trainer sent."""


class WeightSync:
    """The trainer's and the servers' sides of the weight-sync groups, driven together.

    Every sender (a train rank that `sync.shares` chose) has a group of its own, of which it is rank 0: that is the rank that servers
    receive from. Groups are formed in the order of the senders, and all buckets stand in one total order; see `sync.plan` for why nobody
    can wait for ever.

    Args:
        servers: clients of the inference replicas that are there from the start, by rank.
        capabilities: of each server.
        replica_size: ranks of one replica.
        backend: ``gloo`` or ``nccl``.
        folder: where the disk transport writes.
    """

    def __init__(
        self,
        train: TrainController,
        servers: Mapping[int, InferenceServer],
        capabilities: Mapping[int, Capabilities],
        recipe: Recipe,
        *,
        replica_size: int,
        backend: str,
        folder: Path,
    ) -> None:
        self._train, self._servers, self._capabilities, self._recipe = train, dict(servers), dict(capabilities), recipe
        self._section = recipe.sync
        self._replica_size, self._backend, self._folder = replica_size, backend, folder
        self._members = sorted(servers)
        self._plans: dict[int, tuple[WireSpec, ...]] = {}
        """What each sender sends, by its train rank."""
        self._groups: dict[int, str] = {}
        """Name of each sender's group."""
        self._joined: list[int] = []
        """Members of the groups, except who has died since."""
        self._changed = False
        """Members came or went since the groups were formed."""
        self._acknowledged: dict[int, int] = {}
        """The version that a server has proved to hold, by its rank."""

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the servers that take part."""
        return tuple(self._members)

    def acknowledged(self, rank: int) -> int:
        """The version that a server has proved to hold; -1: none."""
        return self._acknowledged.get(rank, -1)

    def lose(self, rank: int) -> None:
        """A server is gone. The group is formed anew, without it, before the next push."""
        self._members = [member for member in self._members if member != rank]
        self._joined = [member for member in self._joined if member != rank]
        self._acknowledged.pop(rank, None)
        self._changed = True

    def admit(self, rank: int, server: InferenceServer, able: Capabilities) -> None:
        """A server that is healthy takes part from the next push on; the group is formed anew before."""
        self._servers[rank], self._capabilities[rank] = server, able
        self._members = sorted({*self._members, rank})
        self._changed = True

    async def connect(self) -> None:
        """Let the train ranks plan what they send. The groups are formed by the first push, when nobody may come or go."""
        # What an attempt left that was killed in mid-sync.
        if self._section.transport == "disk" and self._folder.exists():
            await asyncio.to_thread(shutil.rmtree, self._folder)
        several = self._section.transport == "collective" and all(able.several_groups for able in self._capabilities.values())
        answers = await self._train.call("sync_plan", several=several)
        self._plans = {rank: tuple(WireSpec(**spec) for spec in specs) for rank, specs in enumerate(answers) if specs}
        self._changed = True

    async def _form_groups(self) -> None:
        """Groups per membership, under names of their own: rank 0 the sender, then every server's ranks in order."""
        if self._section.transport == "disk":
            return
        for name in self._groups.values():
            leaving = {f"server rank {rank}": self._servers[rank].destroy_group(name) for rank in self._joined}
            await self._all(leaving, "leaving the weight-sync group")
        await self._all(self._train.calls("sync_leave"), "leaving the weight-sync group")
        generation = secrets.token_hex(4)
        self._groups = {sender: f"weights-{generation}-{number}" for number, sender in enumerate(self._plans)}
        for sender, name in self._groups.items():
            await self._form_group(sender, name)
        self._joined, self._changed = list(self._members), False

    async def _form_group(self, sender: int, name: str) -> None:
        host = self._train.host(sender)
        port = (await self._train.call("sync_host", rank=sender, address=host))[sender]
        world_size = 1 + len(self._members) * self._replica_size
        joins = self._train.calls("sync_join", rank=sender, address=host, port=port, world_size=world_size, name=name)
        for place, rank in enumerate(self._members):
            joins[f"server rank {rank}"] = self._servers[rank].init_group(
                master_address=host,
                master_port=port,
                rank_offset=1 + place * self._replica_size,
                world_size=world_size,
                group_name=name,
                backend=self._backend,
            )
        await self._all(joins, "forming the weight-sync group")

    async def push(self, version: int) -> Metrics:
        """Give every server that takes part the trainer's weights as ``version``.

        Raises:
            SyncMismatch: a server reports another version or digest than the sender's.
            DeadlineExceeded: names who did not finish in time.
        """
        assert self._members, "nobody to send to"
        clock = _Laps()
        if self._changed:
            await self._form_groups()
            await points.reached("sync.grouped")
        only, digests = await self._to_send(version), self._digest_kind()
        on_disk = self._section.transport == "disk"
        what: dict[str, Any] = {"version": version, "only": None if only is None else sorted(only), "digests": digests}
        if not on_disk:
            await self._all(self._train.calls("sync_fill", **what), "filling the first buckets")
            await points.reached("sync.filled")
        clock.lap("sync/prepare_s")
        async with self._paused():
            await points.reached("sync.paused")
            clock.lap("sync/pause_s")
            sent = await (self._over_disk(version, digests) if on_disk else self._over_groups(only, what))
            clock.lap("sync/send_s")
            await points.reached("sync.sent")
            await self._verify(version, sent.digests, digests)
            await points.reached("sync.verified")
            clock.lap("sync/verify_s")
        clock.lap("sync/resume_s")
        self._acknowledged = dict.fromkeys(self._members, version)
        paused, whole = sum(clock.laps.values()) - clock.laps["sync/prepare_s"], sum(clock.laps.values())
        digest = combine(sent.digests) if sent.digests else "not computed"
        log.info("version %d, digest %s: %d servers hold it after %.2f s", version, digest, len(self._members), whole)
        laps = {name: m.total(seconds) for name, seconds in clock.laps.items()}
        times: Metrics = {"sync/version": m.last(version), "sync/paused_s": m.total(paused), "time/sync": m.total(whole)}
        return sent.metrics() | laps | times

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        done = False
        try:
            # Drained before (`RolloutController.drained`), nothing of the run's is left to interrupt.
            mode = "retract" if self._section.pause == "drain" else self._section.pause
            await self._each("pausing generation", "pause", mode)
            yield
            done = True
        finally:
            # Shielded: a cancelled run must not leave the servers of others waiting either.
            await asyncio.shield(self._release("resuming generation", "resume", failed=not done))

    async def _to_send(self, version: int) -> frozenset[str] | None:
        """Names of the tensors to send; None: all. Generation goes on meanwhile.

        Only servers that prove what they compute with may keep a tensor: their digests cover all of them, sent or not. And all of them
        must have proved that they hold one and the same version, so that a server that was started again gets everything.
        """
        if self._section.transport == "disk" or not all(self._capabilities[rank].partial_updates for rank in self._members):
            return None
        held = {self._acknowledged.get(rank) for rank in self._members}
        base = held.pop() if len(held) == 1 else None
        answers = await self._all(self._train.calls("sync_changed", version=version, base=base), "looking for changed weights")
        if any(answer is None for answer in answers.values()):
            return None
        specs = [spec for plan in self._plans.values() for spec in plan]
        # The version travels with a bucket: there must be one.
        only = with_fused({name for answer in answers.values() for name in answer} or {specs[-1].name}, specs)
        # Servers have a place for whole buckets, and receive what always comes together faster than a little less.
        sent, whole = sum(spec.nbytes for spec in specs if spec.name in only), sum(spec.nbytes for spec in specs)
        return only if sent < _WORTH * whole else None

    async def _over_groups(self, only: frozenset[str] | None, what: Mapping[str, Any]) -> Sent:
        """
        Args:
            only: names of the tensors to send; None: all.
            what: the senders are told, here as when they filled their first buckets.
        """
        limit = bucket_bytes(self._section.bucket_mb)
        plans = [plan_buckets((s for s in plan if only is None or s.name in only), limit) for plan in self._plans.values()]
        names = list(self._groups.values())
        order = [(names[sender], bucket) for sender, bucket in total_order(plans)]
        done = False
        ends: list[float] = []
        try:
            await self._each("beginning the update", "begin_update")
            await points.reached("sync.begun")
            jobs = {who: _stamped(send, ends) for who, send in self._train.calls("sync_broadcast", **what).items()}
            # In place keeps the KV of running requests; otherwise it is stale and goes.
            flush = self._section.pause != "in_place"
            jobs |= {
                f"server rank {rank}": server.update_run(order, version=what["version"], flush_cache=flush)
                for rank, server in self._present()
            }
            answers = await self._all(jobs, "sending weights")
            load_s = time.perf_counter() - max(ends)
            done = True
        finally:
            await self._release("ending the update", "end_update", failed=not done)
        return sent_by(answers, load_s)

    def _digest_kind(self) -> DigestKind | None:
        """What the servers report, all that report any; senders compute that.

        Samples are enough of a server that has proved once to load whatever comes.
        """
        kinds = {kind for rank in self._members if (kind := self._capabilities[rank].hf_digests) is not None}
        assert len(kinds) < 2, "all servers of a run are of one engine"
        if not kinds:
            return None
        [whole] = kinds
        proved = all(rank in self._acknowledged for rank in self._members)
        return with_sampled(whole)[-1] if proved and self._section.verify == "sampled" else whole

    async def _over_disk(self, version: int, digests: DigestKind | None) -> Sent:
        folder = self._folder / f"v{version}"
        done = False
        try:
            writes = self._train.calls("sync_write", version=version, folder=str(folder), digests=digests)
            answers = await self._all(writes, "writing weights")
            written = time.perf_counter()
            await self._each("reading weights", "update_from_disk", str(folder), version)
            load_s = time.perf_counter() - written
            done = True
        finally:
            # After a failure a rank may still be writing there; what that leaves, the next ``connect`` removes.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=not done)
        return sent_by(answers, load_s)

    async def _verify(self, version: int, digests: Mapping[str, str], kind: DigestKind | None) -> None:
        able = {rank: self._capabilities[rank] for rank in self._members}
        jobs = {f"server rank {rank}": self._held(server, kind if able[rank].hf_digests else None) for rank, server in self._present()}
        for who, (held, reported) in (await self._all(jobs, "verifying weights")).items():
            if held is not None and held.combined != combine(digests):
                raise SyncMismatch(mismatch(who, held.tensors, digests))
            if reported != version:
                raise SyncMismatch(f"{who} reports weight version {reported} after a sync of version {version}")
        if len(able) > 1 and all(each.checksums and not each.hf_digests for each in able.values()):
            await self._compare()

    async def _compare(self) -> None:
        """Servers without digests by HuggingFace name can still be held against each other, by checksums of their own."""
        jobs = {f"server rank {rank}": server.checksums() for rank, server in self._present()}
        (first, expected), *others = (await self._all(jobs, "comparing weights")).items()
        for who, found in others:
            if unlike := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
                raise SyncMismatch(f"{who} holds other weights than {first}: {len(unlike)} of {len(expected)} differ, first {unlike[0]}")

    async def _held(self, server: InferenceServer, kind: DigestKind | None) -> tuple[ServerDigest | None, int]:
        """Digests (None where the server reports none) and version of the weights that a server holds."""
        if kind is not None:
            held = await server.digests(kind)
            return held, held.weight_version
        return None, await server.weight_version()

    def _present(self) -> list[tuple[int, InferenceServer]]:
        return [(rank, self._servers[rank]) for rank in self._members]

    async def _each(self, doing: str, method: str, *args: Any) -> None:
        """The same call to every server."""
        await self._all({f"server rank {rank}": getattr(server, method)(*args) for rank, server in self._present()}, doing)

    async def _release(self, doing: str, method: str, *, failed: bool) -> None:
        """The same call to every server, whatever becomes of the others.

        Args:
            failed: the sync has failed already: its own error is the one to raise, and what goes wrong here is only logged.
        """
        limit = min(self._section.timeout_s, _RELEASE_S) if failed else self._section.timeout_s
        jobs = [asyncio.wait_for(getattr(server, method)(), limit) for _, server in self._present()]
        for rank, error in zip(self._members, await asyncio.gather(*jobs, return_exceptions=True), strict=True):
            if not isinstance(error, BaseException):
                continue
            if not failed:
                expired = isinstance(error, TimeoutError) and not isinstance(error, DeadlineExceeded)
                raise self._overdue([f"server rank {rank}"], doing) if expired else error
            log.warning("server rank %d, %s after a failed sync: %s: %s", rank, doing, type(error).__name__, error)

    async def _all(self, jobs: Jobs, doing: str) -> dict[str, Any]:
        """Answers by who gave them. The first failure ends the wait, and so does the deadline, which names who is missing."""
        if not jobs:  # all servers of the old group are dead
            return {}
        tasks = {who: asyncio.ensure_future(job) for who, job in jobs.items()}
        try:
            _, pending = await asyncio.wait(tasks.values(), timeout=self._section.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks.values():
                if task.done() and (error := task.exception()) is not None:
                    # Whoever dies takes the others' collectives along, and one of those may be the first to say so.
                    if silent := await self._silent(list(tasks)):
                        raise RunFailed(
                            f"weight sync: {', '.join(silent)} did not answer a health check after {doing} failed: {error}"
                        ) from error
                    raise error
            if pending:
                missing = [who for who, task in tasks.items() if task in pending]
                raise self._overdue(missing, doing, silent=await self._silent(missing))
            return {who: task.result() for who, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _overdue(self, missing: Sequence[str], doing: str, silent: Sequence[str] = ()) -> DeadlineExceeded:
        # All members of a collective wait for one: whoever does not even answer a health check is that one.
        hint = f"; {', '.join(silent)} did not answer a health check either" if silent else ""
        return DeadlineExceeded(
            f"weight sync: {', '.join(missing)} did not finish {doing} within sync.timeout_s={self._section.timeout_s:g} s{hint}"
        )

    async def _silent(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that do not answer a health check."""
        checks = self._train.calls("health", timeout_s=_HEALTH_S)
        checks |= {f"server rank {rank}": server.weight_version() for rank, server in self._present()}
        answers = await asyncio.gather(*(asyncio.wait_for(check, _HEALTH_S) for check in checks.values()), return_exceptions=True)
        return [who for who, answer in zip(checks, answers, strict=True) if who in names and isinstance(answer, BaseException)]


class _Laps:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


async def _stamped(job: Coroutine[Any, Any, Any], ends: list[float]) -> Any:
    """The answer; notes when it came."""
    answer = await job
    ends.append(time.perf_counter())
    return answer
