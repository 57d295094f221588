"""How a run ends, as its machines are told: whether it may go on with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_mega.config.schema import Recipe
from areal_mega.controller.recover import Stopped
from areal_mega.controller.trainer import Trainer
from areal_mega.core.errors import RunFailed
from areal_mega.launch.rundir import RunDir


@pytest.mark.parametrize(
    ("error", "told"),
    [(None, ("", False)), (RunFailed("it broke"), ("it broke", False)), (Stopped("as asked"), ("as asked", True))],
    ids=["done", "failed", "stopped"],
)
async def test_machines_are_told_whether_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, told: tuple[str, bool]
) -> None:
    recipe = Recipe.model_validate({"run": {"name": "one", "root": str(tmp_path), "steps": 1}, "model": {"path": "m"}})
    ends: list[tuple[str, bool]] = []

    async def close(why: str, *, goes_on: bool) -> None:
        ends.append((why, goes_on))

    async def run(*_: Any) -> dict[str, Any]:
        if error is not None:
            raise error
        return {}

    trainer = Trainer(recipe)
    trainer._run_dir = RunDir.create(recipe)
    monkeypatch.setattr(trainer, "_run", run)
    monkeypatch.setattr(trainer, "_stop_on_signal", lambda observer: None)
    monkeypatch.setattr(trainer, "_leave_page", lambda *_: None)
    cluster: Any = SimpleNamespace(recipe=recipe, machines=SimpleNamespace(close=close))
    observer: Any = None
    try:
        await trainer._attempts(cluster, [{"id": "a", "prompt": "1+1", "answer": "2"}], [], observer, None)
    except RunFailed as raised:
        assert raised is error
    finally:
        trainer._run_dir.close()
    assert ends == [told]
