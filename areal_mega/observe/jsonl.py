"""The file every other view is made from: one JSON object per step, appended and flushed before anything else sees the step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_mega.observe.record import METRICS_FILE, StepRecord


class JsonlSink:
    """Appends to ``<run>/metrics.jsonl``; a resumed run goes on in the same file."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        self.torn_bytes = self._cut_torn_line()
        """Length of the half-written line that an earlier process left and that was cut off; usually 0."""

    def _cut_torn_line(self) -> int:
        """A process killed while writing leaves half a line, which would spoil the next one."""
        with self.path.open("rb") as file:
            data = file.read()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            self._file.truncate(end)
        return len(data) - end

    def write(self, record: StepRecord) -> None:
        self._file.write(record.to_line().encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk itself."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


class LineLog:
    """A file of JSON objects, a line each, written and flushed at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def cut_after(path: Path, step: int) -> int:
    """Forget the lines of steps beyond ``step``, and what follows them: a run that goes on from there makes them again.

    Returns:
        The file's length in bytes afterwards; 0 where there is none.
    """
    if not path.exists():
        return 0
    kept = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            kept += len(line)
        file.truncate(kept)
    return kept
