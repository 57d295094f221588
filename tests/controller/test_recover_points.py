"""Which recover checkpoints there are, which go, and how records are cut back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.controller.recover import outdated, points
from areal_mega.core.errors import UserError
from areal_mega.observe.jsonl import LineLog, cut_after


@given(st.lists(st.integers(1, 60), unique=True), st.integers(1, 5), st.integers(0, 7))
def test_the_newest_and_the_kept_for_good_stay(steps: list[int], keep: int, keep_every: int) -> None:
    gone = outdated(steps, keep, keep_every)
    left = sorted(set(steps) - set(gone))
    assert left[-keep:] == sorted(steps)[-keep:]
    assert all(step in left for step in steps if keep_every and step % keep_every == 0)
    assert all(step in sorted(steps)[-keep:] or (keep_every and step % keep_every == 0) for step in left)


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    for name, whole in (("step-2", True), ("step-10", True), ("step-11", False), (".step-12.partial", True), ("other", True)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "state.json").write_text(json.dumps({"step": 0}))
    assert [point.step for point in points(tmp_path)] == [2, 10]
    assert points(tmp_path / "absent") == []
    (tmp_path / "step-10" / "state.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        points(tmp_path)[-1].state()


def test_records_are_cut_back(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "x.jsonl")
    for step in range(4):
        log.write({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": ')  # torn by a kill
    assert cut_after(log.path, 2) == log.path.stat().st_size
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [0, 1, 2]
    assert cut_after(log.path, -1) == 0 and log.path.read_text() == ""
    assert cut_after(tmp_path / "absent", 0) == 0
