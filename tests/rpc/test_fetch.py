"""Arrays come by their handles from whoever holds them, each once, over several calls where there is much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal_mega.core.types import RTensor
from areal_mega.rpc.codec import decode, encode
from areal_mega.rpc.errors import RpcError
from areal_mega.rpc.fetch import Bundle, Fetcher, bundle, shares, unbundle
from areal_mega.rpc.server import RpcServer


class Owner:
    """Holds arrays, and remembers the calls."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.calls: list[int] = []

    async def fetch(self, keys: Sequence[str]) -> Bundle:
        self.calls.append(len(keys))
        return bundle([self.arrays[key] for key in keys])

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


ARRAYS = st.sampled_from(["i4", "f4", "bool", "i8"]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), elements=st.just(1))
)


@given(st.lists(st.one_of(ARRAYS, st.integers(16_380, 16_390).map(lambda n: np.arange(n, dtype=np.int32))), max_size=12))
def test_small_arrays_travel_end_to_end_and_come_apart_again(arrays: list[np.ndarray]) -> None:
    owner = Owner()
    handles = [owner.put("a:1", str(i), array) for i, array in enumerate(arrays)]
    content = decode(encode(bundle(arrays)))
    back = unbundle(content, handles)
    for array, found in zip(arrays, back, strict=True):
        assert (found.dtype, found.shape) == (array.dtype, array.shape) and np.array_equal(found, array)
        assert found.flags.aligned and not (found.size and found.flags.writeable)
    if handles and arrays[-1].size:
        with pytest.raises(AssertionError, match="more came than was asked for"):
            unbundle(content, handles[:-1])


@given(st.lists(st.integers(0, 3_000_000), max_size=30))
def test_shares_are_everything_in_order_and_about_equal(sizes: list[int]) -> None:
    parts = shares(list(range(len(sizes))), sizes)
    assert [item for part in parts for item in part] == list(range(len(sizes)))
    assert len(parts) <= 4 and all(parts)
    if sum(sizes) < 2 << 20:
        assert len(parts) <= 1
    for part in parts[:-1]:
        assert sum(sizes[i] for i in part) <= sum(sizes) / len(parts) + max(sizes) + sum(sizes) / 4
