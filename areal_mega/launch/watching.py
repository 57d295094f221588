"""What every launcher does: wait for processes to be ready, run work until one dies, and tell how a process ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError, WorkerDied
from areal_mega.launch.rundir import Key, RunDir

log = logging.getLogger(__name__)

_POLL_S = 0.05
_CLEANUP_S = 10.0
"""How long cancelled work may take to clean up (resume generation, close connections) before it is left to itself."""
_TAIL_LINES, _TAIL_BYTES = 20, 16384


class MachineLost(RunFailed):
    """A machine of the run is gone, with the processes on it; it, or another in its place, may come back."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A machine that is not there.

    Args:
        what: which, who would be on it, and what the cluster says of it.
        over: the cluster will not give it by itself.
    """

    what: str
    over: bool


async def wait_ready(
    run_dir: RunDir, keys: Iterable[Key], timeout_s: float, check: Callable[[], None], where: Callable[[Key], str] = lambda key: ""
) -> dict[Key, dict[str, Any]]:
    """Wait until all of ``keys`` have announced themselves, and return what they announced (see ``RunDir.announced``).

    Args:
        check: called again and again; raises the death of a process.
        where: what to add to a process's name where it is missing, e.g. `` on task 2``.

    Raises:
        DeadlineExceeded: names who is missing, their logs, and the logs' last lines.
    """
    wanted = tuple(keys)
    deadline = time.monotonic() + timeout_s
    while len(found := run_dir.announced(wanted)) < len(wanted):
        check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(_describe_missing(run_dir, [key for key in wanted if key not in found], timeout_s, where))
        await asyncio.sleep(_POLL_S)
    return found


async def supervise[T](work: Coroutine[Any, Any, T], watch: Coroutine[Any, Any, NoReturn], settle_s: float) -> T:
    """Run ``work`` beside ``watch``, which raises the first death; that cancels the work.

    A call that fails because its peer died fails a moment before the death itself can be seen, and a rank that lost its neighbour
    reports a broken connection: the death is the better story, so it is looked for, for ``settle_s``, before such a failure is raised.

    Raises:
        Exception: what ``watch`` raises; otherwise whatever ``work`` raises.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        error = task.exception() if task.done() and not task.cancelled() else None
        if error is not None and not isinstance(error, UserError):
            await asyncio.wait({watcher}, timeout=settle_s)
        if watcher.done() and (error is not None or not task.done()):
            raise watcher.exception() or AssertionError("watch never returns") from error
        return await task
    finally:
        await _cancel(task, watcher)


def death_of(run_dir: RunDir, key: Key, code: int) -> Exception:
    """The end of a process as the error that it is: a user's mistake that it left word of, or its death."""
    role, rank = key
    if (message := run_dir.user_error(role, rank)) is not None:
        return UserError(f"{role} rank {rank}: {message}")
    path = run_dir.log_path(role, rank)
    lines = tail(path)
    if role == "server" and code == 2 and lines:
        # A server is a program of its own: refusing its command line or its model, it exits with 2 and says why in its last line.
        return UserError(f"{role} rank {rank}: {lines.splitlines()[-1].removeprefix('error: ')} (log: {path})")
    return WorkerDied(role=role, rank=rank, cause=_cause(code), log=str(path), last_lines=lines)


def tail(path: Path) -> str:
    """The last lines of a log; empty where there is none yet."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").rstrip().splitlines()[-_TAIL_LINES:])
    except FileNotFoundError:
        return ""


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-code}"


def _describe_missing(run_dir: RunDir, missing: Sequence[Key], timeout_s: float, where: Callable[[Key], str]) -> str:
    names = ", ".join(f"{role} rank {rank}{where((role, rank))}" for role, rank in missing)
    lines = [f"not ready within launch.startup_timeout_s={timeout_s:g} s: {names}"]
    for role, rank in missing[:3]:  # more would only bury the first
        path = run_dir.log_path(role, rank)
        lines.append(f"  {role} rank {rank}; log: {path}; its last lines:")
        lines += [f"    {line}" for line in tail(path).splitlines()] or ["    (its log is empty)"]
    return "\n".join(lines)


async def _cancel(task: asyncio.Future[Any], watcher: asyncio.Future[Any]) -> None:
    """End both, and say what else went wrong in ``task`` while it cleaned up."""
    ended = task.done()
    task.cancel()
    watcher.cancel()
    await asyncio.wait({task, watcher}, timeout=_CLEANUP_S)
    for each in (task, watcher):
        error = each.exception() if each.done() and not each.cancelled() else None
        if error is not None and each is task and not ended:
            log.warning("while work was cancelled: %s: %s", type(error).__name__, error)
    if not task.done():
        log.warning("work did not end within %g s of being cancelled", _CLEANUP_S)
