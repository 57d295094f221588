"""``areal-mega launch``: submit a run, or run it here."""

from __future__ import annotations

from typing import Annotated

import typer

from areal_mega.cli.recipe import OverridesArgument, RecipeArgument, load, naming_lines
from areal_mega.core.errors import UserError


def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    on: Annotated[str, typer.Option(help="slurm: submit as array tasks; local: run on this machine, as `train` does.")] = "local",
) -> None:
    """Start a run: on this machine, or as Slurm array tasks."""
    resolved, _ = load(recipe, overrides)
    if on == "local":
        from areal_mega.cli.train import run

        run(resolved)
    elif on == "slurm":
        from areal_mega.launch.slurm.submit import submit

        with naming_lines(resolved):
            submitted = submit(resolved.recipe, recipe_path=recipe, overrides=overrides or ())
        typer.echo(f"submitted {resolved.recipe.run.name} as Slurm job {' and '.join(submitted.jobs)}; run directory: {submitted.run_dir}")
        typer.echo(f"areal-mega status {submitted.run_dir}")
    else:
        raise UserError(f"--on {on}: unknown; use local or slurm")
