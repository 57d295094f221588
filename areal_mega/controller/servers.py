"""Inference servers that die are started again: a bounded number of times, and with the current weights before they serve.

What becomes of a dead server, in order: its rollout worker is suspended (running episodes go back to the head of its queue); it leaves
the weight sync's membership; its process is started again; when it is healthy it waits for a moment when the trainer is idle, at which
the run pushes weights over a group of the new membership; then its worker goes on. The trainer is never interrupted, and the weights
that a server gets are never those of a half-made step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from areal_mega.controller.sync import WeightSync
from areal_mega.core.errors import UserError
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.machines import Launcher
from areal_mega.rollout.inference import InferenceServer
from areal_mega.rpc.client import RpcClient

log = logging.getLogger(__name__)

_POLL_S = 0.05


class ServerKeeper:
    """All inference servers of a run. ``watch`` runs beside the training loop; the loop calls the rest.

    Args:
        launcher: started the servers.
        specs: how to start each again, by rank.
        servers, workers: clients of each server and of the rollout worker that uses it, by rank.
        restarts: how often servers may be started again, all of them together; 0: a death ends the run.
        deadline_s: a server that was started again must be healthy after so long.
        say: gets a line per event.
    """

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[ProcessSpec],
        servers: Sequence[InferenceServer],
        workers: Sequence[RpcClient],
        sync: WeightSync,
        *,
        restarts: int,
        deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._launcher, self._specs, self._servers, self._workers, self._sync = launcher, specs, servers, workers, sync
        self._allowed, self._deadline_s, self._say = restarts, deadline_s, say
        self.restarts = 0
        """How often a server was started again."""
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._healthy: set[int] = set()
        self._changed = asyncio.Event()
        self._keys = [spec.key for spec in specs]

    async def watch(self) -> None:
        """Start again who dies, for ever.

        Raises:
            WorkerDied, UserError: the death of one that is not started again; so too ``DeadlineExceeded`` of one that does not get healthy.
        """
        if self._allowed:
            self._launcher.survive(self._keys)
        try:
            while True:
                self._look()
                for rank, task in list(self._starting.items()):
                    if task.done():
                        del self._starting[rank]
                        await task
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._starting.values():
                task.cancel()
            await asyncio.gather(*self._starting.values(), return_exceptions=True)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """While weights are under way a death ends the run: what servers hold would be anybody's guess."""
        self._look()
        self._launcher.survive(())
        try:
            yield
        finally:
            if self._allowed:
                self._launcher.survive(self._keys)

    async def revived(self) -> None:
        """Wait until a server that was started again is healthy and has no weights yet."""
        while not self._healthy:
            self._changed.clear()
            await self._changed.wait()

    def admit(self) -> tuple[int, ...]:
        """Let such servers take part in the next push; tell ``resume`` of them after it."""
        ranks = tuple(sorted(self._healthy))
        for rank in ranks:
            self._sync.admit(rank)
        self._healthy.clear()
        return ranks

    async def resume(self, ranks: Sequence[int], version: int) -> None:
        """These hold the weights of ``version``: their workers go on."""
        for rank in ranks:
            await self._workers[rank].call("resume", deadline_s=self._deadline_s, timeout_s=self._deadline_s)
            self._say(f"server rank {rank} is back, with weights of version {version}")

    def _look(self) -> None:
        for (_, rank), death in self._launcher.losses():
            if isinstance(death, UserError) or self.restarts >= self._allowed:
                raise death
            self.restarts += 1
            what = str(death).partition("; its last lines")[0]
            self._say(f"{what}; it is started again ({self.restarts} of {self._allowed})")
            self._sync.lose(rank)
            self._healthy.discard(rank)
            if rank in self._starting:
                self._starting[rank].cancel()
            self._starting[rank] = asyncio.create_task(self._start(rank, self._starting.get(rank)))

    async def _start(self, rank: int, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        await self._workers[rank].call("suspend", timeout_s=self._deadline_s)
        await self._launcher.launch([self._specs[rank]])
        await self._servers[rank].wait_healthy(self._deadline_s)
        self._healthy.add(rank)
        self._changed.set()


def server_specs(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Those of inference servers, by rank."""
    by_rank: Mapping[int, ProcessSpec] = {spec.rank: spec for spec in specs if spec.role == "server"}
    return [by_rank[rank] for rank in sorted(by_rank)]
