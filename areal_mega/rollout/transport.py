"""HTTP to an inference server: every request has a deadline, every failure a name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from areal_mega.core.errors import DeadlineExceeded
from areal_mega.rollout.inference import ServerFault

_HEALTH_PAUSE_S = 0.2
_HEALTH_S = 10.0


class Transport:
    """Requests to one server.

    Args:
        base_url: ``http://host:port``.
        timeout_s: deadline of one request where none is given.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self.base_url, self.timeout_s = base_url.rstrip("/"), timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        fallback: str = "",
        plain: bool = False,
    ) -> Any:
        """The decoded answer; None for an empty one.

        Args:
            fallback: the route's name on other versions, tried on 404.
            plain: the answer is no JSON, and not looked at.

        Raises:
            ServerFault: no connection, another status, malformed JSON.
            DeadlineExceeded: no answer in time.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        if self._session is None:
            # A connection per request: a kept one may be closed by the server just as a call is sent, and admin calls are never repeated.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
            )
        try:
            async with asyncio.timeout(limit), self._session.request(method, self.base_url + path, json=body) as response:
                status, raw = response.status, await response.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"inference server {self.base_url} did not answer {path} within {limit:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            what = f"{path}: connection failed: {error or type(error).__name__}"
            raise ServerFault(self.base_url, what, is_unreachable=True) from error
        if status == 404 and fallback:
            return await self.request(method, fallback, body, timeout_s=timeout_s, plain=plain)
        if status != 200:
            raise ServerFault(self.base_url, f"{path} answered {status}: {raw.decode(errors='replace').strip()[:500]}", status=status)
        if not raw or plain:
            return None
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ServerFault(self.base_url, f"{path} answered malformed JSON: {raw[:100]!r}") from error

    async def wait_healthy(self, deadline_s: float) -> None:
        """Wait until ``/health`` answers 200.

        Raises:
            DeadlineExceeded: it did not; says what it did last.
        """
        end, last = time.monotonic() + deadline_s, "no connection was possible"
        while time.monotonic() < end:
            try:
                await self.request("GET", "/health", timeout_s=min(_HEALTH_S, deadline_s), plain=True)
                return
            except (ServerFault, DeadlineExceeded) as error:
                last = str(error)
            await asyncio.sleep(_HEALTH_PAUSE_S)
        raise DeadlineExceeded(f"inference server {self.base_url} was not healthy within {deadline_s:g} s; last: {last}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
