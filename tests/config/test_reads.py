"""Every setting is read by someone: a leaf that nothing reads is an option accepted and not used.

How it is proven: the syntax trees of the package outside ``config/`` are searched for attribute accesses ``owner.leaf`` whose owner is
known to be that leaf's section. An expression is known to be a section when it is

- a name or an attribute called ``recipe``, or annotated with a schema class in its module (parameters, variables, dataclass fields);
- a section field of a known section (``recipe.train.optimizer``);
- a name or attribute assigned from one of the above in the same module, through tuples, ``or``, conditional expressions and loops
  over literal tuples.

Types are tracked per module, not per function, which is generous where one module gives a name to two sections; both are then tried.
Dumps of a whole recipe (``model_dump``, ``leaves``) prove nothing and do not count. The optional sections themselves (``data.valid``)
are covered too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_mega.config import schema as schema_module
from areal_mega.config.provenance import section_of
from areal_mega.config.schema import Recipe, Section

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "areal_mega"
CLASSES = {
    name: value
    for name, value in vars(schema_module).items()
    if isinstance(value, type) and issubclass(value, Section) and value is not Section
}

Types = dict[str, set[type[Section]]]


class Reads:
    """What one module reads: pairs of section class and field."""

    def __init__(self, tree: ast.Module) -> None:
        self.types: Types = {"recipe": {Recipe}}
        self.found: set[tuple[type[Section], str]] = set()
        nodes = list(ast.walk(tree))
        for node in nodes:
            self._annotated(node)
        # Assignments may stand before what they depend on is known: repeat until nothing new is learned.
        known = -1
        while known != (known := sum(map(len, self.types.values()))):
            for node in nodes:
                self._assigned(node)
        for node in nodes:
            if isinstance(node, ast.Attribute):
                for owner in self.sections(node.value):
                    if node.attr in owner.model_fields:
                        # What reads a section reads those that extend it.
                        self.found.update((section, node.attr) for section in CLASSES.values() if issubclass(section, owner))

    def _learn(self, target: ast.expr, classes: set[type[Section]]) -> None:
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else None
        if name is not None and classes:
            self.types.setdefault(name, set()).update(classes)

    def _annotated(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg) and node.annotation is not None:
            self._learn(ast.Name(node.arg), classes_in(node.annotation))
        elif isinstance(node, ast.AnnAssign):
            self._learn(node.target, classes_in(node.annotation))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            # A function or property that returns a section counts under its own name.
            self._learn(ast.Name(node.name), classes_in(node.returns))

    def _assigned(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            for item in node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else ():
                self._bind(node.target, item)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one_target, one_value in zip(target.elts, value.elts, strict=True):
                self._bind(one_target, one_value)
        else:
            self._learn(target, self.sections(value))

    def sections(self, node: ast.expr) -> set[type[Section]]:
        """The section classes that an expression may be."""
        match node:
            case ast.Name(id=name):
                return self.types.get(name, set())
            case ast.Attribute(value=owner, attr=name):
                inner = {c for o in self.sections(owner) if name in o.model_fields and (c := section_of(o.model_fields[name].annotation))}
                return inner or self.types.get(name, set())
            case ast.BoolOp(values=values):
                return set().union(*map(self.sections, values))
            case ast.IfExp(body=body, orelse=orelse):
                return self.sections(body) | self.sections(orelse)
            case ast.Call(func=function):
                return self.sections(function) if isinstance(function, ast.Name | ast.Attribute) else set()
            case _:
                return set()


def classes_in(annotation: ast.expr) -> set[type[Section]]:
    """Schema classes named in an annotation, also inside strings, unions and subscripts."""
    parts = list(ast.walk(annotation))
    names = {part.id for part in parts if isinstance(part, ast.Name)} | {part.attr for part in parts if isinstance(part, ast.Attribute)}
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            names.update(re.findall(r"\w+", part.value))
    return {CLASSES[name] for name in names if name in CLASSES}


def reads_in(source: str) -> set[tuple[type[Section], str]]:
    return Reads(ast.parse(source)).found


def unread(read: set[tuple[type[Section], str]], section: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if (section, name) not in read:
            yield f"{prefix}{name}" + (".*" if inner else "")
        elif inner is not None:
            yield from unread(read, inner, f"{prefix}{name}.")


def package_reads() -> set[tuple[type[Section], str]]:
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "config" not in path.parents]
    return set().union(*(reads_in(path.read_text()) for path in files))


def test_every_leaf_is_read_somewhere() -> None:
    assert list(unread(package_reads())) == []


@pytest.mark.parametrize(
    ("source", "leaf"),
    [
        ("def f(recipe): return recipe.train.batch_size", "train.batch_size"),
        ("def f(context): return context.recipe.sync.timeout_s", "sync.timeout_s"),
        (
            "class T:\n  def __init__(self, recipe):\n    self._train = recipe.train\n  def g(self): return self._train.batch_size",
            "train.batch_size",
        ),
        ("def f(section: TrainSection): return section.optimizer.lr", "train.optimizer.lr"),
        ("def f(o: 'OptimizerSection | None'): return o.lr", "train.optimizer.lr"),
        ("def f(recipe):\n  train, o = recipe.train, recipe.train.optimizer\n  return o.lr", "train.optimizer.lr"),
        ("def f(recipe): d = recipe.data.valid or recipe.data.train; return d.split", "data.train.split"),
        ("def f(r: Recipe): return r.eval.samples", "eval.samples"),
        ("def f(recipe):\n  for d in (recipe.data.train, recipe.data.valid): yield d.limit", "data.train.limit"),
        ("async def f(recipe):\n  if (o := recipe.train.optimizer): return o.eps", "train.optimizer.eps"),
    ],
)
def test_reads_are_seen(source: str, leaf: str) -> None:
    assert pair(leaf) in reads_in(source)


@pytest.mark.parametrize(
    ("source", "leaf"),
    [
        ("def f(recipe): return recipe.train", "train.batch_size"),
        ("def f(recipe): return recipe.warmup.batch_size", "train.batch_size"),
        ("def f(x): return x.batch_size", "train.batch_size"),
        ("def f(recipe): return recipe.model_dump()['train']['batch_size']", "train.batch_size"),
        ("# recipe.train.batch_size\n'recipe.train.batch_size'", "train.batch_size"),
        ("def f(train): return train.batch_size", "train.batch_size"),
    ],
)
def test_what_is_no_read_is_not_taken_for_one(source: str, leaf: str) -> None:
    assert pair(leaf) not in reads_in(source)


def pair(leaf: str) -> tuple[type[Section], str]:
    *above, name = leaf.split(".")
    section: type[Section] = Recipe
    for key in above:
        inner = section_of(section.model_fields[key].annotation)
        assert inner is not None
        section = inner
    return section, name
