"""The file every other view is made from: one JSON object per step, appended and flushed before anything else sees the step."""

from __future__ import annotations

import os
from pathlib import Path

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
