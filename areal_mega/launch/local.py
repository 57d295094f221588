"""Starts, watches and ends the processes of a run on this machine.

Whatever happens to the controller, nothing is left behind: an orderly ``stop`` ends everything with SIGTERM, then SIGKILL; when the
controller itself is killed, the kernel kills its children (PR_SET_PDEATHSIG) and a guard process their descendants.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

from areal_mega.core.errors import UserError
from areal_mega.launch import processes, watching
from areal_mega.launch.rundir import Key, RunDir

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_POLL_S = 0.05
_SETTLE_S = 2.0
"""How long to look for a death behind a failed call: sockets of a killed process close a little before its exit can be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to start. ``env`` is added to this process's environment; an empty ``cpus`` leaves it unpinned."""

    role: str
    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: Sequence[int] = ()

    @property
    def key(self) -> Key:
        return self.role, self.rank


class LocalLauncher:
    """The processes of one run directory.

    Args:
        run_dir: where logs go and processes announce themselves.
        startup_timeout_s: ``wait_ready`` gives up after this.
        shutdown_timeout_s: what lives so long after SIGTERM gets SIGKILL.
    """

    def __init__(self, run_dir: RunDir, *, startup_timeout_s: float, shutdown_timeout_s: float) -> None:
        self._run_dir = run_dir
        self.leaving = asyncio.Event()
        """Never set: this machine's end is the controller's own."""
        self._startup_timeout_s, self._shutdown_timeout_s = startup_timeout_s, shutdown_timeout_s
        self._marker = secrets.token_hex(8)
        self._children: dict[Key, subprocess.Popen[bytes]] = {}
        self._deaths: list[tuple[Key, int]] = []
        """Unexpected ends, first one first."""
        self._reported = 0
        self._revivable: frozenset[Key] = frozenset()
        self._told: set[int] = set()
        """Which of the deaths ``losses`` has told of."""
        self._stopping = False
        self._guard: subprocess.Popen[bytes] | None = None
        # epoll hands over the ready ones in the order in which they became ready: the first death is the cause, later ones follow from it.
        self._epoll, self._pidfds = select.epoll(), dict[int, Key]()
        # PR_SET_PDEATHSIG fires when the *thread* that forked ends, so one thread, which lives as long as this object, forks them all.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Start processes; each one's output goes to its log file. Returns before they are ready.

        Raises:
            UserError: a program is not there, or a process is to be pinned to a core that this one may not use.
        """
        assert not self._stopping, "start after stop"
        batch = tuple(specs)
        for spec in batch:
            assert spec.key not in self._pidfds.values(), f"{spec.role} rank {spec.rank} is started twice"
            _check(spec)
        if self._guard is None:
            _check_kernel()
            self._start_guard()
        for spec in batch:
            child = self._spawner.submit(self._spawn, spec).result()
            self._children[spec.key] = child
            self._tell_guard(f"+{child.pid}")
            pidfd = os.pidfd_open(child.pid)
            self._pidfds[pidfd] = spec.key
            self._epoll.register(pidfd, select.EPOLLIN)
            log.info("started %s rank %d as pid %d", spec.role, spec.rank, child.pid)

    def pid(self, role: str, rank: int) -> int:
        return self._children[role, rank].pid

    async def launch(self, specs: Iterable[ProcessSpec]) -> None:
        """``start``, as every launcher has it."""
        self.start(specs)

    def survive(self, keys: Iterable[Key]) -> None:
        """From now on the unexpected end of these (alone) does not end the run: ``losses`` tells of it."""
        self._revivable = frozenset(keys)

    def losses(self) -> list[tuple[Key, Exception]]:
        """Whom of those the run survives it has lost since the last call, and what ``watch`` would have raised."""
        self._collect(0.0)
        found = [(number, key, code) for number, (key, code) in enumerate(self._deaths) if key in self._revivable]
        new = [(key, watching.death_of(self._run_dir, key, code)) for number, key, code in found if number not in self._told]
        self._told.update(number for number, _, _ in found)
        return new

    def new_deaths(self) -> list[tuple[Key, int]]:
        """Unexpected ends since the last call, with exit codes as ``exit_code``."""
        self._collect(0.0)
        found, self._reported = self._deaths[self._reported :], len(self._deaths)
        return found

    async def kill(self, key: Key) -> None:
        """End one process at once, as a death like any other: ``losses`` or ``watch`` tells of it. Nothing where it has ended already."""
        if key in self._pidfds.values():
            processes.send([self._children[key].pid], signal.SIGKILL)

    async def reach(self, key: Key) -> None:
        """This machine is there."""

    async def absent(self) -> list[watching.Absent]:
        """None: it is this machine."""
        return []

    async def close(self) -> None:
        """``stop`` in a thread: it waits for processes to end, and connections still have to be closed meanwhile."""
        await asyncio.to_thread(self.stop)

    def exit_code(self, role: str, rank: int) -> int | None:
        """As ``subprocess.Popen.returncode``: None while it lives, negative for a signal."""
        self._collect(0.0)
        return self._children[role, rank].returncode

    async def wait_ready(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        """Wait until all of ``keys`` have announced themselves, and return what they announced (see ``RunDir.announced``).

        Raises:
            WorkerDied, UserError: as ``watch``, for any process of the run.
            DeadlineExceeded: names who is missing, their logs, and the logs' last lines.
        """
        return await watching.wait_ready(self._run_dir, keys, self._startup_timeout_s, self._raise_death)

    async def watch(self) -> NoReturn:
        """Wait for the first process to end unexpectedly.

        Raises:
            WorkerDied: names role, rank, cause, log file and its last lines.
            UserError: the process ended because of a user's mistake and left word of it.
        """
        while True:
            self._raise_death()
            await asyncio.sleep(_POLL_S)

    async def supervise[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` while watching; the death of a process cancels it (see ``watching.supervise``).

        Raises:
            WorkerDied, UserError: as ``watch``; otherwise whatever ``work`` raises.
        """
        return await watching.supervise(work, self.watch(), _SETTLE_S)

    def stop(self) -> None:
        """End everything, descendants included. Idempotent. A second Ctrl-C meanwhile skips the waiting, not the killing."""
        if self._stopping:
            return
        self._stopping = True
        try:
            self._collect(0.0)
            processes.send([child.pid for child in self._children.values() if child.returncode is None], signal.SIGTERM)
            if stubborn := self._wait_exits(self._shutdown_timeout_s):
                names = ", ".join(f"{role} rank {rank}" for role, rank in stubborn)
                log.warning("killing what ignored SIGTERM for %g s: %s", self._shutdown_timeout_s, names)
        finally:
            living = {self._children[key].pid for key in self._pidfds.values()}
            if stuck := processes.kill_members(living, self._marker):
                log.error("these processes survive SIGKILL (waiting inside the kernel): %s", stuck)
            self._wait_exits(5.0)
            self._dismiss_guard()
            self._spawner.shutdown()
            self._epoll.close()
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._pidfds.clear()

    def _spawn(self, spec: ProcessSpec) -> subprocess.Popen[bytes]:
        cpus = ",".join(map(str, spec.cpus)) or "-"
        argv = [sys.executable, "-I", "-S", str(_HERE / "child.py"), str(os.getpid()), cpus, *spec.argv]
        env = {**os.environ, **spec.env, processes.MARKER: self._marker}
        with open(self._run_dir.log_path(*spec.key), "ab") as out:
            return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def _collect(self, timeout_s: float) -> None:
        """Note who has ended, in that order."""
        if self._epoll.closed:
            return
        for pidfd, _ in self._epoll.poll(timeout_s):
            key = self._pidfds.pop(pidfd, None)
            if key is None:
                continue  # `stop` runs in another thread than `watch`, and one of them was faster
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            child = self._children[key]
            # What it leaves behind goes now, while the unreaped child still keeps its number, and so its session, from being given away.
            processes.kill_members({child.pid}, timeout_s=1.0)
            self._tell_guard(f"-{child.pid}")
            code = child.wait()
            if not self._stopping:
                self._deaths.append((key, code))

    def _wait_exits(self, timeout_s: float) -> list[Key]:
        """Wait until all have ended; returns those that have not."""
        deadline = time.monotonic() + timeout_s
        while self._pidfds and (left := deadline - time.monotonic()) > 0:
            self._collect(min(left, 0.2))  # in slices, so that a Ctrl-C that another thread received is seen soon
        return sorted(self._pidfds.values())

    def _raise_death(self) -> None:
        self._collect(0.0)
        for number, (key, code) in enumerate(self._deaths):
            survived = key in self._revivable or number in self._told
            if not survived and not self._stopping:
                raise watching.death_of(self._run_dir, key, code)

    def _start_guard(self) -> None:
        argv = [sys.executable, "-I", "-S", str(_HERE / "guard.py"), self._marker, str(os.getpid())]
        with open(self._run_dir.log_path("guard", 0), "ab") as out:
            self._guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)

    def _tell_guard(self, line: str) -> None:
        assert self._guard is not None and self._guard.stdin is not None
        try:
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()
        except BrokenPipeError:  # killed from outside: PR_SET_PDEATHSIG still holds, descendants alone are no longer covered
            log.warning("the guard process is gone: after a kill -9 of this process, descendants of its children may stay behind")

    def _dismiss_guard(self) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        self._tell_guard("done")
        try:
            self._guard.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


def _check_kernel() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise UserError(f"the local launcher needs Linux 5.3 or later (pidfd_open: {error})") from error


def _check(spec: ProcessSpec) -> None:
    """Find out now what the new process could only report by dying."""
    who = f"{spec.role} rank {spec.rank}"
    if shutil.which(spec.argv[0], path={**os.environ, **spec.env}.get("PATH")) is None:
        raise UserError(
            f"{who}: there is no program {spec.argv[0]}; for an inference server, set rollout.python to its environment's interpreter"
        )
    allowed = os.sched_getaffinity(0)
    if outside := sorted(set(spec.cpus) - allowed):
        setting = "launch.train_cpus" if spec.role == "train" else "launch.rollout_cpus"
        raise UserError(f"{who}: {setting} names core {outside[0]}; this process may use {sorted(allowed)}")
