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
from areal_mega.controller.train import TrainController
from areal_mega.core import metrics as m
from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.core.metrics import Metrics
from areal_mega.rollout.inference import Capabilities, InferenceServer

log = logging.getLogger(__name__)

_RELEASE_S = 30.0
"""How long a failed sync waits for servers to let go. One that failed may never answer, and the failure itself is to be heard."""
_HEALTH_S = 5.0
"""Within this a healthy peer answers a health check, however busy it is."""

Jobs = Mapping[str, Coroutine[Any, Any, Any]]
"""Calls to make at once, by the name of who is called."""


class SyncMismatch(RunFailed):
    """A server does not hold what the trainer sent."""


class WeightSync:
    """The trainer's and the servers' sides of one weight-sync group, driven together.

    Args:
        servers: clients of all inference replicas, in the order of their ranks.
        capabilities: of each server.
        replica_size: ranks of one replica.
        backend: ``gloo`` or ``nccl``.
        folder: where the disk transport writes.
    """

    def __init__(
        self,
        train: TrainController,
        servers: Sequence[InferenceServer],
        capabilities: Sequence[Capabilities],
        recipe: Recipe,
        *,
        replica_size: int,
        backend: str,
        host: str,
        folder: Path,
    ) -> None:
        self._train, self._servers, self._capabilities, self._recipe = train, servers, capabilities, recipe
        self._section = recipe.sync
        self._replica_size, self._backend, self._host, self._folder = replica_size, backend, host, folder
        self._members = list(range(len(servers)))
        self._buckets: list[dict[str, Any]] = []
        self._group = ""
        self._joined: list[int] = []
        """Members of the group, except who has died since."""
        self._changed = False

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the servers that take part."""
        return tuple(self._members)

    def lose(self, rank: int) -> None:
        """A server is gone. The group is formed anew, without it, before the next push."""
        self._members = [member for member in self._members if member != rank]
        self._joined = [member for member in self._joined if member != rank]
        self._changed = True

    def admit(self, rank: int) -> None:
        """A server that is healthy takes part from the next push on; the group is formed anew before."""
        self._members = sorted({*self._members, rank})
        self._changed = True

    async def connect(self) -> None:
        """Plan the buckets, and form the group.

        Raises:
            DeadlineExceeded: names who did not join.
        """
        self._buckets = (await self._train.call("sync_plan"))[0]
        await self._form_group()

    async def _form_group(self) -> None:
        """One group per membership, under a name of its own: rank 0 the first train rank, then every server's ranks in order."""
        if self._section.transport == "disk":
            return
        if self._group:
            leaving = self._train.calls("sync_leave")
            leaving |= {f"server rank {rank}": self._servers[rank].destroy_group(self._group) for rank in self._joined}
            await self._all(leaving, "leaving the weight-sync group")
        self._group = f"weights-{secrets.token_hex(4)}"
        host = self._host
        port = (await self._train.call("sync_host", address=host))[0]
        world_size = 1 + len(self._members) * self._replica_size
        joins = self._train.calls("sync_join", address=host, port=port, world_size=world_size, name=self._group)
        for place, rank in enumerate(self._members):
            joins[f"server rank {rank}"] = self._servers[rank].init_group(
                master_address=host,
                master_port=port,
                rank_offset=1 + place * self._replica_size,
                world_size=world_size,
                group_name=self._group,
                backend=self._backend,
            )
        await self._all(joins, "forming the weight-sync group")
        self._joined, self._changed = list(self._members), False

    async def push(self, version: int) -> Metrics:
        """Give every server that takes part the trainer's weights as ``version``.

        Raises:
            SyncMismatch: a server reports another version or digest than the sender's.
            DeadlineExceeded: names who did not finish in time.
        """
        assert self._members, "nobody to send to"
        clock = time.perf_counter()
        if self._changed:
            await self._form_group()
        async with self._paused():
            report = await (self._over_disk(version) if self._section.transport == "disk" else self._over_group(version))
            sent = time.perf_counter()
            await self._verify(version, report["digest"])
            verified = time.perf_counter()
        end = time.perf_counter()
        log.info("version %d, digest %s: %d servers hold it after %.2f s", version, report["digest"], len(self._members), end - clock)
        return {
            "sync/version": m.last(version),
            "sync/bytes": m.total(report["nbytes"]),
            "sync/gather_s": m.total(report["gather_s"]),
            "sync/digest_s": m.total(report["digest_s"]),
            "sync/transfer_s": m.total(report["transfer_s"]),
            "sync/send_s": m.total(sent - clock),
            "sync/verify_s": m.total(verified - sent),
            "sync/paused_s": m.total(end - clock),
            "time/sync": m.total(end - clock),
        }

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        done = False
        try:
            await self._each("pausing generation", "pause", self._section.pause)
            yield
            done = True
        finally:
            # Shielded: a cancelled run must not leave the servers of others waiting either.
            await asyncio.shield(self._release("resuming generation", "resume", failed=not done))

    async def _over_group(self, version: int) -> dict[str, Any]:
        done = False
        try:
            await self._each("beginning the update", "begin_update")
            jobs = self._train.calls("sync_broadcast", version=version)
            for rank, server in self._present():
                jobs[f"server rank {rank}"] = self._receive(server, version)
            answers = await self._all(jobs, "sending weights")
            done = True
        finally:
            await self._release("ending the update", "end_update", failed=not done)
        return _sent(answers)

    async def _receive(self, server: InferenceServer, version: int) -> None:
        for number, bucket in enumerate(self._buckets, 1):
            last = number == len(self._buckets)
            await server.update_bucket(
                names=list(bucket["names"]),
                dtypes=[bucket["dtype"]] * len(bucket["names"]),
                shapes=[list(shape) for shape in bucket["shapes"]],
                group_name=self._group,
                version=version if last else None,
                # In place keeps the KV of running requests; otherwise it is stale and goes.
                flush_cache=last and self._section.pause != "in_place",
            )

    async def _over_disk(self, version: int) -> dict[str, Any]:
        folder = self._folder / f"v{version}"
        answers = await self._all(self._train.calls("sync_write", version=version, folder=str(folder)), "writing weights")
        try:
            await self._each("reading weights", "update_from_disk", str(folder), version)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)
        return _sent(answers)

    async def _verify(self, version: int, digest: str) -> None:
        able = {rank: self._capabilities[rank] for rank in self._members}
        jobs = {f"server rank {rank}": self._held(server, able[rank]) for rank, server in self._present()}
        for who, (held, reported) in (await self._all(jobs, "verifying weights")).items():
            if held is not None and held != digest:
                raise SyncMismatch(f"{who} holds weights of digest {held}, the trainer sent {digest}")
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

    async def _held(self, server: InferenceServer, able: Capabilities) -> tuple[str | None, int]:
        """Digest (None where the server reports none) and version of the weights that a server holds."""
        if able.hf_digests:
            held = await server.digests()
            return held.combined, held.weight_version
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
        tasks = {who: asyncio.ensure_future(job) for who, job in jobs.items()}
        try:
            _, pending = await asyncio.wait(tasks.values(), timeout=self._section.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks.values():
                if task.done() and (error := task.exception()) is not None:
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


def _sent(answers: Mapping[str, Any]) -> dict[str, Any]:
    """The report of the train rank that sent; the others have none."""
    return next(report for report in answers.values() if report is not None)
