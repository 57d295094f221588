"""Replicas that are lost come back: a bounded number of times where a process died, and as often as Slurm gives their machine back.

A replica is an inference server and its rollout worker, on one machine. What becomes of a part that is lost:

- A *server* that died leaves the weight sync's membership; its worker is suspended, and the episodes that ran on it are tried on other
  replicas, or wait; its process is started again under its address. Broken servers are killed first (`controller.health`).
- A *worker* that died takes what it held along: its prompts, finished or not, are generated again elsewhere, and its process is started
  again. Its server lives on, with its weights.
- A *machine* that is gone (a Slurm task that was preempted, say) takes both along. When it, or another in its place, is there, both are
  started on it. The same holds for one that was not there when the run began.

A server that was started is healthy at some time, and then waits for a moment when the trainer is idle, at which the run pushes weights
over a group of the new membership. Only then does its worker generate. The trainer is never interrupted, and the weights that a server
gets are never those of a half-made step. When no restart is left a replica is given up, and the run goes on with the others until its
machine goes and another comes; with the last one it ends. With none there, and a machine still to come, it waits for so long as it would
at the beginning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from areal_mega.controller.absence import bound_absence
from areal_mega.controller.calls import gather_all
from areal_mega.controller.health import Health
from areal_mega.controller.replicas import Part, Replica
from areal_mega.controller.rollout import RolloutController
from areal_mega.controller.sync import WeightSync
from areal_mega.controller.workers import NEWS_S
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError, WorkerDied
from areal_mega.launch.machines import Launcher
from areal_mega.launch.watching import MachineLost
from areal_mega.rollout.inference import ServerFault
from areal_mega.rpc.client import PeerUnreachable, RpcError

log = logging.getLogger(__name__)

_POLL_S = 0.05
_NEWS_S = 10.0
"""Within this the death of a server is known that its worker met first."""


class ReplicaKeeper:
    """All replicas of a run. ``watch`` runs beside the training loop; the loop calls the rest.

    Args:
        replicas: by rank; those that have not been started are waited for.
        rollout: is told when a worker or its server is gone and when it is back; knows which servers fail attempt after attempt.
        restarts: how often processes may be started again, all of them together; 0: a loss ends the run.
        deadline_s: a process that was started must be ready after so long.
        health_s: a server that answers no health check for so long is killed.
        queue_s: with no replica there, the run waits for machines so long.
        say: gets a line per event.
        show: gets the state of every replica that does not serve, whenever that changes.
    """

    def __init__(
        self,
        launcher: Launcher,
        replicas: Sequence[Replica],
        rollout: RolloutController,
        sync: WeightSync,
        *,
        restarts: int,
        deadline_s: float,
        health_s: float,
        queue_s: float,
        say: Callable[[str], None],
        show: Callable[[Mapping[int, str]], None],
    ) -> None:
        self._launcher, self._replicas, self._rollout, self._sync = launcher, replicas, rollout, sync
        self._allowed, self._deadline_s, self._queue_s, self._say, self._show = restarts, deadline_s, queue_s, say, show
        self.restarts = 0
        """How often a process was started again."""
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._states: dict[int, str] = {}
        """Of those that are away or being started: which of it, and why."""
        self._away: set[int] = set()
        """Those of them whose machine is not there."""
        self._healthy: set[int] = set()
        self._resuming: dict[int, asyncio.Task[None]] = {}
        """Calls under way that let the workers of servers go on."""
        self._given_up: set[int] = set()
        self._syncing = False
        self._changed = asyncio.Event()
        self._health = Health(launcher, replicas, sync, kills=restarts > 0, health_s=health_s, spared=self._is_spared)

    async def watch(self) -> None:
        """Kill who is broken and start again who dies, for ever.

        Raises:
            WorkerDied, UserError: the death of one that is not started again, and not given up.
            DeadlineExceeded: one does not get ready and all others are given up, or nobody comes for ``queue_s`` seconds.
            PeerUnreachable, RpcError, ServerFault: the same, where it lives and cannot be used.
            RunFailed: nobody is there, and nobody will come.
        """
        self._survive()
        self._show(self._states)
        for replica in self._replicas:
            if not replica.started:
                self._begin(replica.rank, "not there yet", for_good=False)
        besides = [asyncio.create_task(self._health.check(replica.rank)) for replica in self._replicas]
        besides.append(asyncio.create_task(bound_absence(self._launcher, self._only_machines, queue_s=self._queue_s, say=self._say)))
        try:
            while True:
                self._look()
                await self._end_faulty()
                for each in besides:
                    if each.done():  # it never returns: this raises why
                        await each
                for rank, task in list(self._starting.items()):
                    if task.done():
                        del self._starting[rank]
                        await task
                await asyncio.sleep(_POLL_S)
        finally:
            tasks = [*self._starting.values(), *besides]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- what the loop calls

    @contextmanager
    def steady(self) -> Iterator[None]:
        """While weights are under way the death of a server ends the run: what servers hold would be anybody's guess."""
        self._look()
        self._syncing = True
        self._survive()
        yield
        # Only where all went well: a sync that failed ends the run, and the death behind it is to be its cause, not one to survive.
        self._syncing = False
        self._survive()

    async def settled(self) -> None:
        """Call before a sync: see `Health.settled`."""
        await self._health.settled()

    async def revived(self) -> None:
        """Wait until a server that was started is healthy and has no weights yet."""
        while not self._healthy:
            self._changed.clear()
            await self._changed.wait()

    def admit(self) -> tuple[int, ...]:
        """Let such servers take part in the next push; tell ``resume`` of them after it."""
        ranks = tuple(sorted(self._healthy))
        for rank in ranks:
            self._sync.admit(rank, self._replicas[rank].server, self._replicas[rank].capabilities)
        self._healthy.clear()
        return ranks

    async def resume(self, ranks: Sequence[int], version: int) -> None:
        """These hold the weights of ``version``: their workers go on. One that has died since is started once more, and is not back."""
        for rank in ranks:
            if not self._is_gone(rank, version) and await self._resumed(rank, version):
                self._note(rank, None)
                self._say(f"server rank {rank} is back, with weights of version {version}")

    def _is_gone(self, rank: int, version: int) -> bool:
        """Whether a server that got ``version``, or its worker, is lost since. A worker alone joins by itself when it is back."""
        starting = self._starting.get(rank)
        busy = starting is not None and not starting.done()
        return rank in self._health.killed or busy or self._sync.acknowledged(rank) != version

    async def _resumed(self, rank: int, version: int) -> bool:
        """Let the worker of ``rank`` go on; False where something of it dies meanwhile (``_look`` ends the attempt)."""
        task = self._resuming[rank] = asyncio.create_task(self._go_on(rank))
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

    async def _go_on(self, rank: int) -> None:
        if self._rollout.has(rank):
            await self._rollout.resume(rank, deadline_s=self._deadline_s)
        else:
            await self._rollout.join(rank, self._replicas[rank].worker)

    # --- who is lost

    def _survive(self) -> None:
        """Tell the launcher whose end is one to survive: in a sync, of those whose end does not concern it."""
        spared = set(self._sync.members) | self._healthy if self._syncing else set()
        servers = [replica.server_key for replica in self._replicas if replica.rank not in spared]
        self._launcher.survive([*servers, *(replica.worker_key for replica in self._replicas)] if self._allowed else ())

    def _look(self) -> None:
        losses: dict[int, dict[Part, Exception]] = {}
        for (role, rank), death in self._launcher.losses():
            part: Part = "server" if role == "server" else "rollout"
            why = self._health.killed.pop(rank, None) if part == "server" else None
            if why is not None and isinstance(death, WorkerDied):
                death = WorkerDied(role=role, rank=rank, cause=f"killed, for it {why}", log=death.log, last_lines=death.last_lines)
            losses.setdefault(rank, {})[part] = death
        for rank, parts in losses.items():
            self._lose(rank, parts)

    def _lose(self, rank: int, parts: Mapping[Part, Exception]) -> None:
        """Parts of a replica are lost: decide what becomes of it, and have it done."""
        for death in parts.values():
            if isinstance(death, UserError):
                raise death
        first = next(iter(parts.values()))
        away = isinstance(first, MachineLost)
        if "rollout" in parts:
            self._rollout.lose(rank)
        if away:
            self._given_up.discard(rank)  # the machine that comes in its place is worth trying
        if rank in self._given_up:
            for part in parts:
                self._replicas[rank].lost(part)
            if "rollout" in parts:
                self._begin(rank, self._states[rank], for_good=True)
            return
        for_good = not away and self.restarts >= self._allowed
        others = self._others(rank)
        if for_good and not (self._allowed and others):
            raise first
        what = str(first).partition("; its last lines")[0]
        if for_good:
            self._given_up.add(rank)
            self._say(f"{what}; all {self._allowed} restarts are used: the run goes on with {others} of {len(self._replicas)} replicas")
        elif away:
            self._say(f"{what}; the run goes on without replica {rank} until that is there again")
        else:
            self.restarts += 1
            self._say(f"{what}; it is started again ({self.restarts} of {self._allowed})")
        for part in parts:
            self._replicas[rank].lost(part)
        if "server" in parts:
            self._sync.lose(rank)
        self._healthy.discard(rank)
        self._begin(rank, f"given up: {what}" if for_good else what, for_good=for_good)
        if not (self._serving() or away):
            self._say(f"no replica is left; the run waits for one, at most launch.startup_timeout_s={self._deadline_s:g} s")

    def _begin(self, rank: int, why: str, *, for_good: bool) -> None:
        """Start ``rank`` again, or give it up, beside everything else."""
        earlier = self._starting.get(rank)
        for task in (self._resuming.get(rank), earlier):
            if task is not None:
                task.cancel()
        self._note(rank, why)
        self._starting[rank] = asyncio.create_task(self._give_up(rank, earlier) if for_good else self._start(rank, earlier))

    async def _give_up(self, rank: int, earlier: asyncio.Task[None] | None) -> None:
        """No restart is left: what lives of ``rank`` is of no more use than what it holds."""
        if earlier is not None:
            await asyncio.wait({earlier})
        if self._rollout.has(rank):
            await self._rollout.suspend(rank, deadline_s=self._deadline_s, for_good=True)
            return
        await self._rollout.pump()
        await self._synced()
        self._sync.lose(rank)
        await self._launcher.kill(self._replicas[rank].server_key)

    async def _start(self, rank: int, earlier: asyncio.Task[None] | None) -> None:
        """Start what was lost of ``rank``. A further loss of it cancels this and begins it anew."""
        if earlier is not None:
            await asyncio.wait({earlier})
        try:
            await self._bring_up(rank)
        except (PeerUnreachable, RpcError, ServerFault, MachineLost) as error:
            await asyncio.sleep(NEWS_S)  # what this process went along with is told of soon, and cancels this
            if not self._others(rank):
                raise
            # It lives, and cannot be used.
            self._say(f"replica {rank} is killed, for it does not get ready: {_first_line(error)}")
            await self._kill(rank, spares_worker=isinstance(error, ServerFault) and self._rollout.has(rank))
            await asyncio.sleep(NEWS_S)  # the death of what lived of it cancels this too
            await self._drop(rank, error)
        except DeadlineExceeded as error:
            await self._drop(rank, error)

    async def _drop(self, rank: int, error: Exception) -> None:
        """Give up a replica that does not get ready, where there is another: one that serves, or may yet."""
        if not self._others(rank):
            raise error
        self._given_up.add(rank)
        why = f"given up, for it does not get ready: {_first_line(error)}"
        self._say(f"replica {rank} is {why}")
        self._note(rank, why)
        self._rollout.lose(rank)
        await self._rollout.pump()
        await self._kill(rank)

    async def _kill(self, rank: int, *, spares_worker: bool = False) -> None:
        """End what lives of a replica, or its server alone: a worker has groups that are finished."""
        await self._synced()
        self._sync.lose(rank)
        keys = [self._replicas[rank].server_key, self._replicas[rank].worker_key]
        await gather_all(self._launcher.kill(key) for key in (keys[:1] if spares_worker else keys))

    async def _synced(self) -> None:
        """Wait until no weights are under way: a server that is killed among others that get some would end the run."""
        while self._syncing:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _bring_up(self, rank: int) -> None:
        replica = self._replicas[rank]
        lives = self._sync.acknowledged(rank) >= 0
        if self._rollout.has(rank):
            await self._rollout.suspend(rank, deadline_s=self._deadline_s)
        else:
            await self._rollout.pump()
        if lives:
            try:
                await replica.server.abort_all()
            except (ServerFault, DeadlineExceeded) as error:
                log.warning("what the lost worker %d had asked its server for goes on to its end: %s", rank, error)
        self._away.add(rank)
        try:
            await self._launcher.reach(replica.server_key)
        finally:
            self._away.discard(rank)
        await replica.start()
        await replica.meet_server(self._deadline_s)
        if not self._rollout.has(rank):
            await replica.meet_worker(self._deadline_s)
        await self._synced()  # until then nobody knows whether it got weights
        version = self._sync.acknowledged(rank)
        if version < 0:
            self._healthy.add(rank)
            self._changed.set()
        else:
            await self._rollout.join(rank, replica.worker)
            self._note(rank, None)
            self._say(f"rollout rank {rank} is back; its server has weights of version {version}")

    # --- who is there

    def _serving(self) -> list[int]:
        """Ranks that have a server with weights, and a worker."""
        return [rank for rank in self._sync.members if self._rollout.has(rank)]

    def _others(self, rank: int) -> int:
        """How many other replicas are not given up."""
        return len(self._replicas) - len(self._given_up | {rank})

    def _only_machines(self) -> bool:
        """Whether nobody is there, and nobody is being started: only machines could bring somebody."""
        return bool(self._away) and not (self._serving() or self._healthy or len(self._starting) > len(self._away))

    # --- who is broken

    async def _end_faulty(self) -> None:
        """A run that starts nobody again keeps such a server: its prompts are tried elsewhere, and end the run if that does not help."""
        if self._allowed:
            for rank, reason in self._rollout.faulty().items():
                await self._health.kill(rank, f"failed attempt after attempt; last: {reason}")

    def _is_spared(self, rank: int) -> bool:
        """Whether a server is not to be judged: weights are on their way, or it is none that has any."""
        return self._syncing or rank not in self._sync.members

    def _note(self, rank: int, state: str | None) -> None:
        """Keep, and show, what is the matter with ``rank``; None: nothing any more, unless it is given up."""
        if state is not None:
            self._states[rank] = state
        elif rank not in self._given_up:
            self._states.pop(rank, None)
        self._show(self._states)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
