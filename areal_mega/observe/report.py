"""``<run>/report.html``: one page that needs no other file, made from ``metrics.jsonl`` and ``recipe.yaml`` alone."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import yaml

from areal_mega import __version__
from areal_mega.core.errors import UserError
from areal_mega.observe.console import evaluation
from areal_mega.observe.record import METRICS_FILE, StepRecord, read_records

REPORT_FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write the report of a run, finished or not, and return its path.

    Raises:
        UserError: ``run_dir`` is no run directory, or has not logged a step yet.
        ValueError: a line of ``metrics.jsonl`` is damaged; names the line.
    """
    metrics_path = run_dir / METRICS_FILE
    if not metrics_path.exists():
        raise UserError(f"{run_dir} has no {METRICS_FILE}: give the directory of a run, <run.root>/<run.name>")
    records = read_records(metrics_path)
    if not records:
        raise UserError(f"{metrics_path} has no finished step yet: there is nothing to report")
    recipe_path, provenance_path = run_dir / "recipe.yaml", run_dir / "provenance.json"
    recipe = yaml.safe_load(recipe_path.read_text(encoding="utf-8")) if recipe_path.exists() else {}
    origins = json.loads(provenance_path.read_text(encoding="utf-8")) if provenance_path.exists() else {}
    path = run_dir / REPORT_FILE
    aside = run_dir / f".{REPORT_FILE}.{os.getpid()}"
    aside.write_text(render(records, recipe, origins, name=run_dir.name), encoding="utf-8")
    aside.replace(path)
    return path


def render(records: Sequence[StepRecord], recipe: Mapping[str, Any], origins: Mapping[str, str], name: str) -> str:
    """The page. ``origins`` maps dotted recipe paths to where their values came from; may be empty."""
    run = recipe.get("run", {})
    title = escape(str(run.get("name", name)))
    ended = datetime.fromtimestamp(records[-1].time, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    smoothed = "Bold lines are running means; the values are faint behind them. " if len(records) > 75 else ""
    facts = [str(value) for path in ("algorithm.name", "model.path", "train.strategy", "rollout.strategy") if (value := _at(recipe, path))]
    tiles = "".join(
        f"<div class=tile><dt>{escape(label)}</dt><dd>{value}</dd></div>" for label, value in summary(records, run.get("steps"))
    )
    cards = "".join(_card(heading, caption, svg) for heading, caption, svg in _figures(records))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · areal-mega</title><style>{_CSS}</style></head><body><main>
<header><h1>{title}</h1><p>{" · ".join(escape(fact) for fact in facts)}</p></header>
<dl class=tiles>{tiles}</dl>
<section class=cards>{cards}</section>
{_recipe(recipe, origins)}
<footer>{smoothed}Last step {ended} · areal-mega {escape(__version__)} · made from {METRICS_FILE} and recipe.yaml</footer>
</main></body></html>
"""


def summary(records: Sequence[StepRecord], planned_steps: int | None) -> list[tuple[str, str]]:
    """Label and value (HTML) of each tile."""
    last = records[-1].step
    tiles = [("steps", f"{last}" + (f"<small> of {planned_steps}</small>" if planned_steps else ""))]
    evaluated = [(r.step, shown) for r in records if (shown := evaluation(r.metrics)) is not None]
    if evaluated:
        (first_step, (label, first)), (last_step, (_, final)) = evaluated[0], evaluated[-1]
        label = label.removeprefix("eval/").replace("_", " ")
        tiles.append((f"{label} @ {first_step}", f"{first:.3f}"))
        if last_step != first_step:
            direction = "up" if final > first else "down" if final < first else "same"
            tiles.append((f"{label} @ {last_step}", f"{final:.3f} <small class={direction}>{final - first:+.3f}</small>"))
    rewards = [r.metrics["reward/mean"] for r in records if "reward/mean" in r.metrics]
    if rewards:
        tiles.append(("reward, first → last", f"{rewards[0]:.2f} → {rewards[-1]:.2f}"))
    tiles.append(("duration", _duration(records[-1].time - records[0].time + records[0].metrics.get("time/total", 0.0))))
    for label, count in _tokens(records):
        tiles.append((label, _count(count)))
    return tiles


def _tokens(records: Sequence[StepRecord]) -> Iterator[tuple[str, float]]:
    for name, label in (("rollout/tokens", "tokens generated"), ("train/tokens", "tokens trained")):
        counted = [r.metrics[name] for r in records if name in r.metrics]
        if name == "train/tokens" and not counted:  # a log without it: the age histogram, which also counts tokens beyond the bound
            counted = [float(sum(r.histograms["staleness/age"].values())) for r in records if "staleness/age" in r.histograms]
        if counted:
            yield label, sum(counted)


def _figures(records: Sequence[StepRecord]) -> list[tuple[str, str, str | None]]:
    # Only here, because matplotlib takes longer to import than a run's other files together.
    from areal_mega.observe import charts

    return [
        ("Reward", "Mean reward of the samples that each step trained on, and its named parts.", charts.reward(records)),
        ("Evaluation", "Held-out prompts, at the weights the step ended with.", charts.evaluation(records)),
        (
            "Staleness",
            "Age of the batch's generated tokens: the trainer's weight version less the version that generated them. Those beyond the "
            "bound are shown too, and were not trained.",
            charts.staleness(records),
        ),
        ("Length bias", length_bias(records), charts.length_bias(records)),
        ("Time split", "Where each step's wall-clock time went, as the trainer sees it.", charts.time_split(records)),
        (
            "Train–inference mismatch",
            "Log-probabilities of the trainer against those of the server, for the same tokens. Staleness is part of it.",
            charts.mismatch(records),
        ),
        ("Throughput", "Tokens generated by all servers, and tokens trained, per second of wall-clock time.", charts.throughput(records)),
        ("Optimisation", "Policy loss, and the gradient norm before clipping.", charts.optimisation(records)),
        ("Weight sync", "Duration of each sync and its phases.", charts.sync(records)),
    ]


def length_bias(records: Sequence[StepRecord]) -> str:
    """What dropping every sample with a token beyond the bound would have done (or did), in one or two sentences."""
    counts, tokens, rewards = {}, {}, {}
    for name in ("fresh", "late"):
        seen = [(sum(r.histograms.get(f"staleness/{name}_length", {}).values()), r.metrics) for r in records]
        counts[name] = sum(n for n, _ in seen)
        tokens[name] = sum(n * metrics[f"staleness/{name}_tokens"] for n, metrics in seen if n)
        rewards[name] = sum(n * metrics[f"staleness/{name}_reward"] for n, metrics in seen if n)
    total, fresh, late = sum(counts.values()), counts["fresh"], counts["late"]
    if not total:
        return "Lengths of the samples that came in, split by the staleness bound."
    if not late:
        return f"All {total} samples were within the staleness bound: dropping late ones would have changed nothing."
    said = (
        f"{late} of {total} samples ({late / total:.1%}) had tokens beyond the staleness bound: mean length "
        f"{tokens['late'] / late:.0f} tokens, mean reward {rewards['late'] / late:.3f}."
    )
    if not fresh:
        return f"{said} Dropping them would have left nothing."
    shift = tokens["fresh"] / fresh / (sum(tokens.values()) / total) - 1
    moved = rewards["fresh"] / fresh - sum(rewards.values()) / total
    return (
        f"{said} The others: {tokens['fresh'] / fresh:.0f} tokens, {rewards['fresh'] / fresh:.3f}. Training without the late ones "
        f"changes the mean length by {shift:+.1%} and the mean reward by {moved:+.3f}."
    )


def _card(heading: str, caption: str, svg: str | None) -> str:
    if svg is None:
        body = "<p class=absent>not measured in this run</p>"
    else:
        data = base64.b64encode(svg.encode()).decode()
        body = f'<img alt="{escape(heading)} by train step" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><h2>{escape(heading)}</h2>{body}<figcaption>{escape(caption)}</figcaption></figure>"


def _recipe(recipe: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    if not recipe:
        return "<section class=recipe><h2>Recipe</h2><p class=absent>the run directory has no recipe.yaml</p></section>"
    if not origins:
        text = escape(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True))
        return f"<section class=recipe><h2>Recipe</h2><pre>{text}</pre></section>"
    rows: list[str] = []
    for path, value in _leaves(recipe):
        origin = origins.get(path, "")
        kind = "default" if origin in ("", "default") else "set"
        shown = escape(json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value)
        rows.append(f"<tr class={kind}><td>{escape(path)}</td><td>{shown}</td><td>{escape(origin)}</td></tr>")
    head = "<tr><th>setting</th><th>value</th><th>from</th></tr>"
    own = "".join(row for row in rows if row.startswith("<tr class=set>"))
    return (
        f"<section class=recipe><h2>Recipe</h2><table>{head}{own}</table>"
        f"<details><summary>All {len(rows)} settings, defaults included</summary><table>{head}{''.join(rows)}</table></details></section>"
    )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        # `kwargs` are one setting, whose keys are the user's own.
        if isinstance(value, Mapping) and key != "kwargs":
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at(recipe: Mapping[str, Any], dotted: str) -> Any:
    return dict(_leaves(recipe)).get(dotted)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _count(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


_CSS = """
:root{color-scheme:light;--ink:#1f2733;--soft:#5b6573;--line:#e3e7ec;--ground:#f6f7f9;--up:#2f8a55;--down:#c0392b}
*{box-sizing:border-box}body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:36px 24px 48px}
h1{margin:0;font-size:28px;font-weight:650;letter-spacing:-.01em}header p{margin:4px 0 24px;color:var(--soft);overflow-wrap:anywhere}
h2{margin:0 0 10px;font-size:16px;font-weight:620}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(158px,1fr));gap:12px;margin:0 0 20px}
.tile{background:#fff;border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile dt{color:var(--soft);font-size:12.5px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.tile dd{margin:2px 0 0;font-size:21px;font-weight:620;font-variant-numeric:tabular-nums;
white-space:nowrap}.tile small{font-size:13px;font-weight:500;color:var(--soft)}
.tile small.up{color:var(--up)}.tile small.down{color:var(--down)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
figure{margin:0;background:#fff;border:1px solid var(--line);border-radius:10px;padding:18px 20px;display:flex;flex-direction:column}
figure img{width:100%;height:auto;display:block}figcaption{margin-top:auto;padding-top:8px;color:var(--soft);font-size:13px}
.absent{color:var(--soft);font-style:italic;margin:24px 0}
.recipe{margin-top:16px;background:#fff;border:1px solid var(--line);border-radius:10px;padding:18px 20px}
.recipe pre,.recipe td{font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.recipe pre{margin:0;overflow-x:auto}
table{border-collapse:collapse;width:100%}th{text-align:left;font-size:12.5px;font-weight:500;color:var(--soft)}
td,th{padding:3px 16px 3px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tr.default td{color:var(--soft)}td:nth-child(3){color:var(--soft)}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft);font-size:13.5px}
footer{margin-top:24px;color:var(--soft);font-size:12.5px}
@media print{body{background:#fff}figure,.tile,.recipe{break-inside:avoid}}
"""
