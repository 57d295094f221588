"""The store counts its bytes exactly, keeps no more than its bound in memory, and forgets what is released."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.core.errors import UserError
from areal_mega.rollout.store import TrajectoryStore


def arrays(n: int) -> dict[str, np.ndarray]:
    return {"input_ids": np.arange(n, dtype=np.int32), "loss_mask": np.ones(n, dtype=np.bool_)}


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    return TrajectoryStore("host:1", limit=1 << 20, folder=tmp_path / "spill")


def test_handles_describe_their_arrays(store: TrajectoryStore) -> None:
    handle = store.put(arrays(3), "g/0/0")["input_ids"]
    assert (handle.owner, handle.key, handle.shape, handle.dtype, handle.nbytes) == ("host:1", "g/0/0/input_ids", (3,), "int32", 12)
    (array,) = store.get([handle.key])
    assert array.tolist() == [0, 1, 2]


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 40), st.tuples(st.integers(0, 30), st.booleans())), max_size=60), st.integers(0, 300))
def test_bytes_are_what_is_held_and_memory_is_bounded(moves: list[Any], limit: int) -> None:
    """An integer puts a trajectory of that length; a pair releases an earlier one, perhaps twice."""
    with tempfile.TemporaryDirectory() as folder:
        store, held, lengths, put = TrajectoryStore("host:1", limit=limit, folder=Path(folder, "spill")), {}, {}, []
        for move in moves:
            if isinstance(move, int):
                handles = store.put(arrays(move), f"g{len(put)}/0/0")
                put.append(handles)
                held |= {h.key: h.nbytes for h in handles.values()}
                lengths |= {h.key: move for h in handles.values()}
            elif put:
                keys = [h.key for h in put[move[0] % len(put)].values()]
                freed = store.release(keys)
                assert freed == sum(held.pop(key, 0) for key in keys)
                if move[1]:
                    assert store.release(keys) == 0
            assert store.nbytes == sum(held.values())
            assert store.nbytes - store.spilled_nbytes <= limit
            assert len(store) == len(held)
            for key, array in zip(held, store.get(held), strict=True):
                expected = arrays(lengths[key])[key.rsplit("/", 1)[1]]
                assert array.dtype == expected.dtype and (array == expected).all()
        store.release(list(held))
        assert (store.nbytes, store.spilled_nbytes, len(store)) == (0, 0, 0)
        assert not list(Path(folder).rglob("*.raw"))
        store.close()
        assert os.listdir(folder) == []


def test_what_is_mapped_outlives_its_release(tmp_path: Path) -> None:
    store = TrajectoryStore("host:1", limit=0, folder=tmp_path / "spill")
    key = store.put(arrays(1000), "g/0/0")["input_ids"].key
    (array,) = store.get([key])
    assert not array.flags.writeable
    store.release([key, "g/0/0/loss_mask"])
    assert list(tmp_path.rglob("*.raw")) == []
    assert (array == np.arange(1000)).all()


def test_what_an_earlier_attempt_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    (tmp_path / "spill/7.raw").write_bytes(b"old")
    store = TrajectoryStore("host:1", limit=0, folder=tmp_path / "spill")
    store.put(arrays(1), "g/0/0")
    assert [path.name for path in (tmp_path / "spill").iterdir()] == ["0.raw"]


def test_a_file_that_finds_no_room_is_removed(tmp_path: Path) -> None:
    """A bound on the size of files stands in for a full disk."""
    store = TrajectoryStore("host:1", limit=0, folder=tmp_path / "spill")
    store.put(arrays(1), "g/0/0")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write 5,000 bytes .* \(File too large\) beside the 5 there; free space, or raise"):
            store.put(arrays(1000), "g/1/0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in (tmp_path / "spill").iterdir()] == ["0.raw"] and store.nbytes == 5 and len(store) == 2
    store.put(arrays(1000), "g/1/0")


def test_missing_keys_are_named(store: TrajectoryStore) -> None:
    key = store.put(arrays(1), "g/0/0")["input_ids"].key
    store.release([key])
    with pytest.raises(KeyError, match="1 of 2 keys are not in the store of host:1"):
        store.get(["g/0/0/loss_mask", key])


def test_a_key_is_put_once(store: TrajectoryStore) -> None:
    store.put(arrays(1), "g/0/0")
    with pytest.raises(AssertionError, match="g/0/0/input_ids"):
        store.put(arrays(1), "g/0/0")
