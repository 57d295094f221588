"""The controller's side of a run whose processes live on many tasks: the same interface as the local launcher, over the tasks' agents.

Time in the queue is not start-up time: ``gather`` waits for the tasks with a deadline of its own, and what starts afterwards has
``launch.startup_timeout_s`` as it has on one machine.
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

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError
from areal_mega.launch import watching
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.rundir import Key, RunDir
from areal_mega.launch.slurm.jobs import Slurm, TaskState
from areal_mega.launch.slurm.meeting import Meeting, Presence
from areal_mega.launch.slurm.tasks import TaskPlan
from areal_mega.launch.watching import death_of
from areal_mega.rpc.client import PeerUnreachable, RpcClient, RpcError

log = logging.getLogger(__name__)

_POLL_S = 0.2
_CALL_S = 30.0
_EVENTS_S = 5.0
_LOST_S = 20.0
"""An agent that cannot be reached for so long is lost, whatever Slurm says: its node may be dead before Slurm notices."""
_SETTLE_S = 10.0
"""How long to look for a death behind a failed call: the news comes from another machine."""
_SAY_S = 60.0
"""How often a wait says what it waits for."""


class Tasks:
    """The tasks of one submission, as the controller sees them: who is here, and what Slurm says of the others."""

    def __init__(self, recipe: Recipe, plan: TaskPlan, meeting: Meeting) -> None:
        self.plan = plan
        self._recipe, self._meeting = recipe, meeting
        self._slurm = Slurm()
        self._agents: dict[int, tuple[Presence, RpcClient]] = {}

    def presence(self, task: int) -> Presence:
        return self._agents[task][0]

    def job(self, task: int) -> str:
        """A task's own Slurm job, also after it has left."""
        return self._meeting.present()[task].job

    def agent(self, task: int) -> RpcClient:
        return self._agents[task][1]

    async def gather(self, tasks: Iterable[int], say: Any) -> None:
        """Wait until all these tasks are here and answer.

        Args:
            say: called with a line for the user, now and then.

        Raises:
            DeadlineExceeded: ``launch.slurm.queue_timeout_s`` passed; names who is missing and their state in the queue.
            RunFailed: a missing task is over and will not start again.
        """
        wanted, timeout_s = sorted(tasks), self._recipe.launch.slurm.queue_timeout_s
        start = said = time.monotonic()
        while missing := [task for task in wanted if not await self._is_here(task)]:
            states = await self.states()
            for task in missing:
                if (state := states.get(task)) is not None and state.ended:
                    raise RunFailed(f"task {task} ({self.plan.describe(task)}) is over before it joined: {state}")
            now = time.monotonic()
            what = "; ".join(self._missing(task, states) for task in missing[:4]) + ("; ..." if len(missing) > 4 else "")
            if now - start > timeout_s:
                raise DeadlineExceeded(
                    f"tasks missing after launch.slurm.queue_timeout_s={timeout_s:g} s: {what}; see {self._meeting.path}"
                )
            if now - said > _SAY_S:
                said = now
                say(f"waiting for {len(missing)} of {len(wanted)} tasks: {what}")
            await asyncio.sleep(_POLL_S)

    async def states(self) -> dict[int, TaskState]:
        """Slurm's word on the tasks of the first array (and of the second, counted on), by number; none while it does not answer."""
        jobs = self._meeting.jobs()
        try:
            found = await asyncio.to_thread(self._slurm.tasks, jobs)
        except (RunFailed, UserError) as error:
            log.warning("%s", error)  # a slurmctld that is away for a while, or a node without squeue, is no reason to end
            return {}
        first = {job: self.plan.train_tasks * place for place, job in enumerate(jobs)}
        return {first[state.job] + state.index: state for state in found if state.job in first}

    async def leave(self, why: str) -> None:
        """The run is over: every task ends. ``why`` is empty where all went well, and the tasks fail otherwise."""
        results = await asyncio.gather(
            *(client.call("leave", why=why, timeout_s=_CALL_S) for _, client in self._agents.values()), return_exceptions=True
        )
        for (presence, client), result in zip(self._agents.values(), results, strict=True):
            if isinstance(result, BaseException):
                log.warning("task %d was not told to leave: %s", presence.task, result)
            await client.close()
        self._agents.clear()

    async def _is_here(self, task: int) -> bool:
        """Whether a task's newest incarnation answers."""
        presence = self._meeting.present().get(task)
        if presence is None:
            return False
        known = self._agents.get(task)
        if known is None or known[0] != presence:
            if known is not None:
                await known[1].close()
            client = RpcClient(presence.address, presence.token, peer=f"agent of task {task}")
            self._agents[task] = presence, client
        try:
            answer = await self._agents[task][1].call("hello", timeout_s=_CALL_S)
        except (PeerUnreachable, DeadlineExceeded):
            return False  # an earlier start of the task left this file
        return bool(answer["incarnation"] == presence.incarnation)

    def _missing(self, task: int, states: dict[int, TaskState]) -> str:
        return f"task {task} ({self.plan.describe(task)}): {states.get(task, 'not seen in the queue')}"


class RemoteLauncher:
    """The processes of one attempt, on the tasks of a submission. Used as ``LocalLauncher`` is."""

    def __init__(self, run_dir: RunDir, tasks: Tasks, *, startup_timeout_s: float) -> None:
        self._run_dir, self._tasks, self._startup_timeout_s = run_dir, tasks, startup_timeout_s
        self._revivable: frozenset[Key] = frozenset()
        self._losses: list[tuple[Key, Exception]] = []
        self._failure: asyncio.Future[NoReturn] | None = None
        self._stack = AsyncExitStack()

    async def begin(self) -> None:
        """Take over the agents for this attempt; what an earlier one left there is ended."""
        self._failure = asyncio.get_running_loop().create_future()
        # Known of, even if nobody waits for it any more.
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())
        await asyncio.gather(
            *(
                self._tasks.agent(task).call(
                    "begin", run_dir=str(self._run_dir.path), attempt=self._run_dir.attempt, timeout_s=self._startup_timeout_s
                )
                for task in range(self._tasks.plan.tasks)
            )
        )
        listeners = [asyncio.create_task(self._listen(task)) for task in range(self._tasks.plan.tasks)]
        self._stack.push_async_callback(_end_all, listeners)

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
        await self._tasks.agent(self._tasks.plan.task_of[key]).call("kill_process", role=key[0], rank=key[1], timeout_s=_CALL_S)

    async def wait_ready(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        """As ``LocalLauncher.wait_ready``."""
        return await watching.wait_ready(
            self._run_dir, keys, self._startup_timeout_s, self._raise_failure, lambda key: f" on task {self._tasks.plan.task_of[key]}"
        )

    async def supervise[T](self, work: Coroutine[Any, Any, T]) -> T:
        """As ``LocalLauncher.supervise``: run ``work``; the death of a process, or of a task, cancels it."""
        return await watching.supervise(work, self._watch(), _SETTLE_S)

    async def _watch(self) -> NoReturn:
        assert self._failure is not None, "watch before begin"
        await asyncio.shield(self._failure)
        raise AssertionError("a failure is never a result")

    async def close(self) -> None:
        """End all processes of the attempt; the agents stay. An agent that is lost has no processes that matter."""
        await self._stack.aclose()
        for result in await asyncio.gather(
            *(self._tasks.agent(task).call("end", timeout_s=2 * _CALL_S) for task in range(self._tasks.plan.tasks)), return_exceptions=True
        ):
            if isinstance(result, BaseException):
                log.warning("while processes were ended: %s", result)

    async def _listen(self, task: int) -> None:
        """Follow one agent's events. Every call is the lease's renewal too."""
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
                self._on_event(task, event)

    def _on_event(self, task: int, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "died":
                key = (event["role"], event["rank"])
                death = death_of(self._run_dir, key, event["code"])
                if key in self._revivable:
                    self._losses.append((key, death))
                else:
                    self._fail(death)
            case "leaving":
                self._fail(RunFailed(f"{event['why']}: {self._tasks.plan.describe(task)}"))
            case "limit":
                log.info("%s", event["why"])
                signal.raise_signal(signal.SIGUSR1)  # as if this task's own limit were near: the run saves and ends

    async def _lost(self, task: int, why: str) -> None:
        state = (await self._tasks.states()).get(task)
        self._fail(RunFailed(f"task {task} ({self._tasks.plan.describe(task)}) is lost: {why}" + (f"; {state}" if state else "")))

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
