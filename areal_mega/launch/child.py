"""Becomes another program, after asking the kernel for what must hold before its first instruction.

Run by path as ``python -I -S child.py PARENT_PID CPUS PROGRAM ARGUMENT…``: die when the parent dies; stay on these CPUs
(``-`` for any). Doing it here rather than between fork and exec keeps Python out of the forked copy of a threaded process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cpus, program, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[3:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    if cpus != "-":
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    try:
        os.execvp(program, arguments)
    except OSError as error:
        sys.exit(f"cannot run {program}: {error.strerror}")


main()
