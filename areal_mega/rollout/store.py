"""The trajectory store: arrays by key in a rollout worker's memory, counted to the byte, until the controller releases them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from areal_mega.core.types import RTensor

DEFAULT_BYTES = 4 << 30
"""Enough for about 300 M tokens: the store is a buffer between generation and training, not an archive."""


class TrajectoryStore:
    """Arrays under keys, with handles to them.

    ``limit`` bounds when *new* episodes may start (see `full`); episodes that are running may still put what they made.

    Args:
        owner: address (host:port) under which this process answers ``fetch``.
        limit: bytes from which no episode is started.
    """

    def __init__(self, owner: str, limit: int = DEFAULT_BYTES) -> None:
        assert limit > 0
        self.owner, self.limit = owner, limit
        self._arrays: dict[str, np.ndarray] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._nbytes

    @property
    def full(self) -> bool:
        """No new episode may start until some arrays are released."""
        return self._nbytes >= self.limit

    def __len__(self) -> int:
        return len(self._arrays)

    def put(self, arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, RTensor]:
        """Keep arrays under ``<prefix>/<name>`` and return their handles by name."""
        handles = {}
        for name, array in arrays.items():
            key = f"{prefix}/{name}"
            assert key not in self._arrays, f"the store holds {key} already"
            self._arrays[key] = array
            self._nbytes += array.nbytes
            handles[name] = RTensor(owner=self.owner, key=key, shape=array.shape, dtype=str(array.dtype), nbytes=array.nbytes)
        return handles

    def get(self, keys: Iterable[str]) -> list[np.ndarray]:
        """The arrays of these keys, in their order.

        Raises:
            KeyError: a key was never put here, or was released.
        """
        wanted = list(keys)
        missing = [key for key in wanted if key not in self._arrays]
        if missing:
            raise KeyError(
                f"{len(missing)} of {len(wanted)} keys are not in the store of {self.owner} (released or never put): {missing[:3]}"
            )
        return [self._arrays[key] for key in wanted]

    def release(self, keys: Iterable[str]) -> int:
        """Forget these keys and return the bytes freed. A key that is gone already frees nothing: a release may be sent twice."""
        freed = 0
        for key in keys:
            array = self._arrays.pop(key, None)
            freed += 0 if array is None else array.nbytes
        self._nbytes -= freed
        return freed
