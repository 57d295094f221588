"""What an array task runs: its agent, and beside task 0 the controller."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import RunFailed, UserError
from areal_mega.launch.commands import python_path
from areal_mega.launch.slurm.agent import Agent, node_host
from areal_mega.launch.slurm.gathering import Tasks
from areal_mega.launch.slurm.jobs import Slurm
from areal_mega.launch.slurm.meeting import ArrayTask, Meeting, new_token
from areal_mega.launch.slurm.script import JOB_ENV, apart, plan_of

log = logging.getLogger(__name__)

_CHILD = Path(__file__).parents[1] / "child.py"
AGENT_END_S = 30.0


def run_agent(recipe: Recipe, task: ArrayTask) -> None:
    """Be the agent of this task until the run is over.

    Raises:
        UserError, RunFailed: see ``Agent.serve``.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    asyncio.run(Agent(recipe, task, node_host(os.environ), new_token()).serve())


@contextmanager
def agent_beside(argv: Sequence[str]) -> Iterator[None]:
    """Task 0 has two processes: the controller, which is this one, and the agent, which ends with it.

    Args:
        argv: arguments of ``areal-mega`` that run the agent.
    """
    command = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), "-", sys.executable, "-P", "-m", "areal_mega", *argv]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": python_path(os.environ)}) as agent:
        try:
            yield
        finally:
            for end in (agent.terminate, agent.kill):
                try:
                    agent.wait(timeout=AGENT_END_S)  # it was told to leave, unless the controller failed before it knew of it
                    break
                except subprocess.TimeoutExpired:
                    end()


def check_array(recipe: Recipe, env: Mapping[str, str], first_task: int) -> None:
    """The array that Slurm started must have the tasks that the recipe needs: settings given at submission may have changed them.

    One that joins another array's run may have fewer: it brings rollout tasks that are missing there.

    Raises:
        UserError: it has more or fewer.
    """
    plan = plan_of(recipe)
    last = plan.tasks if first_task or not apart(recipe) else plan.train_tasks
    needed, there = last - first_task, int(env.get("SLURM_ARRAY_TASK_COUNT", last - first_task))
    joins = env.get(JOB_ENV, "") not in ("", env.get("SLURM_ARRAY_JOB_ID"))
    if there > needed or (there < needed and not joins):
        raise UserError(
            f"the array has {there} task{'s' * (there > 1)}, but train.strategy {recipe.train.strategy} and rollout.strategy "
            f"{recipe.rollout.strategy} at launch.slurm.slots_per_task={recipe.launch.slurm.slots_per_task} make {needed}; "
            f"submit with --array=0-{needed - 1}"
        )


def requeue_all(tasks: Tasks) -> None:
    """Put every task of the run back into the queue; this one, task 0, last: it ends with that.

    Rollout tasks that were cancelled, or that Slurm does not take back, stay out of it: the run can do without them.

    Raises:
        RunFailed: Slurm refuses (``launch.slurm.requeue`` is false, say).
    """
    slurm = Slurm()
    states = asyncio.run(tasks.states(fresh=True))
    for number in sorted(range(tasks.plan.tasks), reverse=True):
        job, state = tasks.job(number), states.get(number)
        if job is None or (state is not None and (state.waits or state.state == "CANCELLED")):
            continue
        try:
            slurm.requeue(job)
        except RunFailed as error:
            if number < tasks.plan.train_tasks:
                raise
            log.warning("rollout task %d does not go back into the queue: %s", number, error)


def tasks_of(recipe: Recipe, task: ArrayTask) -> Tasks:
    """The tasks of the submission that ``task`` belongs to."""
    return Tasks(recipe, plan_of(recipe), Meeting(recipe, task.meeting))
