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
