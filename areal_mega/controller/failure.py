"""The page that a failed run leaves in its directory: what died first, its last lines, and the command that goes on."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from areal_mega.config.schema import Recipe
from areal_mega.controller.recover import points, recover_folder

PAGE = "failure.md"


def describe_failure(recipe: Recipe, run_dir: Path, error: Exception, earlier: Sequence[str], *, on_slurm: bool) -> Path:
    """Write the page; returns its path.

    Args:
        error: what ended the run.
        earlier: first lines of what ended the attempts before.
    """
    found = points(recover_folder(recipe, run_dir))
    saved = str(run_dir / "recipe.yaml")
    begin = ["launch", saved, "--on", "slurm"] if on_slurm else ["train", saved]
    words = ["areal-mega", *begin, "run.resume=true", "run.overwrite=false"]
    if found:
        state = f"Everything up to step {found[-1].step} of {recipe.run.steps} is saved in {found[-1].path}. To go on from there:"
    else:
        state = "There is no recover checkpoint (`checkpoint.recover_every_steps`). To begin again from the start:"
    first, _, rest = str(error).partition("\n")
    lines = [
        f"# {recipe.run.name} failed",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, {type(error).__name__}:",
        "",
        "```",
        first or type(error).__name__,
        *rest.splitlines(),
        "```",
        "",
        "## Go on",
        "",
        state,
        "",
        "```bash",
        f"cd {shlex.quote(os.getcwd())}",
        shlex.join(words),
        "```",
        "",
        "## Where to look",
        "",
        f"- what the controller saw, with tracebacks: `{run_dir / 'logs' / 'controller-0.log'}`",
        f"- every process: `{run_dir / 'logs'}`",
        *(f"- attempt {number} had ended with: {what}" for number, what in enumerate(earlier, 1)),
    ]
    page = run_dir / PAGE
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page
