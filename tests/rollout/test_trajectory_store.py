"""The store counts its bytes exactly and forgets what is released."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.rollout.store import TrajectoryStore


def arrays(n: int) -> dict[str, np.ndarray]:
    return {"input_ids": np.arange(n, dtype=np.int32), "loss_mask": np.ones(n, dtype=np.bool_)}


def test_handles_describe_their_arrays() -> None:
    store = TrajectoryStore("host:1")
    handle = store.put(arrays(3), "g/0/0")["input_ids"]
    assert (handle.owner, handle.key, handle.shape, handle.dtype, handle.nbytes) == ("host:1", "g/0/0/input_ids", (3,), "int32", 12)
    (array,) = store.get([handle.key])
    assert array.tolist() == [0, 1, 2]


@given(st.lists(st.one_of(st.integers(0, 40), st.tuples(st.integers(0, 30), st.booleans())), max_size=60))
def test_bytes_are_what_is_held(moves: list[Any]) -> None:
    """An integer puts a trajectory of that length; a pair releases an earlier one, perhaps twice."""
    store, held, freed, put = TrajectoryStore("host:1", limit=100), {}, 0, []
    for move in moves:
        if isinstance(move, int):
            handles = store.put(arrays(move), f"g{len(put)}/0/0")
            put.append(handles)
            held |= {h.key: h.nbytes for h in handles.values()}
        elif put:
            keys = [h.key for h in put[move[0] % len(put)].values()]
            freed = store.release(keys)
            assert freed == sum(held.pop(key, 0) for key in keys)
            if move[1]:
                assert store.release(keys) == 0
        assert store.nbytes == sum(held.values())
        assert len(store) == len(held)
        assert store.full == (store.nbytes >= 100)
        assert [a.nbytes for a in store.get(held)] == list(held.values())


def test_missing_keys_are_named() -> None:
    store = TrajectoryStore("host:1")
    key = store.put(arrays(1), "g/0/0")["input_ids"].key
    store.release([key])
    with pytest.raises(KeyError, match="1 of 2 keys are not in the store of host:1"):
        store.get(["g/0/0/loss_mask", key])


def test_a_key_is_put_once() -> None:
    store = TrajectoryStore("host:1")
    store.put(arrays(1), "g/0/0")
    with pytest.raises(AssertionError, match="g/0/0/input_ids"):
        store.put(arrays(1), "g/0/0")
