"""Arrays by their handles, from all the processes that hold them at once, over several connections to each."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from areal_mega.core.types import RTensor
from areal_mega.rpc.client import RpcClient

_CONNECTIONS = 4
"""Calls to one owner at a time: while one answer is copied from the socket, the owner encodes the next."""
_LEAST_BYTES = 1 << 20
"""A call for less is not split further: its overhead would outweigh what is gained."""


class Fetcher:
    """Calls ``fetch`` of rollout workers. Belongs to the event loop of its first call.

    Args:
        token: the run's.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._owners: dict[str, RpcClient] = {}

    async def fetch[K: Hashable](self, handles: Mapping[K, RTensor], *, timeout_s: float) -> dict[K, np.ndarray]:
        """The array of every handle, read-only: a view of the bytes that came.

        Raises:
            RpcError: an owner no longer has a key.
            DeadlineExceeded, PeerUnreachable: it does not answer; the message names it.
        """
        by_owner: dict[str, list[K]] = defaultdict(list)
        for name, handle in handles.items():
            by_owner[handle.owner].append(name)
        out: dict[K, np.ndarray] = {}

        async def part(owner: str, names: Sequence[K]) -> None:
            keys = [handles[name].key for name in names]
            for name, array in zip(names, await self._client(owner).call("fetch", keys=keys, timeout_s=timeout_s), strict=True):
                handle = handles[name]
                assert array.shape == handle.shape, f"{handle.key} is {array.shape} where the handle says {handle.shape}"
                out[name] = array

        calls = [
            asyncio.ensure_future(part(owner, share))
            for owner, names in by_owner.items()
            for share in shares(names, [handles[name].nbytes for name in names])
        ]
        try:
            await asyncio.gather(*calls)  # the first failure is raised as it is, and the others are given up
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return out

    async def close(self) -> None:
        for client in self._owners.values():
            await client.close()
        self._owners.clear()

    def _client(self, owner: str) -> RpcClient:
        return self._owners.setdefault(owner, RpcClient(owner, self._token, peer=f"rollout worker at {owner}"))


def shares[T](items: Sequence[T], nbytes: Sequence[int]) -> list[list[T]]:
    """Split items, in order, into at most ``_CONNECTIONS`` parts of about equal bytes, none much below ``_LEAST_BYTES``."""
    total = sum(nbytes)
    count = max(1, min(_CONNECTIONS, total // _LEAST_BYTES, len(items)))
    parts: list[list[T]] = [[] for _ in range(count)]
    before = 0
    for item, size in zip(items, nbytes, strict=True):
        parts[min(count - 1, before * count // total if total else 0)].append(item)
        before += size
    return [part for part in parts if part]
