"""Cards, links and retention of exports."""

from __future__ import annotations

from pathlib import Path

from areal_mega.config.schema import Recipe
from areal_mega.controller.exports import describe, make_room, tidy

RECIPE = Recipe.model_validate({"run": {"name": "r", "steps": 9}, "model": {"path": "some/model"}})


def export(root: Path, name: str, step: int, evaluation: float | None, keep: int | None = None) -> None:
    make_room(root / name)
    (root / name).mkdir()
    describe(root / name, RECIPE, step=step, version=step, evaluation=evaluation, resolved="run: {name: r}\n")
    tidy(root, keep, step=step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.is_symlink())


def test_links_follow_and_only_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    root = tmp_path / "export"
    for step, evaluation in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.4)):
        export(root, f"step-{step}", step, evaluation, keep=2)
        assert (root / "latest").resolve().name == f"step-{step}"
    assert (root / "best").resolve().name == "step-2"
    assert names(root) == ["step-2", "step-4", "step-5"]
    export(root, "final", 9, 0.95, keep=2)
    assert ((root / "latest").resolve().name, (root / "best").resolve().name) == ("final", "final")
    assert names(root) == ["final", "step-4", "step-5"]


def test_everything_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        export(tmp_path / "export", f"step-{step}", step, None)
    assert names(tmp_path / "export") == ["step-1", "step-2", "step-3"]
    assert not (tmp_path / "export" / "best").exists()


def test_the_card_says_what_made_the_model(tmp_path: Path) -> None:
    export(tmp_path / "export", "step-3", 3, 0.25)
    card = (tmp_path / "export" / "step-3" / "README.md").read_text()
    for words in ('base_model: "some/model"', "| step | 3 of 9 |", "0.2500", "`grpo`", "run: {name: r}"):
        assert words in card


def test_an_attempt_made_again_replaces_its_own(tmp_path: Path) -> None:
    for step, evaluation in ((1, 0.5), (2, 0.9), (3, 0.25)):
        export(tmp_path / "export", f"step-{step}", step, evaluation)
    (tmp_path / "export" / ".step-0.removed").mkdir()
    export(tmp_path / "export", "step-1", 1, 0.5, keep=1)
    assert names(tmp_path / "export") == ["step-1", "step-2", "step-3"], "of later steps: not this attempt's to judge"
    assert (tmp_path / "export" / "latest").resolve().name == (tmp_path / "export" / "best").resolve().name == "step-1"
    export(tmp_path / "export", "step-1", 1, None)
    assert not (tmp_path / "export" / "best").is_symlink(), "none that this attempt evaluated"
