"""HuggingFace exports of a run: a model card in each, links to the latest and the best, and which are kept.

<run>/export/step-N, final    complete models
<run>/export/latest, best     links; best is by evaluation, of those that were evaluated at their step
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path

from areal_mega import __version__
from areal_mega.config.schema import Recipe

CARD, RECORD = "README.md", "areal_mega.json"
_NAME = re.compile(r"step-(\d+)")


def make_room(folder: Path) -> None:
    """Make the folder that holds exports; an earlier attempt at this run may have left one of this name, and half of what it removed."""
    folder.parent.mkdir(exist_ok=True)
    for left in folder.parent.glob(".*"):
        if left.is_dir() and not left.is_symlink() and left.suffix in (".removed", ".replaced"):
            shutil.rmtree(left)
    if folder.exists():
        _remove(folder, "replaced")


def describe(folder: Path, recipe: Recipe, *, step: int, version: int, evaluation: float | None, resolved: str) -> None:
    """Write the model card and the record that ``tidy`` reads into a finished export.

    Args:
        evaluation: mean reward on the evaluation data at this very step; None: not evaluated then.
        resolved: the whole recipe as YAML.
    """
    told = "not evaluated at this step" if evaluation is None else f"{evaluation:.4f} (mean reward on the evaluation data)"
    card = (
        f"---\nlibrary_name: transformers\nbase_model: {json.dumps(recipe.model.path)}\ntags: [reinforcement-learning, areal-mega]\n---\n\n"
        f"# {recipe.run.name}, step {step}\n\n"
        f"Trained by areal-mega {__version__} from `{recipe.model.path}` with `{recipe.algorithm.name}`.\n\n"
        f"| | |\n|---|---|\n| step | {step} of {recipe.run.steps} |\n| weight version | {version} |\n| evaluation | {told} |\n"
        f"| training | `{recipe.train.strategy}` |\n| rollout | `{recipe.rollout.strategy}` |\n\n## Recipe\n\n```yaml\n{resolved}```\n"
    )
    (folder / CARD).write_text(card, encoding="utf-8")
    (folder / RECORD).write_text(json.dumps({"step": step, "version": version, "evaluation": evaluation}) + "\n", encoding="utf-8")


def tidy(root: Path, keep: int | None, *, step: int) -> None:
    """Point ``latest`` and ``best`` at the right exports and remove scheduled ones beyond the newest ``keep``, the best never.

    Args:
        step: of the newest export. Those of later steps were left by an attempt that got further, and are replaced when their turn comes.
    """
    found = []
    for path in root.iterdir():
        if not path.is_symlink() and (path / RECORD).is_file():
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
            if record["step"] <= step:
                found.append((int(record["step"]), path, record["evaluation"]))
    found.sort(key=lambda entry: entry[0])
    evaluated = [(value, step, path) for step, path, value in found if value is not None]
    best = max(evaluated)[2] if evaluated else None
    _link(root / "latest", found[-1][1])
    if best is not None:
        _link(root / "best", best)
    else:
        (root / "best").unlink(missing_ok=True)
    scheduled = [path for _, path, _ in found if _NAME.fullmatch(path.name)]
    for path in scheduled[:-keep] if keep is not None else ():
        if path not in (best, found[-1][1]):
            _remove(path, "removed")


def _remove(folder: Path, suffix: str) -> None:
    """Renamed first: a removal that is interrupted leaves nothing that looks whole."""
    aside = folder.with_name(f".{folder.name}.{suffix}")
    folder.rename(aside)
    shutil.rmtree(aside)


def _link(link: Path, target: Path) -> None:
    """Replace in one step: whoever follows the link finds the old target or the new one."""
    aside = link.with_name(f".{link.name}.{secrets.token_hex(3)}")
    os.symlink(target.name, aside)
    aside.replace(link)
