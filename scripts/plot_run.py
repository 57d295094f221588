#!/usr/bin/env python
"""Draw a finished run in one picture: reward and evaluation, age of trained tokens, time split.

    python scripts/plot_run.py runs/quickstart docs/images/quickstart.svg

The picture of the README is made this way. ``areal-mega report`` writes the whole page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal_mega.observe.charts import BLUE, GREEN, GREY, RED, STYLE, TIME_PARTS, Records, series
from areal_mega.observe.record import METRICS_FILE, read_records


def draw(records: Records) -> Figure:
    """The three panels, side by side."""
    # Paths instead of text: a viewer without the fonts shows the same picture. A fixed salt: the same run gives the same file.
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "path", "svg.hashsalt": "areal-mega"}):
        figure = Figure(figsize=(11.0, 3.2), layout="constrained", facecolor="white")
        reward, age, time = figure.subplots(1, 3)
        _reward(reward, records)
        _age(age, records)
        _time(time, records)
        for axes in (reward, age, time):
            axes.set_xlabel("train step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return figure


def _reward(axes: Any, records: Records) -> None:
    axes.set_title("Reward and held-out accuracy", loc="left", fontsize=10.5)
    axes.plot(*series(records, "reward/mean"), color=BLUE, label="mean reward of the batch")
    steps, accuracy = series(records, "eval/accuracy")
    axes.plot(steps, accuracy, color=GREEN, marker="o", markersize=5, label="held-out accuracy", zorder=3)
    for index, shift in {(0, (8, -12)), (len(steps) - 1, (-4, 7))}:
        axes.annotate(f"{accuracy[index]:.3f}", (steps[index], accuracy[index]), xytext=shift, textcoords="offset points", ha="left")
    axes.set_ylim(0, 1.06)
    axes.margins(x=0.06)
    axes.legend(loc="lower right")


def _age(axes: Any, records: Records) -> None:
    """Shares of the tokens that came in for each step, by age; stale ones are among them."""
    axes.set_title("Age of tokens, in weight versions", loc="left", fontsize=10.5)
    rows = [(r.step, r.histograms["staleness/age"]) for r in records if r.histograms.get("staleness/age")]
    steps = [step for step, _ in rows]
    bottom = np.zeros(len(rows))
    colours = [BLUE, "#8fb4dd", RED, GREY]
    for age in sorted({age for _, bins in rows for age in bins}):
        share = np.array([bins.get(age, 0) / sum(bins.values()) for _, bins in rows])
        axes.bar(steps, share, bottom=bottom, width=0.85, color=colours[min(age, 3)], linewidth=0, label=str(age))
        bottom += share
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=6, handlelength=1.0)


def _time(axes: Any, records: Records) -> None:
    """Train steps only: step 0 is warm-up and first evaluation, and would dwarf the others."""
    axes.set_title("Seconds per step, as the trainer sees them", loc="left", fontsize=10.5)
    rows = [r for r in records if r.step > 0]
    steps = [r.step for r in rows]
    bottom = np.zeros(len(rows))
    for name, label, colour in TIME_PARTS:
        seconds = np.array([r.metrics.get(name, 0.0) for r in rows])
        axes.bar(steps, seconds, bottom=bottom, width=0.85, color=colour, linewidth=0, label=label)
        bottom += seconds
    total = np.array([r.metrics.get("time/total", 0.0) for r in rows])
    axes.bar(steps, np.clip(total - bottom, 0, None), bottom=bottom, width=0.85, color=GREY, linewidth=0, label="other")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, handlelength=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a finished run in one picture.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("out", type=Path, help="picture to write: .svg, .png or .pdf")
    arguments = parser.parse_args()
    figure = draw(read_records(arguments.run / METRICS_FILE))
    metadata = {"Date": None} if arguments.out.suffix == ".svg" else None
    figure.savefig(arguments.out, dpi=160, metadata=metadata)


if __name__ == "__main__":
    main()
