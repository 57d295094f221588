"""How a call fails: the peer raised, the peer is gone, or (``DeadlineExceeded``, in core) the peer is silent."""

from __future__ import annotations

from areal_mega.core.errors import RunFailed


class RpcError(RunFailed):
    """The peer answered that the call failed.

    Args:
        peer: who was called, e.g. ``train rank 0``.
        method: what was called.
        kind: name of the exception there, e.g. ``ValueError``.
        message: its message.
        remote_traceback: its traceback, as text; empty where the peer refused the call.
    """

    def __init__(self, *, peer: str, method: str, kind: str, message: str, remote_traceback: str = "") -> None:
        self.peer, self.method, self.kind, self.message, self.remote_traceback = peer, method, kind, message, remote_traceback
        indented = "".join(f"\n    {line}" for line in remote_traceback.rstrip().splitlines())
        super().__init__(f"{peer}: {method}: {kind}: {message}" + (f"\n  its traceback:{indented}" if indented else ""))


class PeerUnreachable(RunFailed, ConnectionError):
    """The peer cannot be connected to, or went away in mid-call. Whether the call had an effect is unknown in the second case."""

    def __init__(self, *, peer: str, address: str, method: str, reason: str) -> None:
        self.peer, self.address, self.method, self.reason = peer, address, method, reason
        super().__init__(f"{peer} at {address} is unreachable (calling {method}): {reason}")
