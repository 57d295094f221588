"""Conversions that are killed at any moment or told to stop: nothing half-written has the output's name, and the same command goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_models import model_bytes, write_model
from ranks import RankFailed, run_ranks

from areal_mega.checkpoint import convert, journal
from areal_mega.checkpoint.arrays import ArrayStore
from areal_mega.checkpoint.convert import from_hf, to_hf
from areal_mega.checkpoint.location import Location
from areal_mega.checkpoint.model import Checkpoint
from areal_mega.checkpoint.verify import verify
from areal_mega.core.errors import UserError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def checkpoint(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ck") / "ck"
    from_hf(llama, place, strategy="megatron:d1t2")
    return place


STEPS: list[tuple[Any, str]] = [
    (Location, "write"),
    (Location, "remove"),
    (Location, "sync"),
    (ArrayStore, "create"),
    (ArrayStore, "write"),
    (os, "pwrite"),
    (os, "fsync"),
    (os, "rename"),
]
"""Whatever changes the disk. ``Path.rename`` calls ``os.rename``."""


def convert_until(rank: int, world_size: int, *, direction: str, source: str, out: str, last: int) -> list[str]:
    """A process of its own that kills itself before step number ``last`` (0: never); the steps that there are."""
    seen: list[str] = []
    lock = threading.Lock()

    def counted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            with lock:
                seen.append(name)
                if len(seen) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return step

    for owner, name in STEPS:
        setattr(owner, name, counted(getattr(owner, name), name))
    journal.FLUSH_BYTES = 40_000
    run(direction, source, out)
    return seen


def run(direction: str, source: str | Path, out: str | Path, meter: convert.Meter | None = None) -> None:
    if direction == "from-hf":
        from_hf(source, out, strategy="megatron:d1t2", workers=1, meter=meter)
    else:
        to_hf(source, out, shard_bytes=60_000, workers=1, meter=meter)


class Done(convert.Silent):
    done = 0

    def begin(self, total: int, done: int) -> None:
        self.done = done


@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_a_kill_before_any_step_loses_nothing(llama: Path, checkpoint: Path, tmp_path: Path, direction: str) -> None:
    source = llama if direction == "from-hf" else checkpoint
    steps = run_ranks(1, convert_until, distributed=False, direction=direction, source=source, out=tmp_path / "whole", last=0)[0]
    named = len(steps) - steps[::-1].index("rename")
    moments = sorted({*range(1, 4), *range(4, named, max(1, named // 4)), *range(named - 3, len(steps) + 1)})
    gone_on = 0
    for moment in moments:
        out = tmp_path / str(moment)
        with pytest.raises(RankFailed, match="ended with -9"):
            run_ranks(1, convert_until, distributed=False, direction=direction, source=source, out=out, last=moment)
        assert out.exists() == (moment > named), f"killed before step {moment}, {steps[moment - 1]}"
        meter = Done()
        if not out.exists():
            assert not (out.with_name(f".{out.name}.partial") / "config.json").exists() or steps[moment - 1] != "pwrite"
            run(direction, source, out, meter)
        gone_on += meter.done > 0
        assert content(out) == content(tmp_path / "whole")
    assert gone_on >= 3, "work that was stored is not done again"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["whole", *map(str, moments)])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_only_the_last_moment_of_a_commit_is_without_a_journal(llama: Path, tmp_path: Path) -> None:
    """All that takes long (storing for good) comes before: a kill while it lasts costs nothing."""
    steps = run_ranks(1, convert_until, distributed=False, direction="from-hf", source=llama, out=tmp_path / "ck", last=0)[0]
    assert steps[-4:] == ["sync", "remove", "rename", "fsync"]


def test_another_source_at_the_same_place_is_not_mixed_in(llama: Path, tmp_path: Path) -> None:
    """The same shapes and the same manifest, other weights: of a later training step, say."""
    place, out = tmp_path / "ck", tmp_path / "hf"
    later = write_model(tmp_path / "later", "llama", seed=1)
    from_hf(llama, place, strategy="megatron:d1t2")
    before = (place / "checkpoint.json").read_bytes()
    with pytest.raises(RankFailed, match="ended with -9"):
        run_ranks(1, convert_until, distributed=False, direction="to-hf", source=place, out=out, last=20)
    shutil.rmtree(place)
    from_hf(later, place, strategy="megatron:d1t2")
    assert (place / "checkpoint.json").read_bytes() == before
    with pytest.raises(UserError, match="was begun from other input or with other options; remove it to begin anew"):
        to_hf(place, out, shard_bytes=60_000)
    shutil.rmtree(tmp_path / ".hf.partial")
    to_hf(place, out, shard_bytes=60_000)
    assert model_bytes(out) == model_bytes(later)


# --- told to stop


def stopped(rank: int, world_size: int, *, arguments: list[str], number: int) -> list[Any]:
    """The program, sent a signal in the middle of its work; its exit code and what it said."""
    from areal_mega.cli.main import main

    count = 0

    def advance(self: convert.Silent, nbytes: int) -> None:
        nonlocal count
        count += 1
        if count == 5:
            os.kill(os.getpid(), number)

    convert.Silent.advance = advance  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return said(main, arguments)


def said(main: Callable[[], None], arguments: list[str]) -> list[Any]:
    read, write = os.pipe()
    with os.fdopen(write, "w") as errors, contextlib.redirect_stderr(errors):
        sys.argv = ["areal-mega", *arguments]
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
    with os.fdopen(read) as told:
        return [code, told.read()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_a_signal_is_one_line_and_the_same_command_goes_on(
    llama: Path, checkpoint: Path, tmp_path: Path, direction: str, number: signal.Signals
) -> None:
    source, out = (llama, tmp_path / "out") if direction == "from-hf" else (checkpoint, tmp_path / "out")
    arguments = ["convert", direction, str(source), str(out), *(["--strategy", "megatron:d1t2"] if direction == "from-hf" else [])]
    code, line = run_ranks(1, stopped, distributed=False, arguments=arguments, number=int(number))[0]
    assert (code, line) == (
        2,
        f"error: interrupted by {number.name}; {out} is not complete, and the same command goes on where it stopped\n",
    )
    assert [p.name for p in tmp_path.iterdir()] == [".out.partial"]
    for use in (lambda: verify(out, llama), lambda: from_hf(out, tmp_path / "other", strategy="megatron:d1")):
        with pytest.raises(UserError, match="was never completed; run what writes it again"):
            use()
    meter = Done()
    if direction == "from-hf":
        from_hf(source, out, strategy="megatron:d1t2", meter=meter)
        Checkpoint(out)
    else:
        to_hf(source, out, meter=meter)
        assert model_bytes(out) == model_bytes(llama)
    assert meter.done > 0, "what was done before the signal is in the journal"


def test_an_interrupted_comparison_says_neither(llama: Path, checkpoint: Path) -> None:
    arguments = ["convert", "verify", str(llama), str(checkpoint)]
    code, line = run_ranks(1, stopped, distributed=False, arguments=arguments, number=int(signal.SIGTERM))[0]
    assert (code, line) == (2, "error: interrupted by SIGTERM; nothing was compared to the end\n")


# --- the progress bar


def on_a_terminal(rank: int, world_size: int, *, arguments: list[str]) -> str:
    """What the program draws on a terminal."""
    from areal_mega.cli.main import main

    leader, follower = os.openpty()
    drawn = bytearray()

    def drain() -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            while part := os.read(leader, 4096):
                drawn.extend(part)

    reader = threading.Thread(target=drain)
    reader.start()
    os.environ["TERM"] = "xterm"
    with os.fdopen(follower, "w") as terminal, contextlib.redirect_stderr(terminal):
        sys.argv = ["areal-mega", *arguments]
        with contextlib.suppress(SystemExit):
            main()
    reader.join(30)
    return drawn.decode()


def test_progress_is_drawn_on_a_terminal(llama: Path, tmp_path: Path) -> None:
    arguments = ["convert", "from-hf", str(llama), str(tmp_path / "ck"), "--strategy", "megatron:d1"]
    drawn = run_ranks(1, on_a_terminal, distributed=False, arguments=arguments)[0]
    size = Checkpoint(tmp_path / "ck").manifest.nbytes / 1000
    assert "from-hf" in drawn
    assert f"{size:.1f}/{size:.1f} kB" in drawn
