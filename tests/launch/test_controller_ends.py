"""However the controller ends, nothing of its run is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_children import FORK, SLEEP, STUBBORN, alive, children_of, grandchildren, make_run, said, until_gone

from areal_mega.launch.rundir import RunDir

CONTROLLER = f"""
import asyncio, os, sys, time
from areal_mega.launch.local import LocalLauncher, ProcessSpec
from areal_mega.launch.rundir import RunDir
async def main():
    run_dir = RunDir.open(sys.argv[1], sys.argv[2])
    with LocalLauncher(run_dir, startup_timeout_s=60.0, shutdown_timeout_s=1.0) as launcher:
        codes = {{("train", 0): {SLEEP!r}, ("train", 1): {STUBBORN!r}, ("rollout", 0): {FORK!r}}}
        launcher.start(ProcessSpec(role=r, rank=k, argv=[sys.executable, "-c", code]) for (r, k), code in codes.items())
        print(*(launcher.pid(*key) for key in codes), launcher._guard.pid, flush=True)
        await launcher.supervise(asyncio.sleep(3600))
asyncio.run(main())
"""


@dataclass
class Run:
    controller: subprocess.Popen[str]
    children: list[int]
    below: tuple[int, int]
    guard: int

    @property
    def all(self) -> list[int]:
        return [*self.children, *self.below, self.guard]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run_dir: RunDir = make_run(tmp_path)
    argv = [sys.executable, "-c", CONTROLLER, str(run_dir.path), run_dir.attempt]
    controller = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert controller.stdout is not None
    *children, guard = map(int, controller.stdout.readline().split())
    below = grandchildren(run_dir.log_path("rollout", 0))
    said(run_dir.log_path("train", 0), "asleep")
    said(run_dir.log_path("train", 1), "deaf")
    run = Run(controller, children, below, guard)
    assert all(map(alive, run.all))
    yield run
    for pid in [controller.pid, *run.all]:  # only where a test failed is any of them left
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    controller.communicate()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV])
def test_a_controller_that_is_killed_leaves_nobody(run: Run, signum: signal.Signals) -> None:
    run.controller.send_signal(signum)
    assert run.controller.wait(60) == -signum
    until_gone(run.all)


def test_ctrl_c_leaves_nobody(run: Run) -> None:
    os.killpg(run.controller.pid, signal.SIGINT)  # as a terminal does: to the controller's whole process group
    _, errors = run.controller.communicate(timeout=60)
    assert not any(map(alive, run.all))  # orderly: all were gone before the controller was
    assert errors.rstrip().endswith("KeyboardInterrupt") and "Task exception was never retrieved" not in errors


def test_controller_and_guard_killed_at_once_leave_no_child(run: Run) -> None:
    """Out of memory may take both; then the kernel itself ends the children, though not what these have started."""
    os.kill(run.guard, signal.SIGSTOP)  # cannot act in between
    run.controller.kill()
    run.controller.wait(60)
    until_gone(run.children)
    os.kill(run.guard, signal.SIGKILL)


def test_a_run_goes_on_without_its_guard_and_still_ends_in_order(run: Run) -> None:
    os.kill(run.guard, signal.SIGKILL)
    until_gone([run.guard])
    assert all(map(alive, run.children))
    os.kill(run.children[0], signal.SIGKILL)
    _, errors = run.controller.communicate(timeout=60)
    assert "WorkerDied: train rank 0 died: killed by SIGKILL" in errors
    assert not any(map(alive, run.all))


def test_the_controller_has_no_other_children(run: Run) -> None:
    assert children_of(run.controller.pid) == {*run.children, run.guard}
