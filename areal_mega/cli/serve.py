"""``areal-mega serve``: the embedded inference server."""

from __future__ import annotations

import typer


def serve(context: typer.Context) -> None:
    """Serve MODEL over SGLang's HTTP protocol."""
    from areal_mega.serving.app import serve as run_server

    raise typer.Exit(run_server(list(context.args)))
