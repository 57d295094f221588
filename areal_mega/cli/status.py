"""``areal-mega status`` and ``areal-mega stop``: a run seen from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/quickstart.", show_default=False)]


def status(run: RunArgument) -> None:
    """Show what a run is doing."""
    from areal_mega.launch.state import look

    state = look(run)
    where = f"pid {state.pid} on {state.host}" if state.pid is not None else "not started"
    typer.echo(f"{state.path}: {'running' if state.alive else 'not running'} ({where})")
    for task in state.tasks:
        typer.echo(f"  {task}" + (f" on {task.nodes}" if task.nodes else ""))
    for rank, why in sorted(state.absent.items()):
        typer.echo(f"  replica {rank} is away: {why}")
    if state.last is not None and state.age_s is not None:
        typer.echo(f"  last step: {state.last['step']}, {state.age_s:.0f} s ago; logs: {state.path / 'logs'}")


def stop(
    run: RunArgument,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for it to end.", min=1)] = 120.0,
) -> None:
    """End a run in order, wherever it runs."""
    from areal_mega.launch.state import stop as stop_run

    typer.echo(stop_run(run, timeout))
