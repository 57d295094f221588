"""Finding and ending every process that stems from this run. Standard library only: the guard runs it without site-packages.

Each process of a run leads a session of its own and carries a marker in its environment. Its descendants share the session, or, where
they made their own, still the marker. (Looking for children alone would miss those whose parent is dead.)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

MARKER = "AREAL_MEGA_LAUNCH"
"""Environment variable with the launcher's random id."""


def members(sessions: Collection[int], marker: str | None = None) -> list[int]:
    """Living processes that belong to one of the sessions or carry ``marker``. Zombies do not count."""
    needle = None if marker is None else f"{MARKER}={marker}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) in sessions:
                found.append(int(name))
                continue
            if needle is None:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is not ours
    return found


def send(pids: Collection[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue  # ended by itself


def kill_members(sessions: Collection[int], marker: str | None = None, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL until none is left. Returns those that still live at the deadline: only a process stuck in the kernel can."""
    deadline = time.monotonic() + timeout_s
    while left := members(sessions, marker):
        if time.monotonic() > deadline:
            return left
        send(left, signal.SIGKILL)
        time.sleep(0.02)
    return []
