"""``areal-mega config show``: every setting, its unit, and where its value came from."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_mega.cli.recipe import OverridesArgument, RecipeArgument, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_mega.config.loader import Resolved


def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: {setting: {value, unit, from, help}}.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also say what each setting is.")] = False,
) -> None:
    """Print every setting of a recipe with its unit and where its value came from."""
    from areal_mega.algorithms.registry import describe

    resolved, algorithm = load(recipe, overrides)
    if as_json:
        typer.echo(json.dumps({"settings": _settings(resolved), "algorithm": describe(algorithm)}, indent=2, ensure_ascii=False))
    else:
        _print_tables(resolved, describe(algorithm), explain)


def _settings(resolved: Resolved) -> dict[str, dict[str, Any]]:
    from areal_mega.config.provenance import leaves

    return {
        leaf.path: {"value": leaf.value, "unit": leaf.unit, "from": str(resolved.provenance[leaf.path]), "help": leaf.help}
        for leaf in leaves(resolved.recipe)
    }


def _print_tables(resolved: Resolved, algorithm: Mapping[str, str], explain: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Into a pipe or a file nothing is folded: a line per setting, for grep.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("setting", "value", "unit", "from", "what it is")[: 5 if explain else 4]:
        table.add_column(column, overflow="fold", no_wrap=not sys.stdout.isatty())
    section = ""
    for path, setting in _settings(resolved).items():
        if section and path.split(".")[0] != section:
            table.add_section()
        section = path.split(".")[0]
        changed = setting["from"] != "default"
        value = json.dumps(setting["value"], ensure_ascii=False) if setting["value"] is not None else "none"
        cells = (path, value, setting["unit"], setting["from"], setting["help"])[: 5 if explain else 4]
        table.add_row(*map(Text, cells), style="bold" if changed else "dim")
    console.print(table)
    console.print(Text(f"algorithm {algorithm['name']}, every piece resolved"))
    pieces = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, choice in algorithm.items():
        if name != "name":
            pieces.add_row(Text(name), Text(choice))
    console.print(pieces)
