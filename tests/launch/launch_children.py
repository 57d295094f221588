"""Programs for the launcher's tests to start, and helpers to see who is alive."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from areal_mega.config.schema import Recipe
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.rundir import RunDir

SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
FORK = f"""
import os, subprocess, sys, time
for own_session in (False, True):
    child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=own_session, stdout=subprocess.PIPE)
    child.stdout.readline()
    print("grandchild", child.pid, flush=True)
time.sleep(600)
"""
"""Has two children that ignore SIGTERM: one in its session, one that left it."""
READY = """
import sys, time
from areal_mega.launch.rundir import RunDir
RunDir.open(sys.argv[1], sys.argv[2]).announce(sys.argv[3], int(sys.argv[4]), "127.0.0.1:1", hello="there")
time.sleep(600)
"""
SERVE = """
import asyncio, os, sys, time
from areal_mega.rpc.rank_server import RankServer
from areal_mega.launch.rundir import RunDir
run_dir = RunDir.open(sys.argv[1], sys.argv[2])
server = RankServer(run_dir.token, f"{sys.argv[3]} rank {sys.argv[4]}")
def train_step():
    print("working hard", flush=True)
    time.sleep(600)
server.register("train_step", train_step)
run_dir.announce(sys.argv[3], int(sys.argv[4]), server.start("127.0.0.1"))
server.serve_forever()
"""


def make_run(root: Path, name: str = "one") -> RunDir:
    return RunDir.create(Recipe.model_validate({"run": {"name": name, "root": str(root), "steps": 1}, "model": {"path": "m"}}))


def spec(code: str, role: str = "train", rank: int = 0, run_dir: RunDir | None = None) -> ProcessSpec:
    arguments = [] if run_dir is None else [str(run_dir.path), run_dir.attempt, role, str(rank)]
    return ProcessSpec(role=role, rank=rank, argv=[sys.executable, "-c", code, *arguments])


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def until[T](look: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Wait for ``look`` to return something true."""
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return seen


def until_gone(pids: Iterable[int]) -> None:
    pids = tuple(pids)
    until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def grandchildren(log: Path) -> tuple[int, int]:
    """Wait for the two children of ``FORK``: the one in its session, and the one that left it."""

    def look() -> list[int]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [int(line.removeprefix("grandchild ")) for line in lines if line.startswith("grandchild ")]

    until(lambda: len(look()) == 2, "grandchildren")
    inside, outside = look()
    return inside, outside


def said(log: Path, text: str) -> None:
    """Wait until a log holds ``text``."""
    until(lambda: log.exists() and text in log.read_text(), f"{text!r} in {log}")


def children_of(pid: int) -> set[int]:
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                    found.add(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
