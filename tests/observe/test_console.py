"""What a person sees: one line per step, readable in a terminal and in a log file."""

from __future__ import annotations

import io
import logging
import re

import fabricate
import pytest

from areal_mega.observe.console import ConsoleSink
from areal_mega.observe.record import StepRecord

RECORDS = [StepRecord.of(step, metrics, histograms) for step, metrics, histograms in fabricate.steps(30)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_one_plain_line_per_step() -> None:
    out = io.StringIO()
    sink = ConsoleSink("rich", total_steps=30, stream=out)
    for record in RECORDS:
        sink.write(record)
    lines = out.getvalue().splitlines()
    assert len(lines) == len(RECORDS)
    assert "\x1b" not in out.getvalue() and out.getvalue().isascii()
    assert lines[0] == "step 0/30  eval-accuracy=0.328  time=1.50  (eval 1.50 s)"
    assert lines[1].startswith("step 1/30  reward=") and "staleness-max=2" in lines[1] and "update" in lines[1]


def test_what_was_not_measured_is_not_shown() -> None:
    out = io.StringIO()
    ConsoleSink("plain", stream=out).write(StepRecord(step=3, time=0.0, metrics={}))
    assert out.getvalue() == "step 3\n"


def test_a_terminal_gets_aligned_columns_and_a_header_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    sink = ConsoleSink("rich", total_steps=30, stream=out)
    for record in RECORDS:
        sink.write(record)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    headers, lines = ([line for line in shown if ("roll tok/s" in line) == wanted] for wanted in (True, False))
    assert len(lines) == len(RECORDS) and len(headers) == 2
    assert {line.count("█") + line.count("░") for line in lines} == {24}
    assert len({line.index("█") for line in lines}) == 1


def test_notes_are_never_lost(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    ConsoleSink("plain", stream=out).note("something happened")
    assert out.getvalue() == "something happened\n"
    silent = io.StringIO()
    sink = ConsoleSink("off", stream=silent)
    with caplog.at_level(logging.WARNING):
        sink.write(RECORDS[1])
        sink.note("something happened")
    assert silent.getvalue() == "" and "something happened" in caplog.text
