"""The schema's refusals, each as one line that says what, where, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from areal_mega.config.provenance import find_origin, schema_leaves, section_of
from areal_mega.config.schema import Recipe, Section
from areal_mega.config.source import DEFAULT, Entry


def explain(error: ValidationError, tree: Entry, shown: str) -> str:
    """One line for the first thing wrong; ``shown`` names the recipe where the fault has no line of its own."""
    problems = error.errors(include_url=False, include_context=True)
    # A misspelt required key is reported as missing and as unknown: the second says more.
    problems.sort(key=lambda p: p["type"] != "extra_forbidden")
    line = _explain_one(problems[0], tree, shown)
    more = len(problems) - 1
    return line + (f" (and {more} more {'problem' if more == 1 else 'problems'})" if more else "")


def _explain_one(problem: Any, tree: Entry, shown: str) -> str:
    keys = [str(key) for key in problem["loc"]]
    dotted, kind, value = ".".join(keys), problem["type"], problem["input"]
    if kind == "missing":
        info = _schema_at(keys[:-1]).model_fields[keys[-1]]
        return f"{shown}: {dotted} is missing ({info.description}); add it, or override it with {dotted}=…"
    origin = _nearest(tree, keys)
    if kind == "extra_forbidden":
        return f"{origin}: unknown key '{dotted}'; {_suggest(keys)}"
    if kind == "model_type":
        known = ", ".join(_schema_at(keys).model_fields)
        return f"{origin}: {dotted} is a section with the keys {known}; got {_yaml(value)}"
    if kind == "literal_error":
        expected = str(problem["ctx"]["expected"])
        close = difflib.get_close_matches(str(value), [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{origin}: {dotted} is {_yaml(value)}, but must be {expected}{hint}"
    message = str(problem["msg"]).replace("Input should be ", "must be ").replace("a valid integer", "an integer").replace("a valid ", "a ")
    if kind == "string_type" and keys[-1] in _schema_at(keys[:-1]).model_fields and isinstance(value, int | float):
        return f"{origin}: {dotted} is {_yaml(value)}, but {message}; write it in quotes: {keys[-1]}: '{_yaml(value)}'"
    return f"{origin}: {dotted} is {_yaml(value)}, but {message}{_meaning(keys)}"


def _yaml(value: Any) -> str:
    """A value as it stands in a recipe."""
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case _:
            return repr(value)


def _meaning(keys: Sequence[str]) -> str:
    """Help and unit of the field, so that the line also says what belongs there."""
    fields = [key for key in keys if not key.isdigit()]
    info = _schema_at(fields[:-1]).model_fields.get(fields[-1])
    if info is None or not isinstance(info.json_schema_extra, dict):
        return ""
    unit = info.json_schema_extra.get("unit")
    return f" ({info.description}" + (f"; in {unit})" if unit else ")")


def _schema_at(keys: Sequence[str]) -> type[Section]:
    schema: type[Section] = Recipe
    for key in keys:
        inner = section_of(schema.model_fields[key].annotation) if key in schema.model_fields else None
        if inner is None:
            break
        schema = inner
    return schema


def _nearest(tree: Entry, keys: Sequence[str]) -> str:
    """Origin of the path, or of the closest thing above it that was written somewhere."""
    for end in range(len(keys), 0, -1):
        origin = find_origin(tree, ".".join(keys[:end]))
        if origin != DEFAULT:
            return str(origin)
    return str(tree.origin)


def _suggest(keys: Sequence[str]) -> str:
    """Did you mean: a like-named neighbour, then the same or a like name in another section, then what there is here."""
    *above, wrong = keys
    schema = _schema_at(above)
    prefix = "".join(f"{key}." for key in above)
    close = difflib.get_close_matches(wrong, schema.model_fields, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{prefix}{close[0]}'?"
    everything = list(schema_leaves())
    same = [path for path in everything if path.rsplit(".", 1)[-1] == wrong]
    near = same or difflib.get_close_matches(".".join(keys), everything, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"{prefix.rstrip('.') or 'a recipe'} has the keys {', '.join(schema.model_fields)}"
