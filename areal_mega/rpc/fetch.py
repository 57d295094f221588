"""Arrays by their handles, from all the processes that hold them at once, over several connections to each."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from areal_mega.core.types import RTensor
from areal_mega.rpc.client import RpcClient

_CONNECTIONS = 4
"""Calls to one owner at a time: while one answer is copied from the socket, the owner encodes the next."""
_LEAST_BYTES = 1 << 20
"""A call for less is not split further: its overhead would outweigh what is gained."""
_SMALL_BYTES = 1 << 16
"""Smaller arrays travel end to end, one run of them for each dtype: a batch has thousands, and each costs more than its bytes."""

Bundle = dict[str, Any]
"""``flat``: by dtype, the small arrays end to end; ``whole``: the other ones."""


def bundle(arrays: Sequence[np.ndarray]) -> Bundle:
    """What ``fetch`` answers for these."""
    small: dict[np.dtype, list[np.ndarray]] = defaultdict(list)  # numpy takes microseconds to name one
    whole: list[np.ndarray] = []
    for array in arrays:
        if array.nbytes < _SMALL_BYTES:
            small[array.dtype].append(array.reshape(-1))
        else:
            whole.append(array)
    return {"flat": {str(dtype): np.concatenate(parts) for dtype, parts in small.items()}, "whole": whole}


def unbundle(content: Bundle, handles: Sequence[RTensor]) -> list[np.ndarray]:
    """The arrays of these handles, as views.

    Raises:
        AssertionError: they are of other shapes or dtypes than the handles say.
    """
    flat, whole, at = content["flat"], iter(content["whole"]), dict.fromkeys(content["flat"], 0)
    assert all(str(run.dtype) == dtype and run.ndim == 1 for dtype, run in flat.items()), "runs are of the dtypes that they are called by"
    out: list[np.ndarray] = []
    for handle in handles:
        if handle.nbytes < _SMALL_BYTES:
            start = at[handle.dtype]
            at[handle.dtype] = end = start + prod(handle.shape)
            array = flat[handle.dtype][start:end].reshape(handle.shape)
        else:
            array = next(whole)
            assert (array.shape, str(array.dtype)) == (handle.shape, handle.dtype), f"{handle} came as {array.dtype} {array.shape}"
        out.append(array)
    assert all(at[dtype] == len(run) for dtype, run in flat.items()) and next(whole, None) is None, "more came than was asked for"
    return out


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
            wanted = [handles[name] for name in names]
            content = await self._client(owner).call("fetch", keys=[handle.key for handle in wanted], timeout_s=timeout_s)
            out.update(zip(names, unbundle(content, wanted), strict=True))

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
