"""Submitting a run to Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.launch.slurm.jobs import Slurm
from areal_mega.launch.slurm.meeting import Meeting
from areal_mega.launch.slurm.script import JOB_ENV, render


@dataclass(frozen=True, slots=True)
class Submitted:
    """Args:
    jobs: ids of the arrays, the train array first.
    """

    jobs: tuple[str, ...]
    run_dir: Path


def submit(recipe: Recipe, *, recipe_path: Path, overrides: Sequence[str]) -> Submitted:
    """Submit the script, or the train and the rollout script, of a recipe from the current folder.

    Raises:
        UserError: Slurm refuses, the recipe does not fit its tasks, or a run of this name is under way or has its directory already.
    """
    run_dir = Path(recipe.run.root).absolute() / recipe.run.name
    slurm = Slurm()
    for job in sorted(Meeting(recipe, "0").path.parent.glob("*/")):
        alive = [state for state in slurm.tasks([job.name]) if not state.ended] if job.name.isdigit() else []
        if alive:
            raise UserError(f"run {recipe.run.name} is under way ({alive[0]}); stop it with `areal-mega stop {run_dir}` or set run.name")
    scripts = render(recipe, recipe_path=str(recipe_path), overrides=overrides)
    jobs: list[str] = []
    try:
        for script in scripts:
            jobs.append(slurm.submit(script.text, env={JOB_ENV: jobs[0] if jobs else ""}))
        Meeting(recipe, jobs[0]).record_jobs(jobs)
    except (UserError, OSError) as error:
        if jobs:
            slurm.cancel(jobs)
        if isinstance(error, OSError):
            raise UserError(
                f"cannot write below {recipe.run.root}: {error.strerror}; set run.root to a folder on a shared file system"
            ) from error
        raise
    return Submitted(tuple(jobs), run_dir)
