"""Every leaf of a recipe, with its unit, its help, and where its value came from."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_mega.config.schema import Recipe, Section
from areal_mega.config.source import DEFAULT, Entry, Origin


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting: dotted path, value, unit (empty: none), help."""

    path: str
    value: Any
    unit: str
    help: str


def section_of(annotation: Any) -> type[Section] | None:
    """The section class of a field's annotation, through ``| None``; None for a leaf."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((found for arg in typing.get_args(annotation) if (found := section_of(arg))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def leaves(section: Section, prefix: str = "") -> Iterator[Leaf]:
    """All leaves in the schema's order. An optional section that is absent is a leaf of value None."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            extra = info.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            yield Leaf(f"{prefix}{name}", value, unit, info.description or "")


def schema_leaves(schema: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted paths of everything that a recipe may set, optional sections included."""
    for name, info in schema.model_fields.items():
        inner = section_of(info.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from schema_leaves(inner, f"{prefix}{name}.")


def find_origin(tree: Entry, dotted: str) -> Origin:
    """Origin of a path of the tree: of the value itself, or of the override of the whole that holds it; default where unset.

    For a mapping (``kwargs``) it is the last layer that touched it.
    """
    entry = tree
    for key in dotted.split("."):
        if not isinstance(entry.value, dict) or key not in entry.value:
            return DEFAULT
        entry = entry.value[key]
    return entry.origin


def provenance(recipe: Recipe, tree: Entry) -> Mapping[str, Origin]:
    """Where each leaf of the recipe came from."""
    return {leaf.path: find_origin(tree, leaf.path) for leaf in leaves(recipe)}
