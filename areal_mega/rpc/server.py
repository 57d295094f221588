"""The serving end of calls: named async handlers behind HTTP POST, one bearer token per run."""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from areal_mega.rpc import wire
from areal_mega.rpc.codec import CodecError, decode, encode

log = logging.getLogger(__name__)

AsyncHandler = Callable[..., Awaitable[Any]]


class RpcServer:
    """Serves ``await handler(**kwargs)`` for every registered method, any number at a time.

    A caller that goes away does not cancel its handler: a train step that lost its caller ends as a whole.

    Args:
        token: what callers must show.
        name: who this is, for logs and the ``health`` method, e.g. ``rollout rank 0``.
    """

    def __init__(self, token: str, name: str) -> None:
        assert token, "an RPC server needs a token"
        self.name = name
        self._expected = f"Bearer {token}".encode()
        self._handlers: dict[str, AsyncHandler] = {}
        self._runner: web.AppRunner | None = None
        self.register("health", self._health)

    def register(self, method: str, handler: AsyncHandler) -> None:
        """Serve ``handler`` as ``method``. Registering ``health`` again replaces the built-in one."""
        assert method == "health" or method not in self._handlers, f"{self.name}: method {method} is registered twice"
        self._handlers[method] = handler

    async def start(self, host: str, port: int = 0) -> str:
        """Listen, and return the address ``host:port``.

        Raises:
            UserError: the host does not resolve or is no address of this machine, or the port is taken.
        """
        assert self._runner is None, f"{self.name}: started twice"
        sock = wire.listen_socket(host, port)
        app = web.Application(client_max_size=0)  # 0: no bound; batches of arrays are as large as they are
        app.router.add_post(wire.PATH + "{method}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, read_bufsize=wire.BUFFER_BYTES, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()
        return wire.format_address(host, sock.getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and end what is running. Harmless when not started."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _health(self) -> dict[str, Any]:
        return {"name": self.name, "pid": os.getpid()}

    async def _answer(self, request: web.Request) -> web.Response:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(shown, self._expected):
            log.warning("refused a call from %s: wrong token", request.remote)
            return _refuse(wire.UNAUTHORIZED, "Unauthorized", "wrong token: the caller belongs to another run or attempt")
        method = request.match_info["method"]
        handler = self._handlers.get(method)
        if handler is None:
            return _refuse(wire.NOT_FOUND, "UnknownMethod", f"{self.name} has no method {method!r}; it has {sorted(self._handlers)}")
        try:
            kwargs = decode(await request.read())
            if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
                raise CodecError("not a valid body: arguments come as a map with names as keys")
        except CodecError as error:
            return _refuse(wire.BAD_REQUEST, "CodecError", str(error))
        return await self._call(method, handler, kwargs)

    async def _call(self, method: str, handler: AsyncHandler, kwargs: dict[str, Any]) -> web.Response:
        try:
            return web.Response(body=encode(await handler(**kwargs)), content_type=wire.CONTENT_TYPE)
        except Exception as error:  # whatever went wrong is the caller's to know: it gets type, message and traceback
            log.warning("%s: %s failed", self.name, method, exc_info=True)
            return web.Response(status=wire.FAILED, body=encode(wire.error_body(error)), content_type=wire.CONTENT_TYPE)


def _refuse(status: int, kind: str, message: str) -> web.Response:
    body = encode({"crosses": "error", "kind": kind, "message": message, "traceback": ""})
    return web.Response(status=status, body=body, content_type=wire.CONTENT_TYPE)
