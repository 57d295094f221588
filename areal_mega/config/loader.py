"""Load a recipe: files with ``extends``, then overrides, then the schema, then the checks that span several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal_mega.config.checks import check_recipe
from areal_mega.config.explain import explain
from areal_mega.config.provenance import provenance
from areal_mega.config.schema import Recipe
from areal_mega.config.source import Origin, apply_overrides, read_tree
from areal_mega.core.errors import UserError


@dataclass(frozen=True)
class Resolved:
    """A recipe and where each of its leaves (dotted path) came from."""

    recipe: Recipe
    provenance: Mapping[str, Origin]


def load_with_provenance(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read ``path``, lay ``section.key=value`` overrides on it, and check the whole.

    Raises:
        UserError: one line with file and line of what is wrong.
    """
    tree = apply_overrides(read_tree(Path(path)), overrides)
    try:
        # Strict: a number in quotes is text and `true` is no integer, so that a slip is seen instead of converted.
        recipe = Recipe.model_validate(tree.plain(), strict=True)
    except ValidationError as error:
        raise UserError(explain(error, tree, str(path))) from None
    origins = provenance(recipe, tree)
    check_recipe(recipe, origins)
    return Resolved(recipe, origins)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """As ``load_with_provenance``, for those who only want the recipe."""
    return load_with_provenance(path, overrides).recipe


def resolved_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe as plain data, defaults included. Loading it again gives an equal recipe."""
    return recipe.model_dump(mode="json")
