"""The agent of an array task: starts, watches and ends the processes of its node, as the run's controller tells it.

It outlives attempts: when the controller begins a new one, what is left of the last is ended first. It keeps nothing that matters, so
a task may die and come back at any moment; the controller sees another incarnation and starts what belongs there again.

    events are numbered; ``events(seen, wait_s)`` returns those beyond ``seen``, and is the controller's sign of life as well. A new attempt
    counts from 0: with what nobody has heard yet of the task itself, which may have waited for an attempt to begin.
      {"kind": "died", "role", "rank", "code"}    a process ended that should not have
      {"kind": "leaving", "why"}                                 the task is about to end: preemption, requeue, cancellation
      {"kind": "limit", "why"}                                   the task's time limit is near
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import RunFailed, UserError
from areal_mega.launch.local import LocalLauncher, ProcessSpec
from areal_mega.launch.rundir import RunDir
from areal_mega.launch.slurm.jobs import Slurm
from areal_mega.launch.slurm.meeting import ArrayTask, Meeting, Presence, new_incarnation
from areal_mega.launch.slurm.script import plan_of
from areal_mega.launch.worker import HOST_ENV
from areal_mega.rpc.server import RpcServer
from areal_mega.rpc.wire import listen_socket

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""A controller that has not called for so long is gone, and processes that nobody leads are ended."""
_POLL_S = 0.1
_LAST_WORDS_S = 3.0
"""After SIGTERM the controller gets this long to hear of it; Slurm's own KillWait is 30 s by default."""
SAVE_S = 20.0
"""So long a task with train ranks stays after SIGTERM, in which the run can save; it leaves when its processes are ended."""


class Agent:
    """One task's agent.

    Args:
        host: address of this node, where its processes listen.
        token: what callers must show.
    """

    def __init__(self, recipe: Recipe, task: ArrayTask, host: str, token: str) -> None:
        self._recipe, self._task, self._host = recipe, task, host
        self._token, self._incarnation = token, new_incarnation()
        self._server = RpcServer(token, f"agent of task {task.task}")
        self._launcher: LocalLauncher | None = None
        self._events: list[dict[str, Any]] = []
        self._seen = 0
        """How many of them were heard, as the question for further ones says."""
        self._news = asyncio.Event()
        self._heard = time.monotonic()
        self._leave = asyncio.Event()
        self._ending = False
        self._failed = ""
        for method in (
            self.hello,
            self.begin,
            self.start,
            self.ports,
            self.events,
            self.end,
            self.kill_process,
            self.leave,
        ):
            self._server.register(method.__name__, method)

    async def serve(self) -> None:
        """Be there until the controller says ``leave``, the run's first task is over, or Slurm ends this task.

        Raises:
            UserError: the host is no address of this node, or the meeting's folder cannot be written.
            RunFailed: no controller came within ``launch.slurm.queue_timeout_s``, or its task is over.
        """
        address = await self._server.start(self._host)
        Meeting(self._recipe, self._task.meeting).enter(
            Presence(
                task=self._task.task,
                incarnation=self._incarnation,
                address=address,
                token=self._token,
                host=self._host,
                job=self._task.job,
                devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            )
        )
        log.info("task %d is here, at %s", self._task.task, address)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGUSR1, self._on_limit)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # one that came before is delivered now
        try:
            await self._watch()
        finally:
            await self._end_processes()
            await self._server.stop()
        if self._failed:
            raise RunFailed(f"the run failed: {self._failed}; task 0 has the whole story")

    # What the controller calls.

    async def hello(self) -> dict[str, Any]:
        """Who this is.

        Raises:
            RunFailed: the task is about to end.
        """
        self._refuse_ending()
        self._heard = time.monotonic()
        return {"task": self._task.task, "incarnation": self._incarnation}

    async def begin(self, run_dir: str, attempt: str) -> None:
        """A new attempt: end what is left of the last one, and start processes for this one from now on.

        Raises:
            RunFailed: the task is about to end.
        """
        self._refuse_ending()
        self._heard = time.monotonic()
        await self._end_processes()
        launch = self._recipe.launch
        self._launcher = LocalLauncher(
            RunDir.open(Path(run_dir), attempt), startup_timeout_s=launch.startup_timeout_s, shutdown_timeout_s=launch.shutdown_timeout_s
        )
        # The dead are those of the attempt before; a signal that came between two attempts concerns this one too.
        self._events, self._seen = [event for event in self._events[self._seen :] if event["kind"] != "died"], 0

    async def start(self, specs: Sequence[Mapping[str, Any]]) -> None:
        """Start processes: ``role``, ``rank``, ``argv``, ``env``, ``cpus`` each."""
        self._heard = time.monotonic()
        assert self._launcher is not None, "start before begin"
        batch = [ProcessSpec(**spec) for spec in specs]
        self._launcher.start([replace(spec, env={**spec.env, HOST_ENV: self._host}) for spec in batch])

    async def ports(self, count: int) -> list[int]:
        """Distinct free ports of this node."""
        with ExitStack() as stack:
            probes = [stack.enter_context(listen_socket(self._host, 0)) for _ in range(count)]
            return [probe.getsockname()[1] for probe in probes]

    async def events(self, seen: int, wait_s: float) -> list[dict[str, Any]]:
        """Events beyond the first ``seen``; returns empty after ``wait_s`` seconds without one."""
        self._heard, self._seen = time.monotonic(), seen
        deadline = self._heard + wait_s
        while len(self._events) <= seen and (left := deadline - time.monotonic()) > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                break
        self._heard = time.monotonic()
        return self._events[seen:]

    async def kill_process(self, role: str, rank: int) -> None:
        """End one process at once; its end is an event like any other's."""
        self._heard = time.monotonic()
        assert self._launcher is not None, "kill before begin"
        await self._launcher.kill((role, rank))

    async def end(self) -> None:
        """End all processes; the agent stays, unless Slurm has told it to end."""
        self._heard = time.monotonic()
        await self._end_processes()
        if self._ending:
            self._leave.set()

    async def leave(self, why: str) -> None:
        """End all processes, and the task; as failed where ``why`` is not empty."""
        self._failed = why
        self._leave.set()

    # Its own watch.

    async def _watch(self) -> None:
        slurm = Slurm(cache_s=LEASE_S)
        while not self._leave.is_set():
            self._collect()
            if self._launcher is not None and time.monotonic() - self._heard > LEASE_S:
                log.warning("no controller for %g s: ending its processes", LEASE_S)
                await self._end_processes()
            if self._launcher is None:
                await self._check_orphaned(slurm)
            try:
                await asyncio.wait_for(self._leave.wait(), _POLL_S)
            except TimeoutError:
                continue

    async def _check_orphaned(self, slurm: Slurm) -> None:
        """Without a controller there is a bound on the waiting, and no point in it once task 0 is over.

        None for the agent beside the controller, which is its parent and takes it along.
        """
        if self._task.task == 0:
            return
        quiet = time.monotonic() - self._heard
        if quiet > self._recipe.launch.slurm.queue_timeout_s:
            raise RunFailed(f"no controller within launch.slurm.queue_timeout_s={self._recipe.launch.slurm.queue_timeout_s:g} s")
        if quiet < LEASE_S:
            return
        try:
            states = await asyncio.to_thread(slurm.tasks, [self._task.meeting]) if self._task.meeting.isdigit() else []
        except (RunFailed, UserError) as error:
            log.warning("%s", error)  # a slurmctld that is away for a while, or a node without squeue, is no reason to end
            return
        for state in states:
            if state.index == 0 and state.ended:
                over = f"the run's controller is over ({state}); nothing is left to do here"
                if state.state != "COMPLETED":
                    raise RunFailed(over)
                log.info("%s", over)  # this task was late, and the run was done without it
                self._leave.set()

    def _refuse_ending(self) -> None:
        if self._ending:
            raise RunFailed(f"task {self._task.task} was told to end")

    def _collect(self) -> None:
        if self._launcher is None:
            return
        for (role, rank), code in self._launcher.new_deaths():
            self._tell(kind="died", role=role, rank=rank, code=code)

    def _tell(self, **event: Any) -> None:
        log.info("event %s", event)
        self._events.append(event)
        self._news.set()

    def _on_limit(self) -> None:
        self._tell(kind="limit", why=f"the time limit of task {self._task.task} is near")

    def _on_term(self) -> None:
        if self._ending:
            return
        self._ending = True
        self._tell(kind="leaving", why=f"task {self._task.task} was told to end (preempted, requeued or cancelled)")
        trains = any(role == "train" for role, _ in plan_of(self._recipe).keys(self._task.task))
        asyncio.get_running_loop().call_later(SAVE_S if trains else _LAST_WORDS_S, self._leave.set)

    async def _end_processes(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            # In a thread: it waits for processes to end, and the controller may still ask for what happened.
            await asyncio.to_thread(launcher.stop)


def node_host(env: Mapping[str, str]) -> str:
    """The address at which other nodes reach this one: what ``HOST_ENV`` says, else what the node's own name resolves to.

    Raises:
        UserError: the name does not resolve, or to an address that is not this node's.
    """
    name = env.get(HOST_ENV) or socket.gethostname()
    remedy = f"export {HOST_ENV}=<this node's address> in launch.slurm.setup, or mend the node's /etc/hosts or DNS"
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"node {socket.gethostname()}: the host name {name} does not resolve ({error}); {remedy}") from error
    try:
        listen_socket(address, 0).close()
    except UserError as error:
        raise UserError(f"node {socket.gethostname()}: {name} is no address of this node ({error}); {remedy}") from error
    return address
