"""Weight sync (hop 7): pause, send, verify, resume. Every server must acknowledge version and digest, or the run stops.

Generation is resumed whatever happens in between; a failed sync is an error all the same, because some servers may hold new weights
and others old ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_mega.config.schema import Recipe
from areal_mega.controller.calls import gather_all
from areal_mega.controller.train import TrainController
from areal_mega.core import metrics as m
from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.core.metrics import Metrics
from areal_mega.rollout.client import Capabilities, InferenceClient

log = logging.getLogger(__name__)


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
        servers: Sequence[InferenceClient],
        capabilities: Sequence[Capabilities],
        recipe: Recipe,
        *,
        replica_size: int,
        backend: str,
        folder: Path,
    ) -> None:
        self._train, self._servers, self._capabilities, self._recipe = train, servers, capabilities, recipe
        self._section = recipe.sync
        self._replica_size, self._backend, self._folder = replica_size, backend, folder
        self._buckets: list[dict[str, Any]] = []
        self._group = ""

    async def connect(self) -> None:
        """Plan the buckets, and form the group: rank 0 the first train rank, then every server's ranks in order.

        Raises:
            DeadlineExceeded: names who did not join.
        """
        self._buckets = (await self._train.call("sync_plan"))[0]
        if self._section.transport == "disk":
            return
        self._group = f"weights-{secrets.token_hex(4)}"
        host, port = self._recipe.launch.host, _free_port(self._recipe.launch.host)
        world_size = 1 + len(self._servers) * self._replica_size
        joins: dict[str, Any] = {
            "train rank 0": self._train.call("sync_join", address=host, port=port, world_size=world_size, name=self._group)
        }
        for rank, server in enumerate(self._servers):
            joins[f"server rank {rank}"] = server.init_group(
                master_address=host,
                master_port=port,
                rank_offset=1 + rank * self._replica_size,
                world_size=world_size,
                group_name=self._group,
                backend=self._backend,
            )
        await self._all(joins, "forming the weight-sync group")

    async def push(self, version: int) -> Metrics:
        """Give every server the trainer's weights as ``version``.

        Raises:
            SyncMismatch: a server reports another version or digest than the sender's.
            DeadlineExceeded: names who did not finish in time.
        """
        clock = time.perf_counter()
        async with self._paused():
            report = await (self._over_disk(version) if self._section.transport == "disk" else self._over_group(version))
            sent = time.perf_counter()
            await self._verify(version, report["digest"])
            verified = time.perf_counter()
        end = time.perf_counter()
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
        try:
            await self._each("pausing generation", "pause", self._section.pause)
            yield
        finally:
            # Shielded: a cancelled run must not leave the servers of others waiting either.
            await asyncio.shield(self._each("resuming generation", "resume"))

    async def _over_group(self, version: int) -> dict[str, Any]:
        await self._each("beginning the update", "begin_update")
        try:
            jobs: dict[str, Any] = {"train ranks": self._train.call("sync_broadcast", version=version)}
            for rank, server in enumerate(self._servers):
                jobs[f"server rank {rank}"] = self._receive(server, version)
            answers = await self._all(jobs, "sending weights")
        finally:
            await self._each("ending the update", "end_update")
        return next(report for report in answers[0] if report is not None)

    async def _receive(self, server: InferenceClient, version: int) -> None:
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
        answers = await self._all({"train ranks": self._train.call("sync_write", version=version, folder=str(folder))}, "writing weights")
        await self._each("reading weights", "update_from_disk", str(folder), version)
        await asyncio.to_thread(shutil.rmtree, folder)
        return next(report for report in answers[0] if report is not None)

    async def _verify(self, version: int, digest: str) -> None:
        for rank, (server, able) in enumerate(zip(self._servers, self._capabilities, strict=True)):
            if able.hf_digests:
                held = await self._within(server.digests(), f"server rank {rank}", "verifying weights")
                if held.combined != digest:
                    raise SyncMismatch(f"server rank {rank} holds weights of digest {held.combined}, the trainer sent {digest}")
                reported = held.weight_version
            else:
                reported = int((await self._within(server.model_info(), f"server rank {rank}", "verifying weights"))["weight_version"])
            if reported != version:
                raise SyncMismatch(f"server rank {rank} reports weight version {reported} after a sync of version {version}")

    async def _each(self, doing: str, method: str, *args: Any) -> list[Any]:
        jobs = {f"server rank {rank}": getattr(server, method)(*args) for rank, server in enumerate(self._servers)}
        return await self._all(jobs, doing)

    async def _all(self, jobs: dict[str, Any], doing: str) -> list[Any]:
        return await gather_all(self._within(job, who, doing) for who, job in jobs.items())

    async def _within(self, job: Any, who: str, doing: str) -> Any:
        try:
            async with asyncio.timeout(self._section.timeout_s):
                return await job
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"weight sync: {who} did not finish {doing} within sync.timeout_s={self._section.timeout_s:g} s"
            ) from error


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
