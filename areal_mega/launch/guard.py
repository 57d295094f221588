"""Ends what a controller leaves behind when it dies without a chance to clean up (kill -9, out of memory).

Run by path as ``python -I -S guard.py MARKER PARENT_PID``. Standard input says, one a line: ``+SESSION`` to watch, ``-SESSION`` to
forget, ``done`` when the controller has cleaned up by itself. If the controller dies without ``done``, which its pid or the closed
pipe tells, every process of those sessions, or with the marker, is killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys

# Imported by its bare name: through the package it would need the installation, and take that long to start.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import processes


def main() -> None:
    marker, parent = sys.argv[1], int(sys.argv[2])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the guard outlives everyone that such a signal is meant for
    watched = select.poll()
    watched.register(0, select.POLLIN)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        parent_fd = -1
    if parent_fd >= 0:
        watched.register(parent_fd, select.POLLIN)
    sessions: set[int] = set()
    pending = b""
    alive = parent_fd >= 0 and os.getppid() == parent
    while alive:
        ready = {fd for fd, _ in watched.poll()}
        alive = parent_fd not in ready
        if 0 in ready:
            chunk = os.read(0, 65536)
            alive = alive and bool(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            if b"done" in lines:
                return
            for line in lines:
                (sessions.add if line.startswith(b"+") else sessions.discard)(int(line[1:]))
    processes.kill_members(sessions, marker)


main()
