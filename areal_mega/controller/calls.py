"""Calls to several workers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def gather_all[T](calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure is raised as it is, and the other calls are given up: their peers wait for the failed one."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Uncut:
    """Work that goes on to its end when whoever waits for it is cancelled: a cut in the middle of it would lose something."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``. Where nobody waited any more for one that failed, the next call raises why."""
        if self._failure is not None:
            work.close()
            raise self._failure
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._left_alone)
            raise

    def _left_alone(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
