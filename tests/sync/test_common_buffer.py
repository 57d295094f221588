"""Where the system refuses memory in common, no rank has it: shards are sent instead, and the run goes on."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from areal_mega.sync import memory

NOBODY: Any = None
"""The transport of a root that has no peers."""


def alone(nbytes: int) -> Any:
    return memory.common_buffer(NOBODY, 0, 0, [0], nbytes)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Whatever happens, no file stays open."""
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_limit_on_files_is_no_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert alone(8192) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_system_that_forbids_such_files_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert alone(8192) is None


def test_what_the_root_cannot_map_it_announces_to_nobody() -> None:
    assert alone(2**60) is None


@pytest.mark.parametrize("size", [4096, 2**60])
def test_what_another_rank_cannot_map_it_says_it_has_not(size: int) -> None:
    """A file that is too short, and one for which there are not enough addresses."""
    fd, letter = memory._make(size)
    try:
        assert memory._open(letter, max(size, 8192)) is None
    finally:
        os.close(fd)
