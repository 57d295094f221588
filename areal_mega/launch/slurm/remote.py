"""The controller's side of a run whose processes live on many tasks: the same interface as the local launcher, over the tasks' agents.

A task that ends takes its processes along. Where the run survives the end of all of them, it is looked out for: when it, or another start
of it, answers, ``reach`` returns, and processes can be started on it. Otherwise its end is the attempt's;
where it was told of before, the work is asked to come to its end first (``leaving``).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, NoReturn

from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.launch import watching
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.rundir import Key, RunDir
from areal_mega.launch.slurm.agent import SAVE_S
from areal_mega.launch.slurm.gathering import Tasks
from areal_mega.launch.watching import Absent, MachineLost, death_of
from areal_mega.rpc.client import PeerUnreachable, RpcError

log = logging.getLogger(__name__)

_NOT_TAKEN = (PeerUnreachable, DeadlineExceeded, RpcError, MachineLost)
"""How the take-over of a task fails that has gone since it answered."""
_CALL_S = 30.0
_EVENTS_S = 5.0
_LOST_S = 20.0
"""An agent that cannot be reached for so long is lost, whatever Slurm says: its node may be dead before Slurm notices."""
_LOOK_S = 1.0
"""How often a task that is away is looked out for."""
_SETTLE_S = 10.0
"""How long to look for a death behind a failed call: the news comes from another machine."""


class RemoteLauncher:
    """The processes of one attempt, on the tasks of a submission. Used as ``LocalLauncher`` is.

    Args:
        startup_timeout_s: a task is taken over within so long.
        needed: the first so many tasks must be there at the beginning; none: all that are here.
    """

    def __init__(self, run_dir: RunDir, tasks: Tasks, *, startup_timeout_s: float, needed: int | None = None) -> None:
        self._run_dir, self._tasks, self._startup_timeout_s = run_dir, tasks, startup_timeout_s
        self._needed = tasks.plan.tasks if needed is None else needed
        self._revivable: frozenset[Key] = frozenset()
        self._losses: list[tuple[Key, Exception]] = []
        self._failure: asyncio.Future[NoReturn] | None = None
        self._here = {task: asyncio.Event() for task in range(tasks.plan.tasks)}
        """Set while a task belongs to this attempt."""
        self.leaving = asyncio.Event()
        self._leaving_why: RunFailed | None = None
        self._stack = AsyncExitStack()

    async def begin(self) -> None:
        """Take over the agents that are here for this attempt; what an earlier one left there is ended. Those that come later join.

        Raises:
            PeerUnreachable, DeadlineExceeded, RpcError: one that is needed could not be taken over. Another is looked out for.
        """
        self._failure = asyncio.get_running_loop().create_future()
        # Known of, even if nobody waits for it any more.
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())
        here = self._tasks.here
        results = await asyncio.gather(*(self._take_over(task) for task in here), return_exceptions=True)
        for task, error in zip(here, results, strict=True):
            if isinstance(error, _NOT_TAKEN) and task >= self._needed:
                log.warning("task %d was there, and could not be taken over: %s", task, error)
                await self._tasks.lose(task, ends=False)
            elif isinstance(error, BaseException):
                raise error
        followers = [asyncio.create_task(self._follow(task)) for task in self._here]
        for follower in followers:
            follower.add_done_callback(self._check_follower)
        self._stack.push_async_callback(_end_all, followers)

    async def _take_over(self, task: int) -> None:
        where = {"run_dir": str(self._run_dir.path), "attempt": self._run_dir.attempt}
        await self._tasks.agent(task).call("begin", **where, timeout_s=self._startup_timeout_s)
        self._here[task].set()

    async def launch(self, specs: Iterable[ProcessSpec]) -> None:
        """Start processes, each on its task."""
        by_task: dict[int, list[dict[str, Any]]] = {}
        for spec in specs:
            plain = asdict(spec) | {"argv": list(spec.argv), "env": dict(spec.env), "cpus": list(spec.cpus)}
            by_task.setdefault(self._tasks.plan.task_of[spec.key], []).append(plain)
        await asyncio.gather(
            *(self._tasks.agent(task).call("start", specs=batch, timeout_s=_CALL_S) for task, batch in sorted(by_task.items()))
        )

    async def ports(self, keys: Sequence[Key]) -> dict[Key, int]:
        """A free port for each of these processes, on its node."""
        tasks = {key: self._tasks.plan.task_of[key] for key in keys}
        found: dict[int, list[int]] = {}
        for task in sorted(set(tasks.values())):
            count = list(tasks.values()).count(task)
            found[task] = await self._tasks.agent(task).call("ports", count=count, timeout_s=_CALL_S)
        return {key: found[task].pop(0) for key, task in tasks.items()}

    def survive(self, keys: Iterable[Key]) -> None:
        """As ``LocalLauncher.survive``."""
        self._revivable = frozenset(keys)

    def losses(self) -> list[tuple[Key, Exception]]:
        """As ``LocalLauncher.losses``."""
        found, self._losses = self._losses, []
        return found

    async def kill(self, key: Key) -> None:
        """As ``LocalLauncher.kill``."""
        task = self._tasks.plan.task_of[key]
        if self._here[task].is_set():
            try:
                await self._tasks.agent(task).call("kill_process", role=key[0], rank=key[1], timeout_s=_CALL_S)
            except (PeerUnreachable, DeadlineExceeded) as error:
                log.warning("%s", error)  # if its agent is gone so is the process, and whoever follows the agent will tell

    async def reach(self, key: Key) -> None:
        """Wait until the task of a process is here, and belongs to this attempt."""
        await self._here[self._tasks.plan.task_of[key]].wait()

    async def absent(self) -> list[Absent]:
        """As ``Launcher.absent``, with Slurm's word on each."""
        states = await self._tasks.states()
        missing = [task for task, here in self._here.items() if not here.is_set()]
        over = {task for task in missing if (state := states.get(task)) is not None and state.ended}
        return [Absent(self._tasks.describe(task, states), task in over) for task in missing]

    async def wait_ready(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        """As ``LocalLauncher.wait_ready``."""
        return await watching.wait_ready(
            self._run_dir, keys, self._startup_timeout_s, self._raise_failure, lambda key: f" on task {self._tasks.plan.task_of[key]}"
        )

    async def supervise[T](self, work: Coroutine[Any, Any, T]) -> T:
        """As ``LocalLauncher.supervise``: run ``work``; the death of a process, or of a task, cancels it."""
        return await watching.supervise(self._to_the_end(work), self._watch(), _SETTLE_S)

    async def _to_the_end[T](self, work: Coroutine[Any, Any, T]) -> T:
        """``work``; where it was asked to end because a task leaves, that is told as the reason, and at once."""
        try:
            return await work
        finally:
            if self._leaving_why is not None:
                self._fail(self._leaving_why)

    async def _watch(self) -> NoReturn:
        assert self._failure is not None, "watch before begin"
        await asyncio.shield(self._failure)
        raise AssertionError("a failure is never a result")

    async def close(self) -> None:
        """End all processes of the attempt; the agents stay. An agent that is lost has no processes that matter."""
        await self._stack.aclose()
        calls = [self._tasks.agent(task).call("end", timeout_s=2 * _CALL_S) for task in self._tasks.here]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("while processes were ended: %s", result)

    async def _follow(self, task: int) -> None:
        """Follow a task through its absences, until the attempt fails."""
        assert self._failure is not None
        while not self._failure.done():
            if self._here[task].is_set():
                await self._listen(task)
            else:
                await self._look_out(task)

    async def _look_out(self, task: int) -> None:
        """Wait for a task that is away, and take it over."""
        while not await self._tasks.find(task):  # noqa: ASYNC110 - it says so in a file, on another machine
            await asyncio.sleep(_LOOK_S)
        try:
            await self._take_over(task)
        except _NOT_TAKEN as error:
            log.warning("task %d was there, and could not be taken over: %s", task, error)
            await asyncio.sleep(_LOOK_S)

    async def _listen(self, task: int) -> None:
        """Follow one agent's events until it is lost. Every call is the lease's renewal too."""
        seen, heard = 0, time.monotonic()
        client = self._tasks.agent(task)
        while True:
            try:
                events = await client.call("events", seen=seen, wait_s=_EVENTS_S, timeout_s=_EVENTS_S + _CALL_S)
                heard = time.monotonic()
            except (PeerUnreachable, DeadlineExceeded) as error:
                if time.monotonic() - heard > _LOST_S:
                    return await self._lost(task, str(error))
                await asyncio.sleep(1.0)
                continue
            except RpcError as error:  # somebody else listens there by now, or the agent itself is broken
                return await self._lost(task, str(error))
            seen += len(events)
            for event in events:
                self._on_event(event)
                if event["kind"] == "leaving" and not self._is_asked(task, event["why"]):
                    return await self._leaves(task, event["why"])

    def _on_event(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "died":
                key = (event["role"], event["rank"])
                death = death_of(self._run_dir, key, event["code"])
                if key in self._revivable:
                    self._losses.append((key, death))
                else:
                    self._fail(self._leaving_why or death)
            case "limit":
                log.info("%s", event["why"])
                signal.raise_signal(signal.SIGUSR1)  # as if this task's own limit were near: the run saves and ends

    def _is_asked(self, task: int, why: str) -> bool:
        """Ask the work to end before a task with train ranks does; False for another task. It is followed until the attempt is over."""
        if not any(role == "train" for role, _ in self._tasks.plan.keys(task)):
            return False
        if self._leaving_why is None:
            self._leaving_why = RunFailed(f"{why}: {self._tasks.plan.describe(task)}")
            self.leaving.set()
            late = asyncio.get_running_loop().call_later(SAVE_S, self._fail, self._leaving_why)
            self._stack.callback(late.cancel)
        return True

    async def _leaves(self, task: int, why: str) -> None:
        self._away(task, f"{why}: {self._tasks.plan.describe(task)}")
        await self._tasks.lose(task, ends=True)

    async def _lost(self, task: int, why: str) -> None:
        state = (await self._tasks.states()).get(task)
        self._away(task, f"task {task} ({self._tasks.plan.describe(task)}) is lost: {why}" + (f"; {state}" if state else ""))
        await self._tasks.lose(task, ends=False)

    def _away(self, task: int, why: str) -> None:
        """A task is gone with all that was on it: a loss where every process of it is one to survive, or the attempt's end."""
        keys = self._tasks.plan.keys(task)
        self._here[task].clear()
        if self._revivable.issuperset(keys):
            self._losses += [(key, MachineLost(why)) for key in keys]
        else:
            self._fail(RunFailed(why))

    def _check_follower(self, follower: asyncio.Task[None]) -> None:
        """What goes wrong in following a task ends the attempt: nobody would hear of that task any more."""
        if not follower.cancelled() and (error := follower.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else RunFailed(str(error)))

    def _fail(self, error: Exception) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_exception(error)

    def _raise_failure(self) -> None:
        if self._failure is not None and self._failure.done():
            raise self._failure.exception() or AssertionError("a failure is never a result")


async def _end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
