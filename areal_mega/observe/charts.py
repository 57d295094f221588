"""The report's figures. Each function takes the run's records and returns an SVG, or None where nothing was measured."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from areal_mega.observe.record import StepRecord

Records = Sequence[StepRecord]

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3b6fb6", "#e08a2c", "#3f9a63", "#c8484c", "#8461b0", "#b9bec6"
MOST_POINTS = 500
"""More points than a line can show are averaged: the page of a long run stays small."""
MOST_BARS = 160
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9.5,
    "text.color": "#39424e",
    "axes.edgecolor": "#c9ced6",
    "axes.labelcolor": "#5b6573",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceff3",
    "grid.linewidth": 0.8,
    "xtick.color": "#5b6573",
    "ytick.color": "#5b6573",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.7,
    "svg.fonttype": "none",
}


def series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which ``name`` was measured and is finite, and its values; both [n] float64."""
    points = [(r.step, r.metrics[name]) for r in records if name in r.metrics and math.isfinite(r.metrics[name])]
    array = np.array(points, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def reward(records: Records) -> str | None:
    steps, means = series(records, "reward/mean")
    if not len(steps):
        return None
    spread = {r.step: r.metrics["reward/std"] for r in records if "reward/std" in r.metrics}

    def draw(axes: Any) -> None:
        if all(step in spread for step in steps):
            band = np.array([spread[int(step)] for step in steps])
            x, low = _thin(steps, means - band)
            axes.fill_between(x, low, _thin(steps, means + band)[1], color=BLUE, alpha=0.10, linewidth=0, label="± one standard deviation")
        _trend(axes, steps, means, BLUE, "mean reward")
        for name, colour in zip(_scores(records), (GREEN, ORANGE, PURPLE, RED), strict=False):
            _trend(axes, *series(records, name), colour, name.removeprefix("reward/"), dash="--", width=1.2, faint=0.0)

    return _figure(draw, "reward")


def evaluation(records: Records) -> str | None:
    names = sorted({name for r in records for name in r.metrics if name.startswith("eval/")})
    # Counts and seconds would flatten every curve that is a fraction.
    names = [
        name for name in names if not name.rsplit("/", 1)[-1].startswith(("time", "seconds", "prompts", "samples", "tokens", "length"))
    ]
    if not names:
        return None
    names.sort(key=lambda name: (name != "eval/accuracy", name))

    def draw(axes: Any) -> None:
        for name, colour in zip(names[:5], (GREEN, BLUE, ORANGE, PURPLE, RED), strict=False):
            x, y = series(records, name)
            marker = "o" if len(x) <= 40 else None
            axes.plot(x, y, color=colour, marker=marker, markersize=4.5, label=name.removeprefix("eval/"), clip_on=False, zorder=3)
        x, y = series(records, names[0])
        # The first label would lie on the axis if it were centred, the last one would leave the figure.
        for index, side, shift in {(0, "left", 6), (len(x) - 1, "right", 2)} if len(x) > 1 else {(0, "left", 6)}:
            where = {"xytext": (shift, 8 if index else -3), "textcoords": "offset points", "ha": side}
            axes.annotate(f"{y[index]:.3g}", (x[index], y[index]), fontsize=9, **where)
        if all(((v := series(records, name)[1]) >= 0).all() and (v <= 1).all() for name in names[:5]):
            axes.set_ylim(0, 1.06)

    return _figure(draw, "evaluation")


def staleness(records: Records) -> str | None:
    """Share of the batch's generated tokens by age, stacked, one bar per step; those beyond the bound included."""
    rows = [(r.step, r.histograms["staleness/age"]) for r in records if sum(r.histograms.get("staleness/age", {}).values()) > 0]
    if not rows:
        return None
    ages = sorted({age for _, bins in rows for age in bins})
    steps = np.array([step for step, _ in rows], dtype=np.float64)
    counts = np.array([[bins.get(age, 0) for age in ages] for _, bins in rows], dtype=np.float64)
    edges, width, pooled = _pool(steps, counts)
    shares = pooled / pooled.sum(axis=1, keepdims=True)
    shades = matplotlib.colormaps["YlGnBu"](np.linspace(0.85, 0.2, len(ages))) if len(ages) > 1 else [BLUE]

    def draw(axes: Any) -> None:
        bottom = np.zeros(len(edges))
        for column, (age, shade) in enumerate(zip(ages, shades, strict=True)):
            axes.bar(edges, shares[:, column], width=width, bottom=bottom, color=shade, linewidth=0, label=str(age))
            bottom += shares[:, column]
        x, y = series(records, "staleness/mean")
        if len(x):
            twin = _twin(axes, "mean age, versions")
            _trend(twin, x, y, RED, "mean age", faint=0.0)
            twin.set_ylim(0, max(1.0, float(y.max())) * 1.08)
            twin.tick_params(axis="y", colors=RED)
            twin.yaxis.label.set_color(RED)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(_percent())

    return _figure(draw, "generated tokens", legend_title="age in versions", columns=10)


def length_bias(records: Records) -> str | None:
    """How long the samples were that came in: cumulative share by generated tokens, those within the bound and those beyond it."""
    parts = []
    for name, label, colour in (("fresh", "within the bound", BLUE), ("late", "beyond the bound", RED)):
        bins = pooled_histogram(records, f"staleness/{name}_length")
        if bins:
            lengths = np.array(sorted(bins), dtype=np.float64)
            share = np.cumsum([bins[int(n)] for n in lengths]) / sum(bins.values())
            parts.append((label, colour, lengths, share))
    if not parts:
        return None

    def draw(axes: Any) -> None:
        for label, colour, lengths, share in parts:
            axes.step(np.append(lengths[0], lengths), np.append(0.0, share), where="post", color=colour, label=label)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(_percent())

    return _figure(draw, "samples, cumulative", xlabel="generated tokens")


def pooled_histogram(records: Records, name: str) -> dict[int, int]:
    """A histogram over all steps."""
    bins: dict[int, int] = {}
    for record in records:
        for edge, count in record.histograms.get(name, {}).items():
            bins[edge] = bins.get(edge, 0) + count
    return bins


TIME_PARTS = (
    ("time/wait_rollout", "wait for rollouts", ORANGE),
    ("time/fetch", "fetch", "#c9a227"),
    ("time/logprobs", "log-probabilities", "#5fb3c4"),
    ("time/update", "update", GREEN),
    ("time/sync", "weight sync", PURPLE),
    ("time/eval", "evaluation", BLUE),
)


def time_split(records: Records) -> str | None:
    """Seconds of each step by what they were spent on; what ``time/total`` has beyond the parts is shown as other.

    Train steps only: what comes before the first one (warm-up, first evaluation) would flatten all the others.
    """
    rows = [r for r in records if r.step > 0 and any(name in r.metrics for name, _, _ in TIME_PARTS)]
    if not rows:
        return None
    seconds = np.array([[r.metrics.get(name, 0.0) for name, _, _ in TIME_PARTS] for r in rows])
    totals = np.array([r.metrics.get("time/total", 0.0) for r in rows])
    other = np.clip(totals - seconds.sum(axis=1), 0.0, None)
    counts = np.column_stack([seconds, other])
    edges, width, pooled = _pool(np.array([float(r.step) for r in rows]), counts, average=True)

    def draw(axes: Any) -> None:
        bottom = np.zeros(len(edges))
        for column, (_, label, colour) in enumerate([*TIME_PARTS, ("", "other", GREY)]):
            if pooled[:, column].any():
                axes.bar(edges, pooled[:, column], width=width, bottom=bottom, color=colour, linewidth=0, label=label)
                bottom += pooled[:, column]
        axes.set_ylim(0, (float(bottom.max()) or 1.0) * 1.05)

    return _figure(draw, "seconds per step")


def mismatch(records: Records) -> str | None:
    return _lines(
        records,
        [
            ("mismatch/abs_mean", "mean |Δ log-prob|", BLUE, "-"),
            ("mismatch/abs_max", "max |Δ log-prob|", RED, "-"),
            ("mismatch/kl", "KL", ORANGE, "-"),
            ("mismatch/fresh_abs_mean", "mean |Δ|, current version only", BLUE, ":"),
            ("mismatch/fresh_abs_max", "max |Δ|, current version only", RED, ":"),
        ],
        "nats per token",
        log=True,
    )


def throughput(records: Records) -> str | None:
    return _lines(
        records,
        [("rollout/tokens_per_s", "rollout", ORANGE, "-"), ("train/tokens_per_s", "train", GREEN, "-")],
        "tokens per second",
        from_zero=True,
    )


def optimisation(records: Records) -> str | None:
    """Loss on the left, gradient norm before clipping on the right."""
    steps, losses = series(records, "train/loss")
    norm_steps, norms = series(records, "train/grad_norm")
    if not len(steps) and not len(norm_steps):
        return None

    def draw(axes: Any) -> None:
        if len(steps):
            _trend(axes, steps, losses, BLUE, "loss")
        if len(norm_steps):
            twin = _twin(axes, "gradient norm")
            _trend(twin, norm_steps, norms, ORANGE, "gradient norm", width=1.2)
            twin.set_ylim(bottom=0)
            axes.plot([], [], color=ORANGE, linewidth=1.2, label="gradient norm (right)")

    return _figure(draw, "loss")


def sync(records: Records) -> str | None:
    return _lines(
        records,
        [
            ("time/sync", "whole sync", PURPLE, "-"),
            ("sync/gather_s", "gather", BLUE, "-"),
            ("sync/transfer_s", "transfer", GREEN, "-"),
            ("sync/verify_s", "verify", RED, "-"),
        ],
        "seconds",
        from_zero=True,
    )


def _scores(records: Records) -> list[str]:
    """Named parts of the reward, the four first by name."""
    own = {"reward/mean", "reward/std", "reward/min", "reward/max"}
    return sorted({name for r in records for name in r.metrics if name.startswith("reward/")} - own)[:4]


def _lines(
    records: Records, wanted: Sequence[tuple[str, str, str, str]], ylabel: str, *, log: bool = False, from_zero: bool = False
) -> str | None:
    found = [(label, colour, dash, *series(records, name)) for name, label, colour, dash in wanted]
    found = [entry for entry in found if len(entry[3])]
    if not found:
        return None

    def draw(axes: Any) -> None:
        positive = False
        for label, colour, dash, steps, values in found:
            if log:
                # A logarithm has no place for 0, which is what an exact match looks like: those steps are left out.
                steps, values = steps[values > 0], values[values > 0]
                positive = positive or len(values) > 0
            _trend(axes, steps, values, colour, label, dash=dash)
        if positive:
            axes.set_yscale("log")
        if from_zero:
            axes.set_ylim(bottom=0)

    return _figure(draw, ylabel)


def _trend(
    axes: Any, steps: np.ndarray, values: np.ndarray, colour: str, label: str, *, dash: str = "-", width: float = 1.7, faint: float = 0.22
) -> None:
    """The values; where there are many, their running mean, with the values themselves ``faint`` (an opacity) behind it."""
    x, y = _thin(steps, values)
    window = len(y) // 25
    if window < 3:
        axes.plot(x, y, color=colour, linestyle=dash, linewidth=width, label=label, marker="o" if len(x) < 3 else None, markersize=4)
        return
    if faint:
        axes.plot(x, y, color=colour, alpha=faint, linewidth=0.8)
    kernel = np.ones(window)
    smooth = np.convolve(y, kernel, mode="same") / np.convolve(np.ones(len(y)), kernel, mode="same")
    axes.plot(x, smooth, color=colour, linestyle=dash, linewidth=width, label=label)


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(steps) <= MOST_POINTS:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), MOST_POINTS)
    return np.array([steps[p].mean() for p in parts]), np.array([values[p].mean() for p in parts])


def _pool(steps: np.ndarray, columns: np.ndarray, average: bool = False) -> tuple[np.ndarray, float, np.ndarray]:
    """At most ``MOST_BARS`` bars: neighbouring steps are pooled. Returns centres [b], width, and sums or means [b, columns]."""
    parts = np.array_split(np.arange(len(steps)), min(len(steps), MOST_BARS))
    centres = np.array([steps[p].mean() for p in parts])
    pooled = np.array([columns[p].mean(axis=0) if average else columns[p].sum(axis=0) for p in parts])
    gap = float(np.diff(centres).min()) if len(centres) > 1 else 1.0
    return centres, gap * (0.82 if len(centres) <= 60 else 1.0), pooled


def _twin(axes: Any, label: str) -> Any:
    twin = axes.twinx()
    twin.grid(False)
    twin.spines["right"].set_visible(False)
    twin.set_ylabel(label)
    return twin


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _figure(
    draw: Callable[[Any], None], ylabel: str, *, xlabel: str = "train step", legend_title: str | None = None, columns: int = 4
) -> str:
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.3), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.margins(x=0.02)
        handles, labels = axes.get_legend_handles_labels()
        if handles and (len(handles) > 1 or legend_title):
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, title=legend_title, alignment="left", handlelength=1.4)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().decode("utf-8")
