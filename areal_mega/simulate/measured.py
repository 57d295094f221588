"""What a run measured of itself, as a simulation takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_mega.core.errors import UserError
from areal_mega.observe.record import METRICS_FILE, StepRecord, read_records
from areal_mega.simulate.inputs import DecodeTable

SKIP = 2
"""First steps left out: buffers are allocated, and the first batch has nothing to overlap with."""
_LEAST_MS = 200
"""A number of sequences seen for less time says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the steps of a run. ``samples_per_s`` is its throughput, evaluation and export left out."""

    lengths: dict[int, int]
    prompt_tokens: float
    decode: DecodeTable
    train_s_per_token: float
    step_s: float
    sync_s: float
    """Of one sync, which not every step has (``sync.every_steps``)."""
    uniform: float
    samples_per_s: float


def read_run(folder: Path) -> Measured:
    """Measure a run by its ``metrics.jsonl``.

    Raises:
        UserError: no run directory, too few steps, or a log without the histograms of lengths and decoding.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        raise UserError(f"--from-run {folder} has no {METRICS_FILE}: give the directory of a run, <run.root>/<run.name>")
    steps = [record for record in read_records(path) if "batch/samples" in record.metrics]
    if len(steps) <= SKIP:
        raise UserError(f"--from-run {folder} has {len(steps)} train steps, and the first {SKIP} are left out; run it for longer")
    return measure(steps[SKIP:], str(folder))


def measure(steps: Sequence[StepRecord], name: str) -> Measured:
    """Measure train steps. ``name``: of the run, for messages."""

    def total(*names: str) -> float:
        return sum(record.metrics.get(metric, 0.0) for record in steps for metric in names)

    def pooled(histogram: str) -> Counter[int]:
        bins: Counter[int] = Counter()
        for record in steps:
            bins.update(record.histograms.get(histogram, {}))
        return bins

    lengths, decoded, ms = (pooled(f"rollout/{what}") for what in ("length", "decode_tokens", "decode_ms"))
    if not lengths or not decoded:
        raise UserError(f"--from-run {name} has no histograms rollout/length and rollout/decode_tokens: it is of an older version")
    work, sync = total("time/fetch", "time/logprobs", "time/update"), total("time/sync")
    seconds = total("time/total") - total("time/eval", "time/export")
    # While a sync pauses it, a server makes no tokens; the simulation pauses it itself.
    generating = 1 - sync / seconds
    samples = total("batch/samples")
    answers = sum(record.metrics["batch/response_tokens"] * record.metrics["batch/samples"] for record in steps)
    groups = sum(lengths.values()) / samples * total("batch/groups")  # finished ones, those that were filtered included
    return Measured(
        lengths=dict(lengths),
        prompt_tokens=max(0.0, (total("batch/tokens") - answers) / samples),
        decode=table(decoded, ms).scaled(1 / generating),
        train_s_per_token=work / total("batch/tokens"),
        step_s=max(0.0, seconds - work - sync - total("time/wait_rollout")) / len(steps),
        sync_s=sync / max(1, sum("time/sync" in record.metrics for record in steps)),
        uniform=min(0.99, (steps[-1].metrics.get("rollout/uniform", 0.0) - steps[0].metrics.get("rollout/uniform", 0.0)) / groups),
        samples_per_s=samples / seconds,
    )


def table(tokens: Counter[int], ms: Counter[int]) -> DecodeTable:
    """Tokens per second by running sequences. Neighbouring numbers are pooled until they were seen for long enough; a rate never falls
    with more sequences, for then they would take turns."""
    points: list[tuple[float, float]] = []
    least = min(_LEAST_MS, sum(ms.values()))
    t = seconds = weight = 0.0
    for n in sorted(ms):
        t, seconds, weight = t + tokens[n], seconds + ms[n] / 1000, weight + n * ms[n] / 1000
        if seconds * 1000 >= least:
            if t:
                points.append((weight / seconds, max(t / seconds, points[-1][1] if points else 0.0)))
            t = seconds = weight = 0.0
    return DecodeTable(tuple(points))
