"""Which inference servers are broken, though their processes live: asked again and again, and killed, so that they are dead ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from areal_mega.controller.calls import gather_all
from areal_mega.controller.replicas import Replica
from areal_mega.controller.sync import WeightSync
from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.launch.machines import Launcher
from areal_mega.rollout.inference import ServerFault

log = logging.getLogger(__name__)

_POLL_S = 0.05
_CHECKS = 4
"""Health checks within ``launch.server_health_timeout_s``, while they are answered."""
_PAUSE_S = 5.0
"""Longest pause between two."""
_KILL_S = 60.0
"""SIGKILL works at once, except on a process that waits inside the kernel; the news may come from another machine."""


class Health:
    """Health checks of all servers.

    Args:
        kills: whether who is broken is killed; else it ends the run.
        health_s: one that answers no health check for so long is killed.
        spared: who is not to be judged now: it is down, or weights are on their way to it.
    """

    def __init__(
        self,
        launcher: Launcher,
        replicas: Sequence[Replica],
        sync: WeightSync,
        *,
        kills: bool,
        health_s: float,
        spared: Callable[[int], bool],
    ) -> None:
        self._launcher, self._replicas, self._sync = launcher, replicas, sync
        self._kills, self._health_s, self._spared = kills, health_s, spared
        self.killed: dict[int, str] = {}
        """Who was killed, and has not been seen to die yet; why."""

    async def check(self, rank: int) -> None:
        """Ask a server again and again, for ever."""
        while True:
            await asyncio.sleep(min(_PAUSE_S, self._health_s / _CHECKS))
            await self._ask(rank, time.monotonic())

    async def settled(self) -> None:
        """Call before a sync: who takes part answers, and nobody is about to die. A hang within a sync would end the run.

        Raises:
            RunFailed: one that was killed does not die.
        """
        await gather_all(self._ask(rank, time.monotonic()) for rank in self._sync.members)
        end = time.monotonic() + _KILL_S
        while self.killed:
            if time.monotonic() > end:
                names = "; ".join(f"server rank {rank} ({why})" for rank, why in self.killed.items())
                raise RunFailed(f"killed, but still there after {_KILL_S:g} s: {names}")
            await asyncio.sleep(_POLL_S)

    async def kill(self, rank: int, why: str) -> None:
        """End a broken server; nothing where it is down already."""
        if rank not in self.killed and not self._spared(rank):
            if not self._kills:
                raise RunFailed(f"server rank {rank} {why}; launch.server_restarts is 0")
            self.killed[rank] = why
            log.warning("server rank %d is killed, for it %s", rank, why)
            await self._launcher.kill(("server", rank))

    async def _ask(self, rank: int, since: float) -> None:
        """Ask a server for its version until it answers; kill it when it gives no answer, or an old one."""
        while not (rank in self.killed or self._spared(rank)):
            confirmed, last = self._sync.acknowledged(rank), "nothing came back"
            try:
                async with asyncio.timeout(self._health_s):
                    version = await self._replicas[rank].server.weight_version()
            except (ServerFault, DeadlineExceeded) as error:
                last = str(error)
            except TimeoutError:
                pass
            else:
                if version < confirmed:
                    await self.kill(rank, f"reports weight version {version} although it had confirmed version {confirmed}")
                return
            if time.monotonic() - since >= self._health_s:
                limit = f"launch.server_health_timeout_s={self._health_s:g} s"
                await self.kill(rank, f"did not answer a health check within {limit}; last: {last}")
                return
            await asyncio.sleep(_POLL_S)
