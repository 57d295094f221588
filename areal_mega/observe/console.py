"""One line per step on standard output: columns on a terminal, self-describing ``name=value`` text in a log file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

from rich.console import Console
from rich.text import Text

from areal_mega.observe.record import StepRecord

HEADER_EVERY = 20
TIME_PARTS = (
    ("time/wait_rollout", "wait", "yellow"),
    ("time/logprobs", "logp", "cyan"),
    ("time/update", "update", "green"),
    ("time/sync", "sync", "magenta"),
    ("time/eval", "eval", "blue"),
)
COLUMNS = (("step", 11), ("reward", 7), ("eval", 7), ("loss", 9), ("stale", 9), ("roll tok/s", 10), ("train tok/s", 11), ("time", 7))


class ConsoleSink:
    """Shows steps as they come.

    Args:
        style: ``rich``: aligned columns in colour, where ``stream`` is a terminal, else as ``plain``; ``off``: nothing at all.
        total_steps: shown behind the step where known.
        stream: standard output where not given.
    """

    def __init__(self, style: Literal["rich", "plain", "off"], total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._style = "plain" if style == "rich" and not self._stream.isatty() else style
        self._total = total_steps
        self._shown = 0
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True) if self._style == "rich" else None

    def write(self, record: StepRecord) -> None:
        if self._style == "off":
            return
        if self._console is None:
            print(plain_line(record, self._total), file=self._stream, flush=True)
            return
        if self._shown % HEADER_EVERY == 0:
            self._console.print(_header())
        self._shown += 1
        self._console.print(_row(record, self._total))

    def note(self, text: str) -> None:
        """A sentence between the steps. With the console off it goes to the log instead: it is never lost."""
        if self._console is not None:
            self._console.print(Text(text, style="yellow"))
        elif self._style == "plain":
            print(text, file=self._stream, flush=True)
        else:
            logging.getLogger(__name__).warning(text)


def evaluation(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """The evaluation to show first: ``eval/accuracy``, else ``eval/reward_mean`` or ``eval/reward``, else the first by name."""
    names = sorted(name for name in metrics if name.startswith("eval/"))
    for preferred in ("eval/accuracy", "eval/reward_mean", "eval/reward"):
        if preferred in names:
            return preferred, metrics[preferred]
    return (names[0], metrics[names[0]]) if names else None


def plain_line(record: StepRecord, total_steps: int | None) -> str:
    """The step as ``name=value`` text; what was not measured is left out."""
    m = record.metrics
    words = [f"step {_step(record, total_steps)}"]
    shown = evaluation(m)
    numbers = [
        ("reward", m.get("reward/mean"), ".3f"),
        (shown[0].replace("/", "-") if shown else "eval", shown[1] if shown else None, ".3f"),
        ("loss", m.get("train/loss"), ".4g"),
        ("staleness", m.get("staleness/mean"), ".2f"),
        ("staleness-max", m.get("staleness/max"), ".0f"),
        ("rollout-tok/s", m.get("rollout/tokens_per_s"), ".0f"),
        ("train-tok/s", m.get("train/tokens_per_s"), ".0f"),
        ("time", m.get("time/total"), ".2f"),
    ]
    words += [f"{name}={value:{form}}" for name, value, form in numbers if value is not None]
    parts = [f"{label} {m[name]:.2f}" for name, label, _ in TIME_PARTS if name in m]
    return "  ".join(words) + (f"  ({', '.join(parts)} s)" if parts else "")


def _step(record: StepRecord, total_steps: int | None) -> str:
    return f"{record.step}/{total_steps}" if total_steps else str(record.step)


def _header() -> Text:
    text = Text(" ".join(f"{name:>{width}}" for name, width in COLUMNS), style="bold")
    text.append("  ")
    for _, label, colour in TIME_PARTS:
        text.append(f"{label} ", style=colour)
    return text


def _row(record: StepRecord, total_steps: int | None) -> Text:
    m = record.metrics
    shown = evaluation(m)
    mean, worst = m.get("staleness/mean"), m.get("staleness/max")
    cells = [
        _step(record, total_steps),
        _number(m.get("reward/mean"), ".3f"),
        _number(shown[1] if shown else None, ".3f"),
        _number(m.get("train/loss"), ".3g"),
        "-" if mean is None else f"{mean:.2f}" + ("" if worst is None else f"/{worst:.0f}"),
        _number(m.get("rollout/tokens_per_s"), ",.0f"),
        _number(m.get("train/tokens_per_s"), ",.0f"),
        _number(m.get("time/total"), ".1f", "s"),
    ]
    styles = ["bold", "", "bold green" if shown else "", "", "", "", "", ""]
    text = Text()
    for (_, width), cell, style in zip(COLUMNS, cells, styles, strict=True):
        text.append(f"{cell:>{width}} ", style=style)
    text.append(" ")
    return text + _time_bar(m)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _time_bar(metrics: Mapping[str, float], width: int = 24) -> Text:
    """The step's time split, as a bar whose colours are those of the header."""
    parts = [(metrics[name], colour) for name, _, colour in TIME_PARTS if metrics.get(name, 0) > 0]
    whole = max(metrics.get("time/total", 0.0), sum(seconds for seconds, _ in parts))
    text, before, passed = Text(), 0, 0.0
    for seconds, colour in parts:
        passed += seconds
        # Cumulative rounding, so that the cells of the parts add up to those of the whole.
        upto = round(width * passed / whole)
        text.append("█" * (upto - before), style=colour)
        before = upto
    text.append("░" * (width - before) if parts else "", style="dim")
    return text
