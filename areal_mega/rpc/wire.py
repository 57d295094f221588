"""What both ends of a call agree on: paths, headers, error bodies, addresses."""

from __future__ import annotations

import socket
import traceback
from typing import Any

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.rpc.errors import RpcError

PATH = "/rpc/"
CONTENT_TYPE = "application/msgpack"
BUFFER_BYTES = 4 * 2**20
"""Read buffer per connection: aiohttp's default of 64 KiB stops and restarts the socket far too often for bodies of many MB."""

OK, BAD_REQUEST, UNAUTHORIZED, NOT_FOUND, FAILED = 200, 400, 401, 404, 500


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and port of ``host:port`` or ``[v6]:port``."""
    host, _, port = address.rpartition(":")
    assert host and port.isdigit(), f"not an address: {address!r}"
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen_socket(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket; port 0 lets the system choose.

    Raises:
        UserError: the name does not resolve, is no address of this machine, stands for all of them, or the port is taken.
    """
    if host in ("", "0.0.0.0", "::"):
        raise UserError(f"cannot listen on {host or 'an empty host'}: others must be told one address; set launch.host to it")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(
            f"cannot listen on {host}: the name does not resolve ({error}); set launch.host to this machine's address"
        ) from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        remedy = "set launch.host to an address of this machine, or free the port"
        raise UserError(f"cannot listen on {format_address(host, port)}: {error.strerror}; {remedy}") from error
    return sock


def error_body(error: BaseException, *, with_traceback: bool = True) -> dict[str, Any]:
    """What is sent for a call that failed."""
    crosses = "user" if isinstance(error, UserError) else "deadline" if isinstance(error, DeadlineExceeded) else "error"
    text = "".join(traceback.format_exception(error)) if with_traceback else ""
    return {"crosses": crosses, "kind": type(error).__name__, "message": str(error), "traceback": text}


def error_from_body(body: Any, *, peer: str, method: str) -> Exception:
    """The exception to raise at the caller: a user's mistake and an expired deadline stay what they are."""
    match body:
        case {"crosses": "user", "message": str(message)}:
            return UserError(message)
        case {"crosses": "deadline", "message": str(message)}:
            return DeadlineExceeded(f"{peer}: {message}")
        case {"kind": str(kind), "message": str(message), "traceback": str(text)}:
            return RpcError(peer=peer, method=method, kind=kind, message=message, remote_traceback=text)
        case _:
            return RpcError(peer=peer, method=method, kind="ProtocolError", message=f"an error body of an unknown form: {body!r:.200}")
