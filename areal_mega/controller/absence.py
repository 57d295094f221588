"""The wait for machines, while no replica is there and only machines could bring one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.launch.machines import Launcher

_POLL_S = 0.05
_LOOK_S = 10.0
"""How often Slurm's word is looked at while nobody is there."""
_SAY_S = 60.0
"""How often a wait says what it waits for."""
_LOOKS = 3
"""So often in a row Slurm says that no task will come by itself until that is believed: a requeued one may look ended for a moment."""


async def bound_absence(launcher: Launcher, is_absent: Callable[[], bool], *, queue_s: float, say: Callable[[str], None]) -> None:
    """While nobody is there say so now and then, and end the wait in time. Returns never.

    Args:
        is_absent: whether nobody is there, and only machines could bring somebody.
        queue_s: longest wait, in seconds.

    Raises:
        DeadlineExceeded: nobody came for so long.
        RunFailed: nobody will come.
    """
    began = looked = said = -math.inf
    looks = 0
    while True:
        await asyncio.sleep(_POLL_S)
        if not is_absent():
            began = looked = said = -math.inf
            looks = 0
            continue
        now = time.monotonic()
        began = now if began == -math.inf else began
        if now - looked < _LOOK_S:
            continue
        looked = now
        absent = await launcher.absent()
        what = "; ".join(machine.what for machine in absent)
        looks = looks + 1 if absent and all(machine.over for machine in absent) else 0
        if looks >= _LOOKS:
            raise RunFailed(f"no replica is left, and none will come by itself: {what}")
        if now - began > queue_s:
            raise DeadlineExceeded(f"no replica came within launch.slurm.queue_timeout_s={queue_s:g} s: {what}")
        if now - said >= _SAY_S:
            said = now
            say(f"no replica is there; the run waits, at most launch.slurm.queue_timeout_s={queue_s:g} s, for {what}")
