"""The tasks of one submission as the controller sees them: who is here, what Slurm says of the others, and when to begin.

Time in the queue is not start-up time: ``gather`` waits for the tasks with a deadline of its own, and what starts afterwards has
``launch.startup_timeout_s`` as it has on one machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError
from areal_mega.launch.slurm.jobs import Slurm, TaskState
from areal_mega.launch.slurm.meeting import Meeting, Presence
from areal_mega.launch.slurm.tasks import TaskPlan
from areal_mega.launch.watching import MachineLost
from areal_mega.rpc.client import PeerUnreachable, RpcClient, RpcError

log = logging.getLogger(__name__)

_POLL_S = 0.2
_CALL_S = 30.0
_SAY_S = 60.0
"""How often a wait says what it waits for."""
_MOMENT_S = 10.0
"""A run that could begin waits so long for the tasks that it can do without: each that joins later costs a weight sync of its own."""
_STARTING_S = 60.0
"""And so long for those that Slurm says are running already."""


class Tasks:
    """The tasks of one submission, as the controller sees them: who is here, and what Slurm says of the others."""

    def __init__(self, recipe: Recipe, plan: TaskPlan, meeting: Meeting) -> None:
        self.plan = plan
        self._recipe, self._meeting = recipe, meeting
        self._slurm = Slurm()
        self._agents: dict[int, tuple[Presence, RpcClient]] = {}
        self._ended: set[str] = set()
        """Incarnations that have said that they end: they may still answer, for a moment."""

    @property
    def here(self) -> list[int]:
        """Numbers of the tasks that have been met, and not been lost since."""
        return sorted(self._agents)

    def presence(self, task: int) -> Presence:
        """What a task said of itself.

        Raises:
            MachineLost: it is not here.
        """
        return self._met(task)[0]

    def job(self, task: int) -> str | None:
        """A task's own Slurm job, also after it has left; None where it never came."""
        presence = self._meeting.present().get(task)
        return None if presence is None else presence.job

    def agent(self, task: int) -> RpcClient:
        """Calls the agent of a task.

        Raises:
            MachineLost: it is not here.
        """
        return self._met(task)[1]

    def _met(self, task: int) -> tuple[Presence, RpcClient]:
        if task not in self._agents:
            raise MachineLost(f"task {task} ({self.plan.describe(task)}) is not there any more")
        return self._agents[task]

    async def gather(self, needed: Iterable[int], one_of: Iterable[int], say: Callable[[str], None]) -> None:
        """Wait until all ``needed`` tasks are here and answer, and one of the others; and a moment longer for more of those.

        Args:
            say: called with a line for the user, now and then.

        Raises:
            DeadlineExceeded: ``launch.slurm.queue_timeout_s`` passed; names who is missing and their state in the queue.
            RunFailed: a task without which nothing goes is over and will not start again.
        """
        musts, others, timeout_s = sorted(needed), sorted(one_of), self._recipe.launch.slurm.queue_timeout_s
        start = said = time.monotonic()
        enough: float | None = None
        while missing := [task for task in [*musts, *others] if not await self.find(task)]:
            states, now = await self.states(), time.monotonic()
            if not set(missing) & set(musts) and len(missing) < len(others):
                enough = now if enough is None else enough
                if not _worth_waiting([states.get(task) for task in missing], now - enough):
                    for task in missing:
                        say(f"beginning without {self.describe(task, states)}; it joins when it is there")
                    return
            over = [task for task in missing if (state := states.get(task)) is not None and state.ended]
            if over and (set(over) & set(musts) or over == others):
                raise RunFailed(f"task {over[0]} ({self.plan.describe(over[0])}) is over before it joined: {states[over[0]]}")
            what = "; ".join(self.describe(task, states) for task in missing[:4]) + ("; ..." if len(missing) > 4 else "")
            if now - start > timeout_s:
                raise DeadlineExceeded(
                    f"tasks missing after launch.slurm.queue_timeout_s={timeout_s:g} s: {what}; see {self._meeting.path}"
                )
            if now - said > _SAY_S:
                said = now
                say(f"waiting for {len(missing)} of {len(musts) + len(others)} tasks: {what}")
            await asyncio.sleep(_POLL_S)

    async def states(self, *, fresh: bool = False) -> dict[int, TaskState]:
        """Slurm's word on the tasks, by number; none while it does not answer.

        A task is known by its place in the first array (or the second, counted on), or by what it said itself: it may have been submitted
        again.
        """
        told = {presence.job: task for task, presence in self._meeting.present().items()}
        first = {job: self.plan.train_tasks * place for place, job in enumerate(self._meeting.recorded_jobs())}
        for name, task in told.items():
            job, _, index = name.partition("_")
            first.setdefault(job, task - int(index))
        try:
            found = await asyncio.to_thread(self._slurm.tasks, tuple(first), fresh=fresh)
        except (RunFailed, UserError) as error:
            log.warning("%s", error)  # a slurmctld that is away for a while, or a node without squeue, is no reason to end
            return {}
        states = {first[state.job] + state.index: state for state in found}
        return states | {told[name]: state for state in found if (name := f"{state.job}_{state.index}") in told}

    async def lose(self, task: int, *, ends: bool) -> None:
        """A task is not here any more.

        Args:
            ends: it said so: another start of it, or none, will be here again. Otherwise it may be, as it was.
        """
        presence, client = self._agents.pop(task)
        if ends:
            self._ended.add(presence.incarnation)
        await client.close()

    async def cancel_waiting(self) -> None:
        """Take those tasks out of the queue that have not started: the run is over without them."""
        waiting = [f"{state.job}_{state.index}" for state in (await self.states(fresh=True)).values() if state.waits]
        try:
            if waiting:
                await asyncio.to_thread(self._slurm.cancel, waiting)
        except (RunFailed, UserError) as error:
            log.warning("%s; still in the queue: %s", error, ", ".join(waiting))  # they will find the run over, and end

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

    async def find(self, task: int) -> bool:
        """Whether a task's newest incarnation answers; one that was here and does not is not here any more."""
        presence = self._meeting.present().get(task)
        if presence is None or presence.incarnation in self._ended:
            return False
        known = self._agents.get(task)
        client = known[1] if known is not None and known[0] == presence else None
        fresh = client is None
        client = client or RpcClient(presence.address, presence.token, peer=f"agent of task {task}")
        try:
            answer = await client.call("hello", timeout_s=_CALL_S)
        except (PeerUnreachable, DeadlineExceeded, RpcError):
            answer = {}  # an earlier start of the task left this file; somebody else may listen there by now
        here = answer.get("incarnation") == presence.incarnation
        if fresh and here:
            if known is not None:
                await known[1].close()
            self._agents[task] = presence, client
        elif fresh:
            await client.close()
        if known is not None and not here:
            await self._forget(task, known)
        return here

    async def _forget(self, task: int, known: tuple[Presence, RpcClient]) -> None:
        if self._agents.get(task) is known:  # else it was lost meanwhile
            del self._agents[task]
            await known[1].close()

    def describe(self, task: int, states: Mapping[int, TaskState]) -> str:
        return f"task {task} ({self.plan.describe(task)}): {states.get(task, 'not seen in the queue')}"


def _worth_waiting(states: Sequence[TaskState | None], waited_s: float) -> bool:
    """Whether tasks that the run can do without are about to come."""
    return waited_s < _MOMENT_S or (waited_s < _STARTING_S and any(state is not None and state.running for state in states))
