"""The ``areal-mega`` program: its verbs, its exit codes, and how failures look.

0: done. 1: the run failed (a process died, a deadline passed). 2: the user's mistake, said in one line. 130: interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from areal_mega import __version__
from areal_mega.cli import config, convert, doctor, launch, report, serve, simulate, slurm, status, train
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError

app = typer.Typer(
    name="areal-mega",
    help="Reinforcement learning for large MoE language models: Megatron-Core training, SGLang rollouts, weights over one communicator.",
    no_args_is_help=True,
    # Typer's rich help imports a Markdown parser and costs more than everything else together: help must feel instant.
    rich_markup_mode=None,
    # Failures are shown by `main`; anything else is a fault of ours and keeps its plain traceback.
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at recipes.", no_args_is_help=True, rich_markup_mode=None)
app.command("train")(train.train)
config_app.command("show")(config.show)
app.add_typer(config_app, name="config")
app.add_typer(convert.app, name="convert")
app.command("doctor")(doctor.doctor)
# Its options are the server's own, so `--help` goes there too.
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)(serve.serve)
app.command("report")(report.report)
app.command("simulate")(simulate.simulate)
app.command("launch")(launch.launch)
app.command("status")(status.status)
app.command("stop")(status.stop)
app.add_typer(slurm.app, name="slurm")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"areal-mega {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run the program and exit with its code."""
    # As `python -m` does: workflows, rewards and loaders of the folder that it is started from are importable, here and in workers.
    sys.path.insert(0, "")
    try:
        app(prog_name="areal-mega")
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except (RunFailed, DeadlineExceeded) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
