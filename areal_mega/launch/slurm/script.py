"""The sbatch script of a recipe: a text that a person can read, edit and submit by hand. Pure.

One array holds both roles. Where ``launch.slurm.rollout`` asks for other resources (another partition, say), the rollout tasks get an
array of their own, and a second script.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_mega.config.schema import Recipe, SlurmResources, SlurmSection
from areal_mega.core.errors import UserError
from areal_mega.launch.slurm.tasks import TaskPlan, plan_tasks
from areal_mega.parallel.strategy import parse

JOB_ENV = "AREAL_MEGA_JOB"
"""Environment variable: the name under which tasks of one submission find each other. Unset: the array's own job id."""


@dataclass(frozen=True, slots=True)
class Script:
    """One sbatch script.

    Args:
        role: ``""`` where the array holds both roles, else ``train`` or ``rollout``.
    """

    role: str
    text: str

    def file_name(self, stem: str) -> str:
        return f"{stem}.{self.role}.sbatch" if self.role else f"{stem}.sbatch"


def apart(recipe: Recipe) -> bool:
    """Whether the roles ask Slurm for different things, and so have an array each."""
    slurm = recipe.launch.slurm
    return _resources(slurm, slurm.train) != _resources(slurm, slurm.rollout)


def plan_of(recipe: Recipe) -> TaskPlan:
    """Tasks of a recipe.

    Raises:
        UserError: a replica does not fit into a task, or the recipe does not say how large a task is.
    """
    slurm = recipe.launch.slurm
    if slurm.slots_per_task is None:
        raise UserError("launch.slurm.slots_per_task is not set; set it to the GPUs (or CPU slots) of one array task, e.g. 8")
    return plan_tasks(
        parse(recipe.train.strategy),
        parse(recipe.rollout.strategy),
        slurm.slots_per_task,
        apart=apart(recipe),
    )


def render(recipe: Recipe, *, recipe_path: str, overrides: Sequence[str] = ()) -> tuple[Script, ...]:
    """The script, or the train and the rollout script, of a recipe.

    Args:
        recipe_path: as the script names it; relative paths hold from where the script is submitted.
        overrides: ``KEY=VALUE``, passed on.

    Raises:
        UserError: as ``plan_of``.
    """
    plan = plan_of(recipe)
    slurm = recipe.launch.slurm
    train, rollout = _resources(slurm, slurm.train), _resources(slurm, slurm.rollout)
    if train == rollout:
        return (_script("", recipe, train, plan, range(plan.tasks), recipe_path, overrides),)
    return (
        _script("train", recipe, train, plan, range(plan.train_tasks), recipe_path, overrides),
        _script("rollout", recipe, rollout, plan, range(plan.train_tasks, plan.tasks), recipe_path, overrides),
    )


def _script(
    role: str, recipe: Recipe, resources: Mapping[str, str], plan: TaskPlan, tasks: range, path: str, overrides: Sequence[str]
) -> Script:
    slurm = recipe.launch.slurm
    name = f"{recipe.run.name}-{role}" if role else recipe.run.name
    lines = ["#!/bin/bash", f"# Run {recipe.run.name}: array task = role. Made by `areal-mega slurm render {path}`."]
    if role == "rollout":
        lines.append(f"# Submit the train script first, then this one with {JOB_ENV}=<its job id>; `areal-mega launch` does both.")
    lines += [f"#   {task - tasks.start}: {plan.describe(task)}" for task in tasks]
    options = {
        "job-name": name,
        "array": f"0-{len(tasks) - 1}",
        "nodes": 1,
        "ntasks": 1,
        **resources,
        "output": slurm.output,
        # A requeued task would otherwise truncate what it wrote before.
        "open-mode": "append",
    }
    lines += [f"#SBATCH --{option}={value}" for option, value in options.items()]
    lines.append("#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue")
    # The program takes the place of the batch shell, except where a job step runs it.
    batch = "" if slurm.container == "pyxis" else "B:"
    lines.append(f"#SBATCH --signal={batch}USR1@{slurm.signal_s}")
    if slurm.mail_type:
        lines.append(f"#SBATCH --mail-type={slurm.mail_type}")
    if slurm.mail_user:
        lines.append(f"#SBATCH --mail-user={slurm.mail_user}")
    lines += [f"#SBATCH {extra}" for extra in slurm.extra]
    early = "trap '' USR1  # whoever is told of the time limit before the program listens does not die of it"
    lines += ["", "set -euo pipefail", early, *slurm.setup, "", f"exec {_command(slurm, tasks.start, path, overrides)}", ""]
    return Script(role, "\n".join(lines))


def _command(slurm: SlurmSection, first: int, path: str, overrides: Sequence[str]) -> str:
    words = ["areal-mega", "slurm", "task", *([f"--first-task={first}"] if first else []), path, *overrides]
    # What follows the script's name on sbatch's command line: more settings.
    inner = shlex.join(words) + ' "$@"'
    extra = shlex.join(slurm.container_args)
    match slurm.container:
        case "none":
            return inner
        case "apptainer":
            return " ".join(filter(None, ["apptainer exec --nv", extra, shlex.quote(slurm.image or ""), inner]))
        case _:
            return " ".join(filter(None, [f"srun --container-image={shlex.quote(slurm.image or '')}", extra, inner]))


def _resources(common: SlurmResources, role: SlurmResources) -> dict[str, str]:
    """What tasks of a role ask for: the common settings, and the role's own over them."""
    return _asked(common) | _asked(role)


def _asked(wanted: SlurmResources) -> dict[str, str]:
    options = {
        "partition": wanted.partition,
        "account": wanted.account,
        "qos": wanted.qos,
        "time": wanted.time,
        "constraint": wanted.constraint,
        "gres": wanted.gres,
        "reservation": wanted.reservation,
        "cpus-per-task": wanted.cpus_per_task,
        "mem": wanted.mem,
        "exclude": wanted.exclude,
    }
    return {name: str(value) for name, value in options.items() if value is not None}
