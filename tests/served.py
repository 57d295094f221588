"""A real embedded server in its own process, for tests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 120.0


@contextmanager
def served(model: Path | str, *flags: str) -> Iterator[str]:
    """Run ``python -m areal_mega.serving MODEL`` on a free port; yields its base URL, ends the process by its id."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_mega.serving", str(model), "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            cwd=Path(__file__).resolve().parent.parent,
        )
        try:
            yield _url(process, log)
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _url(process: subprocess.Popen[str], log: object) -> str:
    assert process.stdout is not None
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if select.select([process.stdout], [], [], 0.5)[0]:
            line = process.stdout.readline()
            if line.startswith("serving "):
                return line.split()[-1]
    log.seek(0)  # type: ignore[attr-defined]
    raise AssertionError(f"the server did not start (exit code {process.poll()}): {log.read()[-2000:]}")  # type: ignore[attr-defined]
