"""kill -9 of every role at every named point of a step: the run goes on, and ends as one that nothing disturbed, to the last bit.

Every point is tried with one role here, in turn. With ``AREAL_MEGA_TEST_POINTS=all`` every role is killed at every one (ten minutes).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import REPO, Finished, Running, started, train

from areal_mega.core.points import ENV, POINTS

ROLES = ("controller", "train", "rollout", "server")
EVERY = os.environ.get("AREAL_MEGA_TEST_POINTS") == "all"
STEPS = len(POINTS) + 2 if EVERY else len(POINTS) // len(ROLES) + 4
"""An attempt repeats at most one step, and begins with a step of its own."""

CHANGES: dict[str, Any] = {
    "run": {"steps": STEPS, "overlap": False},
    "staleness": {"max_staleness": 0},
    "algorithm": {"correction": "none"},
    "checkpoint": {"recover_every_steps": 1, "keep": 1, "export_every_steps": 1, "keep_exports": 1},
    "eval": {"at_start": False, "every_steps": 1},
    "launch": {"restarts": 0, "server_restarts": 0, "startup_timeout_s": 120.0, "shutdown_timeout_s": 2.0},
}


def trained(run_dir: Path) -> list[tuple[int, list[list[Any]]]]:
    return [(entry["step"], sorted(entry["prompts"])) for entry in map(json.loads, (run_dir / "trained.jsonl").read_text().splitlines())]


def content(folder: Path) -> str:
    """Digest of all arrays of a recover checkpoint: weights and both moments, as stored."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "state.json"):
        digest.update(str(path.relative_to(folder)).encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = train(tmp_path_factory.mktemp("undisturbed"), CHANGES)
    assert finished.code == 0, finished.explain()
    return finished


def kill_at(running: Running, folder: Path, point: str, role: str) -> None:
    """Wait until the run is at ``point``, end a process of ``role``, and let whoever was held go on."""
    running.hold(point, folder, lambda: os.kill(running.pid if role == "controller" else running.worker(role), signal.SIGKILL))


def attempts(running: Running) -> int:
    return len(list((running.run_dir / "rendezvous").iterdir()))


def chosen(role: str) -> list[str]:
    """The points at which a role is killed; early in a step first, so that no two of them are of one moment."""
    names = list(POINTS)
    return names if EVERY else names[ROLES.index(role) :: len(ROLES)]


@pytest.mark.parametrize("role", ROLES[1:])
@pytest.mark.timeout(1200)
def test_a_process_that_dies_at_any_point(tmp_path: Path, undisturbed: Finished, role: str) -> None:
    names, folder = chosen(role), tmp_path / "points"
    folder.mkdir()
    with started(tmp_path, CHANGES, f"launch.restarts={len(names)}", **{ENV: str(folder)}) as running:
        for number, point in enumerate(names, 2):
            kill_at(running, folder, point, role)
            running.until(lambda number=number: attempts(running) == number, f"another attempt after {point}")  # type: ignore[misc]
        finished = running.finish()
    assert finished.out.count("starting again") == len(names), finished.explain()
    assert_same(finished, undisturbed)


@pytest.mark.timeout(1200)
def test_a_controller_that_dies_at_any_point(tmp_path: Path, undisturbed: Finished) -> None:
    folder = tmp_path / "points"
    folder.mkdir()
    for number, point in enumerate(chosen("controller")):
        with started(tmp_path, CHANGES, f"run.resume={'true' if number else 'false'}", **{ENV: str(folder)}) as running:
            kill_at(running, folder, point, "controller")
            assert running.finish().code == -signal.SIGKILL
            running.until_gone(30.0)
    assert_same(train(tmp_path, CHANGES, "run.resume=true"), undisturbed)


def assert_same(finished: Finished, undisturbed: Finished) -> None:
    assert finished.code == 0, finished.explain()
    assert [record["step"] for record in finished.steps] == list(range(STEPS + 1))
    assert trained(finished.run_dir) == trained(undisturbed.run_dir)
    for mine, theirs in zip(finished.metrics[1:], undisturbed.metrics[1:], strict=True):
        assert (mine["reward/mean"], mine["eval/accuracy"]) == (theirs["reward/mean"], theirs["eval/accuracy"])
    assert finished.synced[STEPS] == undisturbed.synced[STEPS], "the same weights to the last bit"
    mine, theirs = (list((run.run_dir / "recover").iterdir()) for run in (finished, undisturbed))
    assert [path.name for path in mine] == [path.name for path in theirs] == [f"step-{STEPS}"], "nothing half-made is left"
    assert content(mine[0]) == content(theirs[0]), "the same optimizer state to the last bit"
    assert sorted(path.name for path in (finished.run_dir / "export").iterdir()) == sorted(
        path.name for path in (undisturbed.run_dir / "export").iterdir()
    )


def test_every_point_is_in_the_code_once() -> None:
    found = [name for path in (REPO / "areal_mega").rglob("*.py") for name in _uses(path.read_text())]
    assert sorted(found) == sorted(POINTS)


def _uses(text: str) -> Iterator[str]:
    yield from re.findall(r"points\.reach(?:ed)?\(\"([a-z.]+)\"\)", text)
