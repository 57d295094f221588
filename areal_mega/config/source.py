"""Recipe files as trees that remember where each value was written. Reading, merging, overriding; no schema here.

YAML is read by the 1.2 core rules: ``off`` and ``yes`` are text, ``1e-6`` is a number, dates stay text. A key written twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from areal_mega.core.errors import UserError

EXTENDS = "extends"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: a line of a file, an override of the command line, or the schema's default."""

    kind: Literal["file", "override", "default"]
    file: str = ""
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "file":
                return f"{self.file}:{self.line}"
            case "override":
                return f"override {self.text}"
            case "default":
                return "default"


DEFAULT = Origin("default")


@dataclass(slots=True)
class Entry:
    """A value and its origin; the value of a mapping is a dict of entries."""

    value: Any
    origin: Origin

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        return self.value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
# YAML 1.1 reads 010 as eight; the core schema of 1.2 reads ten.
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 16) if node.value.startswith("0x") else int(node.value, 10)
)


def read_tree(path: Path, _children: tuple[Path, ...] = ()) -> Entry:
    """Read a recipe file with everything that it extends, nearest last.

    Raises:
        UserError: file missing, not YAML, a key written twice, a cycle of ``extends``.
    """
    resolved = path.resolve()
    if resolved in _children:
        chain = " -> ".join(_shown(p) for p in (*_children[_children.index(resolved) :], resolved))
        raise UserError(f"{_shown(path)}: recipes extend each other in a circle ({chain}); remove one extends")
    tree = _read_file(path)
    extends = tree.value.pop(EXTENDS, None)
    base = Entry({}, DEFAULT)
    for name in _parents(extends, path):
        parent = path.parent / name
        if not parent.is_file():
            raise UserError(
                f"{extends.origin}: extends '{name}', but there is no file {_shown(parent)} (paths are relative to this recipe)"
            )
        base = merge(base, read_tree(parent, (*_children, resolved)))
    return merge(base, tree)


def _parents(extends: Entry | None, path: Path) -> list[str]:
    if extends is None:
        return []
    names = extends.value if isinstance(extends.value, list) else [extends.value]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{extends.origin}: extends names a recipe file or a list of them, e.g. extends: base.yaml; got {extends.plain()!r}"
        )
    return names


def _shown(path: Path) -> str:
    """The path as a person would write it: relative to the current folder where it lies below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _read_file(path: Path) -> Entry:
    if path.is_dir():
        raise UserError(f"{_shown(path)} is a folder; name the recipe file in it")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no recipe {_shown(path)}; {_recipes_near(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read recipe {_shown(path)}: {error}") from None
    node = _compose(text, _shown(path))
    if node is None:
        raise UserError(f"{_shown(path)} is empty; a recipe needs at least run.name, run.steps and model.path")
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{_shown(path)}:{node.start_mark.line + 1}: a recipe is a mapping of sections (run:, model:, …)")
    return _entry(node, _Loader(""), lambda mark: Origin("file", file=_shown(path), line=mark.line + 1))


def _recipes_near(path: Path) -> str:
    names = sorted(str(p) for folder in (path.parent, Path("recipes")) if folder.is_dir() for p in folder.glob("*.yaml"))
    return f"there are: {', '.join(names[:8])}" if names else "give the path of a YAML file"


def _compose(text: str, shown: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None and not shown.startswith("override") else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{shown}{line}: not valid YAML: {problem}") from None


def _entry(node: yaml.Node, loader: _Loader, origin_at: Any) -> Entry:
    """A node as an entry. Mappings keep the line of each key; everything else is one value at its own line."""
    origin: Origin = origin_at(node.start_mark)
    if not (isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map"):
        try:
            return Entry(loader.construct_object(node, deep=True), origin)
        except (yaml.YAMLError, ValueError) as error:
            raise UserError(f"{origin}: {' '.join(str(getattr(error, 'problem', None) or error).split())}") from None
    if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
        loader.flatten_mapping(node)  # puts merged pairs first, own pairs after
    out: dict[str, Entry] = {}
    own_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise UserError(f"{origin_at(key_node.start_mark)}: keys are text; write '{key}' in quotes")
        at: Origin = origin_at(key_node.start_mark)
        if key in out and own_lines[key] >= node.start_mark.line:
            raise UserError(f"{at}: '{key}' is given twice; first at {out[key].origin}; remove one")
        own_lines[key] = key_node.start_mark.line
        out[key] = Entry(_entry(value_node, loader, origin_at).value, at)
    return Entry(out, origin)


def merge(base: Entry, over: Entry) -> Entry:
    """``over`` laid on ``base``: mappings merge key by key, anything else replaces. What a loader takes goes with the loader."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    if "loader" in over.value and "loader" in merged and over.value["loader"].value != merged["loader"].value:
        merged.pop("kwargs", None)
    for key, entry in over.value.items():
        merged[key] = merge(merged[key], entry) if key in merged else entry
    return Entry(merged, over.origin)


def apply_overrides(tree: Entry, overrides: Sequence[str]) -> Entry:
    """Assign ``section.key=value`` overrides in a tree; values are YAML, and a mapping replaces the whole mapping there.

    Raises:
        UserError: no ``=``, an empty key, a value that is not YAML, the same key twice.
    """
    seen: dict[str, str] = {}
    for text in overrides:
        dotted, equals, value = text.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise UserError(f"override '{text}' is not of the form section.key=value, e.g. train.batch_size=4")
        if keys[0] == EXTENDS:
            raise UserError(f"override '{text}': extends belongs in a recipe file; write a recipe that extends both")
        name = ".".join(keys)
        if name in seen:
            raise UserError(f"override '{text}': {name} is already overridden by '{seen[name]}'; keep one")
        seen[name] = text
        origin = Origin("override", text=text)
        node = _compose(value, f"override '{text}'")
        over = Entry(None, origin) if node is None else _entry(node, _Loader(""), lambda mark, origin=origin: origin)
        tree = _assign(tree, keys, over)
    return tree


def _assign(tree: Entry, keys: Sequence[str], value: Entry) -> Entry:
    """``tree`` with ``value`` in the place that ``keys`` name. A mapping replaces what stood there: it is what the user wrote."""
    if not keys:
        return value
    inner = tree.value if isinstance(tree.value, dict) else {}
    below = inner.get(keys[0], Entry({}, value.origin))
    return Entry({**inner, keys[0]: _assign(below, keys[1:], value)}, value.origin)
