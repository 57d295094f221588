"""A proxy before a real inference server that breaks what passes: it hangs, delays, or changes answers, from a chosen moment on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

DELAY_S = 0.7
_POLL_S = 0.01
_START_OF = {"prefill": "/generate", "decode": "/generate", "paused": "/pause_generation", "mid-update": "/update_weights_from_disk"}
"""The request with which each phase begins."""


class FaultProxy:
    """Forwards everything to ``backend``.

    Args:
        kill: ends the server's process with SIGKILL.
    """

    def __init__(self, backend: str, kill: Callable[[], Awaitable[None]]) -> None:
        self.backend, self._kill = backend, kill
        self.url = ""
        self.hits = 0
        """Requests that a fault met."""
        self._fault = self._armed = self._phase = ""
        self._released = asyncio.Event()
        self.held = 0
        """Answers that are ready, and wait for the phase of a fault to begin."""
        self._begun = asyncio.Event()

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        self.clear()
        await self._session.close()
        await self._runner.cleanup()

    async def arm(self, fault: str, phase: str) -> None:
        """Let ``fault`` begin with ``phase``, and go on until ``clear``."""
        self.hits, self.held, self._armed, self._phase = 0, 0, fault, phase
        self._begun.clear()
        if phase == "idle":
            await self._begin()

    def clear(self) -> None:
        """All is well again; what hung is answered with an error."""
        self._fault = self._armed = self._phase = ""
        self._begun.set()
        self._released.set()
        self._released = asyncio.Event()

    async def _begin(self) -> None:
        fault, self._armed = self._armed, ""
        self._begun.set()
        if fault == "dies":
            self.hits += 1
            await self._kill()
        elif fault:
            self._fault = fault

    async def _handle(self, request: web.Request) -> web.Response:
        starts = bool(self._armed) and request.path == _START_OF[self._phase]
        if starts and self._phase == "mid-update" and self._armed != "dies":
            await self._begin()
        if self._fault == "hangs":
            return await self._hang()
        forward = asyncio.create_task(self._forward(request, await request.read()))
        try:
            if starts and self._armed:
                await self._wait_for_phase(forward)
                await self._begin()
            status, raw = await forward
            if request.path == "/generate" and self._phase in ("paused", "mid-update"):
                self.held += 1
                await self._begun.wait()  # a fast server, or a late pause, must not leave the fault without a request
            if starts and self._phase == "paused":
                return web.Response(status=status, body=raw, content_type="application/json")
        except (aiohttp.ClientError, OSError):
            assert request.transport is not None
            request.transport.abort()  # as the server's own death would show
            return web.Response(status=500)
        if self._fault == "hangs":
            return await self._hang()
        return web.Response(status=status, body=await self._changed(request.path, raw), content_type="application/json")

    async def _wait_for_phase(self, forward: asyncio.Task[Any]) -> None:
        if self._phase == "paused":
            await asyncio.wait({forward})
        elif self._phase == "decode":
            tokens = 0
            while not forward.done():
                async with self._session.get(self.backend + "/server_info") as answer:
                    state = (await answer.json())["internal_states"][0]
                if tokens and state["cached_tokens"] > tokens:
                    return
                tokens = state["cached_tokens"]
        else:
            await asyncio.sleep(_POLL_S)  # it is on its way

    async def _hang(self) -> web.Response:
        self.hits += 1
        await self._released.wait()
        return web.Response(status=500, text="the test is over")

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, bytes]:
        url = self.backend + request.path_qs
        async with self._session.request(request.method, url, data=body, headers={"Content-Type": "application/json"}) as answer:
            return answer.status, await answer.read()

    async def _changed(self, path: str, raw: bytes) -> bytes:
        """An answer as the fault leaves it."""
        updating = self._phase == "mid-update"
        if self._fault == "is slow" and path == (_START_OF["mid-update"] if updating else "/generate"):
            self.hits += 1
            await asyncio.sleep(DELAY_S)
        elif self._fault == "malformed JSON" and path == (_START_OF["mid-update"] if updating else "/generate"):
            self.hits += 1
            return raw[: len(raw) // 2]
        elif self._fault == "old version" and updating and path == "/weights_checker":
            self.hits += 1
            answer = json.loads(raw)
            return json.dumps(answer | {"weight_version": str(int(answer["weight_version"]) - 1)}).encode()
        elif self._fault == "other weights" and path == "/weights_checker":
            self.hits += 1
            answer = json.loads(raw)
            name = min(answer["hf_digests"])
            return json.dumps(answer | {"hf_digest": "0" * 16, "hf_digests": {**answer["hf_digests"], name: "0" * 16}}).encode()
        elif (
            path == "/generate"
            and self._fault in ("NaN", "old version", "too few samples")
            and not (updating and self._fault == "old version")
        ):
            self.hits += 1
            return _broken(self._fault, raw)
        return raw


def _broken(fault: str, raw: bytes) -> bytes:
    answers: list[dict[str, Any]] = json.loads(raw)
    if fault == "too few samples":
        return json.dumps(answers[:-1]).encode()
    meta = answers[0]["meta_info"]
    if fault == "NaN":
        meta["output_token_logprobs"][-1][0] = float("nan")
    else:
        for answer in answers:
            spans = answer["meta_info"]["weight_versions"]
            answer["meta_info"]["weight_versions"] = [span | {"version": str(int(span["version"]) - 1)} for span in spans]
    return json.dumps(answers).encode()
