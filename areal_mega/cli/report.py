"""``areal-mega report``: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)]) -> None:
    """Write RUN/report.html and print its path.

    One page with plots: reward, evaluation, staleness, time split, mismatch.
    """
    from areal_mega.observe.report import write_report

    typer.echo(str(write_report(run)))
