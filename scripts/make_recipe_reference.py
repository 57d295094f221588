#!/usr/bin/env python
"""Write docs/recipe.md, the reference of every recipe setting, from the schema alone.

python scripts/make_recipe_reference.py            write it
python scripts/make_recipe_reference.py --check    exit 1 if it is not what the schema says
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal_mega.config.provenance import section_of
from areal_mega.config.schema import Recipe, Section

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "recipe.md"
INTRO = """\
# Recipe reference

Every setting of a recipe. This page is generated from [`areal_mega/config/schema.py`](../areal_mega/config/schema.py) by
[`scripts/make_recipe_reference.py`](../scripts/make_recipe_reference.py). Do not edit it.

- A recipe is a YAML file of the sections below. Only `run.name`, `run.steps` and `model.path` must be given.
- `extends: base.yaml` lays this recipe on another one. A list of names is legal: the last one wins. Paths are relative to the recipe.
- `section.key=value` on the command line overrides a setting. The value is YAML.
- Mappings merge key by key from file to file, `kwargs` too; a dataset's other `loader` drops the `kwargs` of the old one. On the command
  line `kwargs={…}` replaces the whole and `kwargs.key=value` sets one key.
- YAML is read by the rules of version 1.2: `1e-6` is a number; `yes`, `no`, `on` and `off` are text.
- An unknown key, a wrong type, or two settings that contradict each other end the program with one line and exit code 2.
- `areal-mega config show RECIPE --explain` prints every setting with its value, its unit, where the value came from, and this help.
- The architecture of the model is not here: it comes from the model's own `config.json`.
"""
_BOUNDS = {
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Ge: ("ge", "≥"),
    annotated_types.Lt: ("lt", "<"),
    annotated_types.Le: ("le", "≤"),
}
_NAMES: dict[Any, str] = {str: "text", bool: "true or false", int: "integer", float: "number", Any: "anything"}


def reference() -> str:
    """The whole page."""
    return "\n".join([INTRO, *_sections(Recipe, "")])


def _sections(schema: type[Section], prefix: str) -> Iterator[str]:
    for name, info in schema.model_fields.items():
        inner = section_of(info.annotation)
        if inner is not None:
            yield from _section(inner, f"{prefix}{name}", info)


def _section(schema: type[Section], path: str, info: FieldInfo) -> Iterator[str]:
    yield f"{'#' * (path.count('.') + 2)} {path}\n"
    # Pydantic gives a class without a docstring that of its base.
    about = [text for text in ((schema.__dict__.get("__doc__") or "").strip(), info.description) if text]
    if about:
        yield " ".join(text if text.endswith(".") else f"{text}." for text in about) + "\n"
    plain = {name: field for name, field in schema.model_fields.items() if section_of(field.annotation) is None}
    if plain:
        yield "| setting | type | unit | default | what it is |\n|---|---|---|---|---|"
        for name, field in plain.items():
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            # Constraints of a field of one Annotated type end up in its metadata.
            kind = _constrained(_kind(field.annotation), field.metadata)
            yield f"| `{path}.{name}` | {_cell(kind)} | {unit} | {_default(field)} | {_cell(field.description or '')} |"
        yield ""
    yield from _sections(schema, f"{path}.")


def _kind(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _constrained(_kind(arguments[0]), arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join("none" if argument is type(None) else _kind(argument) for argument in arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}s" if arguments[0] is int else f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    return _NAMES[annotation]


def _constrained(kind: str, metadata: Iterable[Any]) -> str:
    """``kind`` with the bounds that pydantic keeps for it."""
    bounds: list[str] = []
    for item in metadata:
        # A Field inside Annotated holds its constraints in a list of its own.
        for part in getattr(item, "metadata", None) or [item]:
            bounds += [f"{sign} {getattr(part, name):g}" for kind_, (name, sign) in _BOUNDS.items() if isinstance(part, kind_)]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/recipe.md from the schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not what the schema says")
    check = parser.parse_args().check
    page = reference()
    if not check:
        PATH.write_text(page, encoding="utf-8")
    elif not PATH.exists() or PATH.read_text(encoding="utf-8") != page:
        sys.exit(f"{PATH.relative_to(ROOT)} is not what the schema says; run python scripts/make_recipe_reference.py")


if __name__ == "__main__":
    main()
