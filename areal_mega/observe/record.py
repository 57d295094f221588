"""One line of ``metrics.jsonl``: what was measured at one step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_mega.core.metrics import Metric, results

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Metrics of one step. A metric that was not measured is absent.

    ``time`` is in seconds since 1970; ``reductions`` says how each metric was reduced over ranks and samples; a histogram maps an
    integer bin (for ``staleness/age``: versions) to a count (tokens).
    """

    step: int
    time: float
    metrics: Mapping[str, float]
    reductions: Mapping[str, str] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Metric], histograms: Mapping[str, Mapping[int, int]] | None = None) -> StepRecord:
        """Reduce ``metrics`` to plain numbers, now."""
        numbers = results(metrics)
        kept = {name: {int(b): int(n) for b, n in sorted(bins.items())} for name, bins in (histograms or {}).items() if bins}
        return cls(
            step=step,
            time=time.time(),
            metrics=numbers,
            reductions={name: metrics[name].reduction for name in numbers},
            histograms=kept,
        )

    def to_line(self) -> str:
        """One line of strict JSON. NaN and infinities, which JSON lacks, are written as the strings that Python's ``float`` reads."""
        return json.dumps(
            {
                "step": self.step,
                "time": round(self.time, 3),
                "metrics": {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()},
                "reductions": dict(self.reductions),
                "histograms": {name: {str(b): n for b, n in bins.items()} for name, bins in self.histograms.items()},
            },
            allow_nan=False,
            separators=(",", ":"),
        )

    @classmethod
    def from_line(cls, line: str) -> StepRecord:
        """Inverse of ``to_line``.

        Raises:
            ValueError: the line is not such a record.
        """
        data: Any = json.loads(line)
        try:
            return cls(
                step=int(data["step"]),
                time=float(data["time"]),
                metrics={name: float(value) for name, value in data["metrics"].items()},
                reductions=data.get("reductions", {}),
                histograms={name: {int(b): int(n) for b, n in bins.items()} for name, bins in data.get("histograms", {}).items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a step record: {error!r}") from error

    def merged(self, later: StepRecord) -> StepRecord:
        """Two records of one step: the later one wins, name by name."""
        assert later.step == self.step, f"cannot merge steps {self.step} and {later.step}"
        return StepRecord(
            step=self.step,
            time=later.time,
            metrics={**self.metrics, **later.metrics},
            reductions={**self.reductions, **later.reductions},
            histograms={**self.histograms, **later.histograms},
        )


def whole_lines(path: Path, offset: int = 0) -> tuple[list[str], int]:
    """Lines from byte ``offset`` on that end in a newline, and the offset after them. A line still being written is left alone."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8").splitlines(), offset + end


def read_records(path: Path) -> list[StepRecord]:
    """All steps of a ``metrics.jsonl``, in order, one record each.

    A step that was written again (a run resumed from before it) is merged, the later line winning.

    Raises:
        ValueError: a whole line is not a record; names file and line.
    """
    steps: dict[int, StepRecord] = {}
    for number, line in enumerate(whole_lines(path)[0], start=1):
        try:
            record = StepRecord.from_line(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        steps[record.step] = steps[record.step].merged(record) if record.step in steps else record
    return [steps[step] for step in sorted(steps)]
