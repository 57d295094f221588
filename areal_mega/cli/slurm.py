"""``areal-mega slurm``: the script of a recipe, and what its array tasks run."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from areal_mega.cli.recipe import OverridesArgument, RecipeArgument, load, naming_lines

app = typer.Typer(help="Runs as Slurm arrays.", no_args_is_help=True, rich_markup_mode=None)


@app.command("render")
def render(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the script to; none: print it.")] = None,
) -> None:
    """Write the sbatch script of a recipe, to read, edit and submit by hand."""
    resolved, _ = load(recipe, overrides)
    from areal_mega.launch.slurm.script import render as render_scripts

    with naming_lines(resolved):
        scripts = render_scripts(resolved.recipe, recipe_path=str(recipe), overrides=overrides or ())
    for script in scripts:
        if out is None:
            typer.echo(script.text, nl=False)
            continue
        out.mkdir(parents=True, exist_ok=True)
        path = out / script.file_name(recipe.stem)
        path.write_text(script.text)
        typer.echo(str(path))


@app.command("task", hidden=True)
def task(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    first_task: Annotated[int, typer.Option(help="Number in the run of this array's task 0.")] = 0,
    agent: Annotated[bool, typer.Option("--agent", help="Only the agent, also for task 0.")] = False,
) -> None:
    """Be one task of a submitted run: the array index decides the role."""
    # Told of a time limit while it starts, it is told once it listens (`Trainer`, `Agent`).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resolved, _ = load(recipe, overrides)
    from areal_mega.launch.slurm.meeting import ArrayTask
    from areal_mega.launch.slurm.task import agent_beside, check_array, requeue_all, run_agent, tasks_of

    who = ArrayTask.current(os.environ, first_task)
    with naming_lines(resolved):
        check_array(resolved.recipe, os.environ, first_task)
    if agent or who.task:
        with naming_lines(resolved):
            run_agent(resolved.recipe, who)
        return
    from areal_mega.cli.train import run
    from areal_mega.controller.recover import Stopped
    from areal_mega.launch.slurm.machines import SlurmTasks

    if int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        # Slurm started this task again: what it had begun goes on.
        section = resolved.recipe.run.model_copy(update={"resume": True, "overwrite": False})
        resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"run": section}))
    with naming_lines(resolved):
        tasks = tasks_of(resolved.recipe, who)
    try:
        with agent_beside(["slurm", "task", str(recipe), *(overrides or ()), "--agent"]):
            run(resolved, SlurmTasks(resolved.recipe, tasks))
    except Stopped as stopped:
        if not resolved.recipe.launch.slurm.requeue:
            raise
        typer.echo(f"{stopped}; back into the queue")
        requeue_all(tasks)
