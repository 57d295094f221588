"""``areal-mega train``: a thin shell over ``areal_mega.Trainer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from areal_mega.cli.recipe import OverridesArgument, RecipeArgument, load, naming_lines

if TYPE_CHECKING:
    from areal_mega.config.loader import Resolved
    from areal_mega.launch.machines import Machines


def train(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train by a recipe, with settings overridden as KEY=VALUE."""
    resolved, _ = load(recipe, overrides)
    run(resolved)


def run(resolved: Resolved, machines: Machines | None = None) -> None:
    """Train to the end, here or on the given machines, and say what came of it."""
    from areal_mega.controller.trainer import Trainer

    provenance = {path: str(origin) for path, origin in resolved.provenance.items()}
    with naming_lines(resolved), Trainer(resolved.recipe, provenance=provenance, machines=machines) as trainer:
        result = trainer.train()
    if result.last_eval is not None:
        before = "" if result.first_eval is None else f"{result.first_eval:.3f} before, "
        typer.echo(f"evaluation: {before}{result.last_eval:.3f} after {result.steps} steps")
    if result.export is not None:
        typer.echo(f"model: {result.export}")
    if result.report is not None:
        typer.echo(f"report: {result.report}")
