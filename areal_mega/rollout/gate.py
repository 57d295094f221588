"""Lets requests end before new weights come (``sync.pause: drain``): every answer is then of one weight version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal_mega.rollout.inference import GenerateRequest, Generation
from areal_mega.rollout.workflow import GenerationEngine


class Gate:
    """An engine that can be closed: requests that come then wait, those under way go on."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """As the engine's, once the gate is open."""
        while not self._open.is_set():  # it may be closed again before a waiter gets its turn
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self._engine.generate(requests)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def close(self) -> None:
        """Let nothing new begin; returns when nothing runs."""
        self._open.clear()
        await self._idle.wait()

    def open(self) -> None:
        """Let everything go on."""
        self._open.set()
