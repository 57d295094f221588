"""Inference servers that die or are broken are started again: a bounded number of times, with the current weights before they serve.

Broken is a server that hangs (no answer to a health check within ``launch.server_health_timeout_s``), that reports older weights than it
had confirmed, or that fails attempt after attempt (`rollout.dispatch.Dispatch.faulty`). It is killed; from there on it is a dead one.

What becomes of a dead server, in order: it leaves the weight sync's membership; its rollout worker is suspended, and the episodes that
ran on it are tried on other replicas, or wait; its process is started again; when it is healthy it waits for a moment when the trainer
is idle, at which the run pushes weights over a group of the new membership; then its worker goes on. The trainer is never interrupted,
and the weights that a server gets are never those of a half-made step. When no restart is left a server is given up, and the run goes on
with the others; with the last one it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from areal_mega.controller.calls import gather_all
from areal_mega.controller.rollout import RolloutController
from areal_mega.controller.sync import WeightSync
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError, WorkerDied
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.machines import Launcher
from areal_mega.rollout.inference import InferenceServer, ServerFault

log = logging.getLogger(__name__)

_POLL_S = 0.05
_CHECKS = 4
"""Health checks within ``launch.server_health_timeout_s``, while they are answered."""
_PAUSE_S = 5.0
"""Longest pause between two."""
_NEWS_S = 10.0
"""Within this the death of a server is known, on whatever machine it was."""
_KILL_S = 60.0
"""SIGKILL works at once, except on a process that waits inside the kernel; the news may come from another machine."""


class ServerKeeper:
    """All inference servers of a run. ``watch`` runs beside the training loop; the loop calls the rest.

    Args:
        launcher: started the servers.
        specs: how to start each again, by rank.
        servers: a client of each, by rank.
        rollout: is told when a server is gone and when it is back; knows which fail attempt after attempt.
        restarts: how often servers may be started again, all of them together; 0: a death ends the run.
        deadline_s: a server that was started again must be healthy after so long.
        health_s: one that answers no health check for so long is killed.
        say: gets a line per event.
    """

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[ProcessSpec],
        servers: Sequence[InferenceServer],
        rollout: RolloutController,
        sync: WeightSync,
        *,
        restarts: int,
        deadline_s: float,
        health_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._launcher, self._specs, self._servers, self._rollout, self._sync = launcher, specs, servers, rollout, sync
        self._allowed, self._deadline_s, self._health_s, self._say = restarts, deadline_s, health_s, say
        self.restarts = 0
        """How often a server was started again."""
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._healthy: set[int] = set()
        self._resuming: dict[int, asyncio.Task[None]] = {}
        """Calls under way that let the workers of servers go on."""
        self._killed: dict[int, str] = {}
        """Who was killed, and has not been seen to die yet; why."""
        self._given_up: set[int] = set()
        self._syncing = False
        self._changed = asyncio.Event()
        self._keys = [spec.key for spec in specs]

    async def watch(self) -> None:
        """Kill who is broken and start again who dies, for ever.

        Raises:
            WorkerDied, UserError: the death of one that is not started again, and not given up; so too ``DeadlineExceeded`` of one that
                does not get healthy.
        """
        if self._allowed:
            self._launcher.survive(self._keys)
        checks = [asyncio.create_task(self._check(rank)) for rank in range(len(self._servers))]
        try:
            while True:
                self._look()
                await self._end_faulty()
                for check in checks:
                    if check.done():  # it never returns: this raises why
                        await check
                for rank, task in list(self._starting.items()):
                    if task.done():
                        del self._starting[rank]
                        await task
                await asyncio.sleep(_POLL_S)
        finally:
            tasks = [*self._starting.values(), *checks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """While weights are under way a death ends the run: what servers hold would be anybody's guess."""
        self._look()
        self._launcher.survive(())
        self._syncing = True
        yield
        # Only where all went well: a sync that failed ends the run, and the death behind it is to be its cause, not one to survive.
        self._syncing = False
        if self._allowed:
            self._launcher.survive(self._keys)

    async def settled(self) -> None:
        """Call before a sync: who takes part answers, and nobody is about to die. A hang within a sync would end the run.

        Raises:
            RunFailed: one that was killed does not die.
        """
        await gather_all(self._ask(rank, time.monotonic()) for rank in self._sync.members)
        end = time.monotonic() + _KILL_S
        while self._killed:
            if time.monotonic() > end:
                names = "; ".join(f"server rank {rank} ({why})" for rank, why in self._killed.items())
                raise RunFailed(f"killed, but still there after {_KILL_S:g} s: {names}")
            await asyncio.sleep(_POLL_S)

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
        """These hold the weights of ``version``: their workers go on. One that has died since is started once more, and is not back."""
        for rank in ranks:
            if not self._is_gone(rank, version) and await self._resumed(rank, version):
                self._say(f"server rank {rank} is back, with weights of version {version}")

    def _is_gone(self, rank: int, version: int) -> bool:
        """Whether a server that got ``version`` has lost it since."""
        return rank in self._killed or self._sync.acknowledged(rank) != version

    async def _resumed(self, rank: int, version: int) -> bool:
        """Let the worker of ``rank`` go on; False where its server dies meanwhile (``_look`` ends the attempt)."""
        task = self._resuming[rank] = asyncio.create_task(self._rollout.resume(rank, deadline_s=self._deadline_s))
        try:
            await asyncio.wait({task})
            if not task.cancelled() and isinstance(task.exception(), RunFailed):
                # The worker may meet a dead server before its death is known here.
                end = time.monotonic() + _NEWS_S
                while time.monotonic() < end and not self._is_gone(rank, version):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
            if self._is_gone(rank, version):
                return False
            await task
            return True
        finally:
            del self._resuming[rank]
            task.cancel()

    def _look(self) -> None:
        for (_, rank), death in self._launcher.losses():
            if (why := self._killed.pop(rank, None)) is not None and isinstance(death, WorkerDied):
                death = WorkerDied(role=death.role, rank=rank, cause=f"killed, for it {why}", log=death.log, last_lines=death.last_lines)
            others = len(self._servers) - len(self._given_up | {rank})
            for_good = self.restarts >= self._allowed
            if isinstance(death, UserError) or (for_good and not (self._allowed and others)):
                raise death
            what = str(death).partition("; its last lines")[0]
            if for_good:
                self._given_up.add(rank)
                self._say(f"{what}; all {self._allowed} restarts are used: the run goes on with {others} of {len(self._servers)} servers")
            else:
                self.restarts += 1
                self._say(f"{what}; it is started again ({self.restarts} of {self._allowed})")
            self._sync.lose(rank)
            if rank in self._resuming:
                self._resuming[rank].cancel()
            self._healthy.discard(rank)
            if rank in self._starting:
                self._starting[rank].cancel()
            self._starting[rank] = asyncio.create_task(self._start(rank, self._starting.get(rank), for_good))
            if not self._sync.members:
                self._say(f"no inference server is left; the run waits for one, at most launch.startup_timeout_s={self._deadline_s:g} s")

    async def _start(self, rank: int, earlier: asyncio.Task[None] | None, for_good: bool) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        await self._rollout.suspend(rank, deadline_s=self._deadline_s, for_good=for_good)
        if for_good:
            return
        await self._launcher.launch([self._specs[rank]])
        await self._servers[rank].wait_healthy(self._deadline_s)
        self._healthy.add(rank)
        self._changed.set()

    # Who is broken. While weights are under way nobody is judged: the sync has a deadline of its own.

    async def _check(self, rank: int) -> None:
        """Ask a server again and again."""
        while True:
            await asyncio.sleep(min(_PAUSE_S, self._health_s / _CHECKS))
            await self._ask(rank, time.monotonic())

    async def _ask(self, rank: int, since: float) -> None:
        """Ask a server for its version until it answers; kill it when it gives no answer, or an old one."""
        while not (self._syncing or self._is_down(rank)):
            confirmed, last = self._sync.acknowledged(rank), "nothing came back"
            try:
                async with asyncio.timeout(self._health_s):
                    version = await self._servers[rank].weight_version()
            except (ServerFault, DeadlineExceeded) as error:
                last = str(error)
            except TimeoutError:
                pass
            else:
                if version < confirmed:
                    await self._kill(rank, f"reports weight version {version} although it had confirmed version {confirmed}")
                return
            if time.monotonic() - since >= self._health_s:
                limit = f"launch.server_health_timeout_s={self._health_s:g} s"
                await self._kill(rank, f"did not answer a health check within {limit}; last: {last}")
                return
            await asyncio.sleep(_POLL_S)

    async def _end_faulty(self) -> None:
        """A run that starts nobody again keeps such a server: its prompts are tried elsewhere, and end the run if that does not help."""
        if self._allowed:
            for rank, reason in self._rollout.faulty().items():
                await self._kill(rank, f"failed attempt after attempt; last: {reason}")

    async def _kill(self, rank: int, why: str) -> None:
        if not (self._syncing or self._is_down(rank)):
            if not self._allowed:
                raise RunFailed(f"server rank {rank} {why}; launch.server_restarts is 0")
            self._killed[rank] = why
            log.warning("server rank %d is killed, for it %s", rank, why)
            await self._launcher.kill(self._keys[rank])

    def _is_down(self, rank: int) -> bool:
        return rank in self._killed or rank in self._given_up or rank in self._starting or rank in self._healthy


def server_specs(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Those of inference servers, by rank."""
    by_rank: Mapping[int, ProcessSpec] = {spec.rank: spec for spec in specs if spec.role == "server"}
    return [by_rank[rank] for rank in sorted(by_rank)]
