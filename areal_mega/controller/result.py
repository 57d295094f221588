"""What a finished run has to say for itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """``first_eval`` and ``last_eval`` are mean rewards on the evaluation data before the first train step and after the last one; None
    where there was no such evaluation."""

    run_dir: Path
    steps: int
    first_eval: float | None
    last_eval: float | None
    report: Path | None
    export: Path | None
