"""The calling end: one client per peer. A call is sent once, never again: most calls change something at the other end."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp

from areal_mega.core.errors import DeadlineExceeded
from areal_mega.rpc import wire
from areal_mega.rpc.codec import CodecError, decode, encode
from areal_mega.rpc.errors import PeerUnreachable, RpcError

__all__ = ["PeerUnreachable", "RpcClient", "RpcError"]

_CONNECT_S = 30.0
_DEAD_HOST = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A process that dies closes its sockets at once; a machine that loses power does not. Keep-alive probes notice it within 30 s."""


class RpcClient:
    """Calls the methods of one peer. Belongs to the event loop of its first call.

    Args:
        address: ``host:port``.
        token: the run's.
        peer: who is there, for error messages, e.g. ``train rank 0``.
    """

    def __init__(self, address: str, token: str, peer: str) -> None:
        self.address, self.peer = address, peer
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": wire.CONTENT_TYPE}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        """``await handler(**kwargs)`` at the peer.

        Raises:
            DeadlineExceeded: no answer within ``timeout_s`` seconds; or the peer's own deadline expired.
            PeerUnreachable: the connection is refused, or broke before the answer was whole.
            UserError: the peer found a user's mistake.
            RpcError: the peer raised anything else, or refused the call (token, method, body).
            CodecError: an argument cannot be encoded.
        """
        body = encode(kwargs)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, _CONNECT_S))
        try:
            url = f"http://{self.address}{wire.PATH}{method}"
            async with self._open_session().post(url, data=body, headers=self._headers, timeout=timeout) as response:
                status, answer = response.status, await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise self._unreachable(method, f"no connection within {timeout.sock_connect:g} s") from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.peer} at {self.address} did not answer {method} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(method, str(error) or type(error).__name__) from error
        return self._result(method, status, answer)

    async def close(self) -> None:
        """Close the connections. The client may be used again afterwards."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # limit=0: any number of connections, for long polls must not starve short calls.
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=wire.BUFFER_BYTES)
            self._loop = asyncio.get_running_loop()
        assert self._loop is asyncio.get_running_loop(), f"the client of {self.peer} belongs to another event loop; close it there first"
        return self._session

    def _unreachable(self, method: str, reason: str) -> PeerUnreachable:
        return PeerUnreachable(peer=self.peer, address=self.address, method=method, reason=reason)

    def _result(self, method: str, status: int, answer: bytes) -> Any:
        try:
            content = decode(answer)
        except CodecError as error:
            message = f"HTTP {status} with a body that is no answer of ours ({error}); is something else listening there?"
            raise RpcError(peer=self.peer, method=method, kind="ProtocolError", message=message) from error
        if status == wire.OK:
            return content
        raise wire.error_from_body(content, peer=f"{self.peer} at {self.address}", method=method)


def _watched_socket(info: Any) -> socket.socket:
    family, kind, protocol, _, _ = info
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _DEAD_HOST.items():
        if hasattr(socket, name):  # the option's name differs on other systems; there the system's default holds
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
