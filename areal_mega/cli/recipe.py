"""The recipe arguments that several verbs take, and loading them with every check that needs no process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_mega.core.errors import UserError

if TYPE_CHECKING:
    from areal_mega.algorithms.registry import Algorithm
    from areal_mega.config.loader import Resolved


def _complete_override(incomplete: str) -> list[str]:
    from areal_mega.config.provenance import schema_leaves

    return [f"{path}=" for path in schema_leaves() if path.startswith(incomplete)]


RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings laid on the recipe, e.g. train.batch_size=4; values are YAML.",
        show_default=False,
        autocompletion=_complete_override,
    ),
]


def load(recipe: Path, overrides: Sequence[str] | None) -> tuple[Resolved, Algorithm]:
    """Load and check a recipe, the choice of algorithm included.

    Raises:
        UserError: one line, with file and line of the settings it names.
    """
    from areal_mega.algorithms.registry import algorithm_of
    from areal_mega.config.loader import load_with_provenance

    resolved = load_with_provenance(recipe, overrides or ())
    with naming_lines(resolved):
        algorithm = algorithm_of(resolved.recipe)
    return resolved, algorithm


@contextmanager
def naming_lines(resolved: Resolved) -> Iterator[None]:
    """Users' mistakes found later name settings by their dotted path: add the file and line of each."""
    from areal_mega.config.checks import cited

    try:
        yield
    except UserError as error:
        raise UserError(cited(str(error), resolved.provenance)) from error
