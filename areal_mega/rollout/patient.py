"""An engine that does not fail at once when its server is gone: the launcher sees the death a moment later, and may start it again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal_mega.rollout.inference import GenerateRequest, Generation, InferenceServer, ServerFault

_GRACE_S = 5.0
"""Within this the controller has suspended the episodes of a dead server; one that is not dead has failed for itself."""


class Patient:
    """Generates with ``server``; a request whose connection failed is held back before the failure is told."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """As the server's."""
        try:
            return await self._server.generate(requests)
        except ServerFault as fault:
            if fault.is_unreachable:
                await asyncio.sleep(_GRACE_S)
            raise
