"""Named points of a step at which a process can be held, so that a test can end any process of the run at exactly that moment.

Off unless the environment variable ``AREAL_MEGA_POINTS`` names a folder, which all processes of the run must see. A process that reaches
point P while there is a file P in that folder renames it to ``P.reached`` (so that of several processes one alone is held), and goes on
when that file is gone.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from areal_mega.core.errors import DeadlineExceeded

ENV = "AREAL_MEGA_POINTS"

POINTS = {
    "rollout.episode": "rollout worker: an episode has begun",
    "rollout.batch": "controller: the groups of a step are there",
    "train.loaded": "train rank: the step's samples are fetched and packed",
    "train.updated": "train rank: an optimizer update is done",
    "train.logged": "controller: the step's prompts are on record; the workers still hold its samples",
    "sync.grouped": "controller: the weight-sync groups are formed",
    "sync.filled": "controller: the first buckets are filled; generation goes on",
    "sync.paused": "controller: generation is paused",
    "sync.begun": "controller: every server has opened an update",
    "sync.bucket": "train rank: a bucket is about to be sent",
    "sync.received": "inference server: a bucket has come and is not loaded yet",
    "sync.sent": "controller: everything is sent; nothing is verified",
    "sync.verified": "controller: every server holds the new version; generation is still paused",
    "step.synced": "controller: more prompts may start",
    "step.evaluated": "controller: the evaluation is done",
    "step.exported": "controller: the export is complete",
    "step.logged": "controller: the step's metrics are written",
    "recover.copied": "train rank: its part of a recover checkpoint is copied",
    "recover.writing": "train rank: its part is about to be written",
    "recover.written": "controller: every rank has written its part",
    "recover.commit": "train rank 0: the checkpoint is complete and has not got its name yet",
    "recover.committed": "controller: the checkpoint has its name; older ones are still there",
    "recover.pruning": "controller: an older checkpoint has lost its name and not its files",
}
"""By name: who is held, and when."""

_POLL_S = 0.02
_LIMIT_S = 120.0


def reach(name: str) -> None:
    """Wait here, this thread alone, if somebody asked for it.

    Raises:
        DeadlineExceeded: nobody let it go on within two minutes.
    """
    if (held := _held(name)) is not None:
        end = time.monotonic() + _LIMIT_S
        while held.exists():
            _check(held, end)
            time.sleep(_POLL_S)


async def reached(name: str) -> None:
    """``reach`` on an event loop: this task alone waits."""
    if (held := _held(name)) is not None:
        end = time.monotonic() + _LIMIT_S
        while held.exists():
            _check(held, end)
            await asyncio.sleep(_POLL_S)


def _held(name: str) -> Path | None:
    assert name in POINTS, f"{name} is not in the list of points"
    folder = os.environ.get(ENV)
    if not folder:
        return None
    held = Path(folder, f"{name}.reached")
    try:
        Path(folder, name).rename(held)
    except FileNotFoundError:
        return None
    return held


def _check(held: Path, end: float) -> None:
    if time.monotonic() > end:
        raise DeadlineExceeded(f"held at {held.name.removesuffix('.reached')} for {_LIMIT_S:g} s; remove {held} to let it go on")
