"""``areal-mega train``: a thin shell over ``areal_mega.Trainer``."""

from __future__ import annotations

from areal_mega.cli.recipe import OverridesArgument, RecipeArgument, load, naming_lines


def train(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train by a recipe, with settings overridden as KEY=VALUE."""
    resolved, _ = load(recipe, overrides)
    from areal_mega.controller.trainer import Trainer

    provenance = {path: str(origin) for path, origin in resolved.provenance.items()}
    with naming_lines(resolved), Trainer(resolved.recipe, provenance=provenance) as trainer:
        trainer.train()
