"""Conversions end by waiting for the disk: tests write to memory, so that they wait for nothing else that is being written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)
