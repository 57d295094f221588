"""One folder per run: who may have it, and how the processes of an attempt find each other in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.launch.rundir import RunDir, write_atomic

RecipeMaker = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeMaker:
    def make(**run: Any) -> Recipe:
        return Recipe.model_validate({"run": {"name": "one", "root": str(tmp_path / "runs"), "steps": 1} | run, "model": {"path": "m"}})

    return make


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_a_new_run_has_its_files(recipe: RecipeMaker, tmp_path: Path) -> None:
    run_dir = RunDir.create(recipe())
    assert run_dir.path == tmp_path / "runs" / "one"
    assert run_dir.read_recipe() == recipe()
    assert len(run_dir.token) == 64
    assert (run_dir.rendezvous / "token").stat().st_mode & 0o777 == 0o600
    assert RunDir.open(run_dir.path, run_dir.attempt).token == run_dir.token
    assert run_dir.log_path("train", 3) == run_dir.path / "logs" / "train-3.log"
    assert not list(run_dir.path.rglob(".*"))  # nothing written aside is left


def test_a_relative_root_becomes_absolute(recipe: RecipeMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDir.create(recipe(root="here")).path == tmp_path / "here" / "one"


def test_an_existing_run_is_refused_with_the_remedy(recipe: RecipeMaker) -> None:
    RunDir.create(recipe()).close()
    with pytest.raises(UserError, match=r"run directory .*one exists; choose another run.name, or set run.overwrite=true") as caught:
        RunDir.create(recipe())
    one_line(caught.value)


def test_overwrite_replaces_a_finished_run(recipe: RecipeMaker) -> None:
    first = RunDir.create(recipe())
    (first.path / "metrics.jsonl").write_text("old")
    first.close()
    second = RunDir.create(recipe(overwrite=True))
    assert not (second.path / "metrics.jsonl").exists()
    assert (second.attempt, second.token) != (first.attempt, first.token)
    assert os.listdir(second.path.parent) == ["one"]


def test_overwrite_spares_a_run_that_is_alive(recipe: RecipeMaker) -> None:
    first = RunDir.create(recipe())
    with pytest.raises(UserError, match=rf"in use by pid {os.getpid()} on \S+; stop that run or choose another") as caught:
        RunDir.create(recipe(overwrite=True))
    one_line(caught.value)
    assert first.recipe_path.exists()
    first.close()


def test_a_killed_controller_lets_go_of_its_run(recipe: RecipeMaker) -> None:
    hold = "import sys, time; from areal_mega.config.schema import Recipe; from areal_mega.launch.rundir import RunDir\n"
    hold += "run_dir = RunDir.create(Recipe.model_validate_json(sys.argv[1])); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", hold, recipe().model_dump_json()], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(UserError, match=f"in use by pid {child.pid}"):
            RunDir.create(recipe(overwrite=True))
    finally:
        child.kill()
        child.communicate()
    RunDir.create(recipe(overwrite=True))


def test_overwrite_never_removes_what_is_no_run_directory(recipe: RecipeMaker, tmp_path: Path) -> None:
    precious = tmp_path / "runs" / "one" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("x")
    with pytest.raises(UserError, match="is not a run directory") as caught:
        RunDir.create(recipe(overwrite=True))
    one_line(caught.value)
    assert precious.exists()


def test_of_two_runs_at_once_only_one_gets_the_name(recipe: RecipeMaker) -> None:
    made: list[RunDir] = []
    refused: list[UserError] = []
    gate = threading.Barrier(8)

    def create() -> None:
        gate.wait()
        try:
            made.append(RunDir.create(recipe()))
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(refused) == 7
    assert all("run.name" in one_line(error) for error in refused)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", ".hidden", "-x", "a b", "a\n"])
def test_a_name_is_one_plain_component(recipe: RecipeMaker, name: str) -> None:
    with pytest.raises(UserError, match="not a plain folder name") as caught:
        RunDir.create(recipe(name=name))
    one_line(caught.value)


@pytest.mark.parametrize("root", ["{tmp}/file", "{tmp}/file/below", "/proc/nobody-writes-here", "/dev/null"])
def test_an_unwritable_root_is_one_line(recipe: RecipeMaker, tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the run directory .*; set run.root to a writable folder") as caught:
        RunDir.create(recipe(root=root.format(tmp=tmp_path)))
    one_line(caught.value)


def test_announcements_are_found_with_their_info(recipe: RecipeMaker) -> None:
    run_dir = RunDir.create(recipe())
    other = RunDir.open(run_dir.path, run_dir.attempt)
    keys = [("train", 0), ("rollout", 0)]
    assert run_dir.announced(keys) == {}
    other.announce("train", 0, "127.0.0.1:1", master_port=7)
    found = run_dir.announced(keys)
    assert found.keys() == {("train", 0)}
    assert found["train", 0] | {"host": ""} == {
        "role": "train",
        "rank": 0,
        "address": "127.0.0.1:1",
        "pid": os.getpid(),
        "host": "",
        "master_port": 7,
    }
    other.announce("train", 0, "127.0.0.1:2")
    assert run_dir.announced(keys)["train", 0]["address"] == "127.0.0.1:2"


def test_a_wait_names_who_is_missing(recipe: RecipeMaker) -> None:
    run_dir = RunDir.create(recipe())
    run_dir.announce("train", 0, "127.0.0.1:1")
    assert run_dir.wait_announced([("train", 0)], 60).keys() == {("train", 0)}
    with pytest.raises(DeadlineExceeded, match=r"within 0.1 s: train rank 1, rollout rank 0; see .*logs"):
        run_dir.wait_announced([("train", 0), ("train", 1), ("rollout", 0)], 0.1)


def test_files_of_an_earlier_attempt_are_not_seen(recipe: RecipeMaker) -> None:
    run_dir = RunDir.create(recipe())
    earlier = run_dir.path / "rendezvous" / "20200101-000000-abcdef"
    earlier.mkdir()
    (earlier / "train-0.json").write_text(json.dumps({"role": "train", "rank": 0, "address": "stale:1"}))
    assert run_dir.announced([("train", 0)]) == {}


def test_a_late_process_of_a_replaced_run_cannot_speak_up_in_the_new_one(recipe: RecipeMaker) -> None:
    first = RunDir.create(recipe())
    late = RunDir.open(first.path, first.attempt)
    first.close()
    second = RunDir.create(recipe(overwrite=True))
    with pytest.raises(FileNotFoundError):
        late.announce("train", 0, "stale:1")
    assert second.announced([("train", 0)]) == {}
    with pytest.raises(UserError, match=rf"no attempt {first.attempt}.*was the run replaced"):
        RunDir.open(first.path, first.attempt)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    texts = ["a" * 200_000, "b" * 100_000]
    write_atomic(path, texts[0])
    stop = threading.Event()

    def write() -> None:
        for i in range(200):
            write_atomic(path, texts[i % 2])
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not stop.is_set():
        assert path.read_text() in texts
    thread.join()
    assert os.listdir(tmp_path) == ["f"]
