"""The engine's thread: commands between steps, exclusive work, and what its death does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from engines import Driven, sequence
from tiny_models import tiny_model

from areal_mega.serving.engine import Engine
from areal_mega.serving.sequence import Sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("thread"), "qwen3")


def wait_for(engine: Engine, s: Sequence) -> None:
    for _ in range(4000):
        if engine.call(lambda: s.finish is not None).result(30):
            return
        time.sleep(0.005)
    raise AssertionError(f"{s.rid} does not finish")


def test_commands_run_between_steps_and_errors_belong_to_the_caller(folder: Path) -> None:
    driven = Driven(folder)
    engine = driven.engine
    engine.start()
    try:
        assert engine.call(lambda: threading.current_thread().name).result(10) == "engine"
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda: 1 // 0).result(10)
        assert engine.call(lambda: 7).result(10) == 7
    finally:
        engine.stop()


def test_exclusive_work_waits_for_running_requests_and_holds_back_new_ones(folder: Path) -> None:
    driven = Driven(folder)
    engine = driven.engine
    first, second = (sequence(n, [5, 6], max_new_tokens=50) for n in ("first", "second"))
    seen = []
    engine.start()
    try:
        engine.call(lambda: driven.submit(first)).result(10)
        done = engine.call_exclusive(lambda: seen.append((first.finish is not None, len(second.output_ids))))
        engine.submit([second])
        done.result(30)
        assert seen == [(True, 0)]
        wait_for(engine, second)
    finally:
        engine.stop()
    assert len(first.output_ids) == len(second.output_ids) == 50


def test_while_paused_exclusive_work_runs_at_once(folder: Path) -> None:
    driven = Driven(folder)
    engine = driven.engine
    frozen = sequence("frozen", [5, 6], max_new_tokens=400)
    engine.start()
    try:
        engine.submit([frozen])
        engine.call(lambda: engine.pause("in_place")).result(10)
        assert engine.call_exclusive(lambda: frozen.finish).result(10) is None
        engine.call(engine.resume).result(10)
        wait_for(engine, frozen)
    finally:
        engine.stop()
    assert len(frozen.output_ids) == 400


def test_a_dead_engine_takes_no_more_work(folder: Path) -> None:
    driven = Driven(folder)
    engine = driven.engine
    died: list[BaseException] = []
    told = threading.Event()

    def on_failure(error: BaseException) -> None:
        died.append(error)
        told.set()

    def broken(*args: object) -> None:
        raise FloatingPointError("broken")

    engine._on_failure = on_failure
    engine.model.forward = broken  # type: ignore[method-assign, assignment]
    engine.start()
    engine.submit([sequence("s", [5], max_new_tokens=3)])
    assert told.wait(30)
    assert isinstance(died[0], FloatingPointError)
    with pytest.raises(RuntimeError, match="the engine has failed: broken"):
        engine.call(lambda: None)
