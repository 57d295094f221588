"""Its presence puts tests/ on the import path: the rooms share `ranks.py`. How tests are shared out to processes stands here too."""

import signal
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# How long an example takes says nothing about the code on a machine that others use too.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A shell starts background jobs with Ctrl-C ignored, and nohup what hangs up; the tests send both signals on purpose.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONGEST = ("slurm", "recover", "e2e")
"""Rooms that begin first, so that no process is left with one of them at the end. Most of their time is waiting."""


class ByFile(LoadScopeScheduling):
    """A file's tests run in one process, for its fixtures' sake, and so do all of tests/slurm: a machine has one Slurm."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "tests/slurm" if _room(file) == "slurm" else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False  # the order is that of the collection, below
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(room) if (room := _room(item.nodeid)) in LONGEST else len(LONGEST))


def _room(nodeid: str) -> str:
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else ""
