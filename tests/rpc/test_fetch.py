"""Arrays come by their handles from whoever holds them, each once, over several calls where there is much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.core.types import RTensor
from areal_mega.rpc.errors import RpcError
from areal_mega.rpc.fetch import Fetcher, shares
from areal_mega.rpc.server import RpcServer


class Owner:
    """Holds arrays, and remembers the calls."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.calls: list[int] = []

    async def fetch(self, keys: Sequence[str]) -> list[np.ndarray]:
        self.calls.append(len(keys))
        return [self.arrays[key] for key in keys]

    def put(self, address: str, key: str, array: np.ndarray) -> RTensor:
        self.arrays[key] = array
        return RTensor(owner=address, key=key, shape=array.shape, dtype=str(array.dtype), nbytes=array.nbytes)


async def test_from_two_owners_over_several_connections() -> None:
    owners, servers, handles = [Owner(), Owner()], [], {}
    for number, owner in enumerate(owners):
        server = RpcServer("token", f"owner {number}")
        server.register("fetch", owner.fetch)
        servers.append(server)
        address = await server.start("127.0.0.1")
        for i in range(20 if number else 3):
            array = np.full(200_000 if number else 10, i, dtype=np.float32)
            handles[number, i] = owner.put(address, f"k{i}", array)
    fetcher = Fetcher("token")
    try:
        got = await fetcher.fetch(handles, timeout_s=60)
        assert got.keys() == handles.keys()
        assert all((array == i).all() and array.shape == handles[n, i].shape for (n, i), array in got.items())
        assert owners[0].calls == [3] and owners[1].calls == [5, 5, 5, 5]
        del owners[1].arrays["k7"]
        with pytest.raises(RpcError, match="k7"):
            await fetcher.fetch(handles, timeout_s=60)
    finally:
        await fetcher.close()
        for server in servers:
            await server.stop()


@given(st.lists(st.integers(0, 3_000_000), max_size=30))
def test_shares_are_everything_in_order_and_about_equal(sizes: list[int]) -> None:
    parts = shares(list(range(len(sizes))), sizes)
    assert [item for part in parts for item in part] == list(range(len(sizes)))
    assert len(parts) <= 4 and all(parts)
    if sum(sizes) < 2 << 20:
        assert len(parts) <= 1
    for part in parts[:-1]:
        assert sum(sizes[i] for i in part) <= sum(sizes) / len(parts) + max(sizes) + sum(sizes) / 4
