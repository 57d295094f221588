"""The trajectory store: arrays by key, counted to the byte, until the controller releases them.

Up to a bound they are in memory. A trajectory that does not fit is written to a file of its own and mapped when it is fetched: batches
are made oldest first, so what comes last is what is wanted last.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from areal_mega.core.errors import UserError
from areal_mega.core.types import RTensor

_ALIGN = 64


@dataclass
class _File:
    """One spilled trajectory: raw arrays end to end, each at a multiple of 64 bytes. Removed with its last key."""

    path: Path
    keys: int


@dataclass(frozen=True, slots=True)
class _Spilled:
    file: _File
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int


class TrajectoryStore:
    """Arrays under keys, with handles to them.

    Args:
        owner: address (host:port) under which this process answers ``fetch``.
        limit: bytes kept in memory.
        folder: where the rest goes; made when the first file is written, and emptied first. Nobody else may use it.
    """

    def __init__(self, owner: str, *, limit: int, folder: Path) -> None:
        assert limit >= 0
        self.owner, self.limit = owner, limit
        self._folder = folder
        self._arrays: dict[str, np.ndarray] = {}
        self._spilled: dict[str, _Spilled] = {}
        self._nbytes = self._spilled_nbytes = self._files = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now, in memory and in files."""
        return self._nbytes + self._spilled_nbytes

    @property
    def spilled_nbytes(self) -> int:
        """Those of them in files."""
        return self._spilled_nbytes

    def __len__(self) -> int:
        return len(self._arrays) + len(self._spilled)

    def put(self, arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, RTensor]:
        """Keep arrays under ``<prefix>/<name>`` and return their handles by name.

        Raises:
            UserError: a file cannot be written (the disk is full, …); nothing of these arrays is kept.
        """
        keyed = {f"{prefix}/{name}": array for name, array in arrays.items()}
        for key in keyed:
            assert key not in self._arrays and key not in self._spilled, f"the store holds {key} already"
        size = sum(array.nbytes for array in arrays.values())
        if size and self._nbytes + size > self.limit:
            try:
                self._spill(keyed)
            except OSError as error:
                raise UserError(
                    f"cannot write {size:,} bytes of trajectories to {self._folder} ({error.strerror or error}) beside the "
                    f"{self._spilled_nbytes:,} there; free space, or raise rollout.store_mb (now {self.limit / 2**20:g})"
                ) from error
            self._spilled_nbytes += size
        else:
            self._arrays |= keyed
            self._nbytes += size
        return {
            name: RTensor(owner=self.owner, key=f"{prefix}/{name}", shape=array.shape, dtype=_name(array.dtype), nbytes=array.nbytes)
            for name, array in arrays.items()
        }

    def get(self, keys: Iterable[str]) -> list[np.ndarray]:
        """The arrays of these keys, in their order; those in files mapped read-only.

        Raises:
            KeyError: a key was never put here, or was released.
        """
        wanted = list(keys)
        missing = [key for key in wanted if key not in self._arrays and key not in self._spilled]
        if missing:
            raise KeyError(
                f"{len(missing)} of {len(wanted)} keys are not in the store of {self.owner} (released or never put): {missing[:3]}"
            )
        maps: dict[Path, np.ndarray] = {}  # one mapping per file, however many of its arrays are wanted
        return [self._arrays[key] if key in self._arrays else _mapped(self._spilled[key], maps) for key in wanted]

    def release(self, keys: Iterable[str]) -> int:
        """Forget these keys and return the bytes freed. A key that is gone already frees nothing: a release may be sent twice."""
        freed = freed_spilled = 0
        for key in keys:
            if (array := self._arrays.pop(key, None)) is not None:
                freed += array.nbytes
            elif (spilled := self._spilled.pop(key, None)) is not None:
                freed_spilled += spilled.nbytes
                spilled.file.keys -= 1
                if not spilled.file.keys:  # whoever still has it mapped keeps its pages
                    spilled.file.path.unlink()
        self._nbytes -= freed
        self._spilled_nbytes -= freed_spilled
        return freed + freed_spilled

    def close(self) -> None:
        """Forget everything and remove the folder."""
        self._arrays.clear()
        self._spilled.clear()
        if self._files:
            shutil.rmtree(self._folder)
        self._nbytes = self._spilled_nbytes = self._files = 0

    def _spill(self, keyed: Mapping[str, np.ndarray]) -> None:
        if not self._files:
            shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier attempt of this run, which was killed
            self._folder.mkdir(parents=True)
        file = _File(self._folder / f"{self._files}.raw", len(keyed))
        self._files += 1
        try:
            with file.path.open("wb") as out:
                self._spilled |= _write(out, file, keyed)
        except OSError:
            file.path.unlink(missing_ok=True)
            raise


def _write(out: BinaryIO, file: _File, keyed: Mapping[str, np.ndarray]) -> dict[str, _Spilled]:
    offset, entries = 0, {}
    for key, array in keyed.items():
        out.write(b"\0" * (-offset % _ALIGN))
        offset += -offset % _ALIGN
        out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        entries[key] = _Spilled(file, offset, array.shape, array.dtype, array.nbytes)
        offset += array.nbytes
    out.flush()  # what is buffered may be what finds no room
    return entries


@lru_cache
def _name(dtype: np.dtype) -> str:
    """numpy takes microseconds to say it, and there are few."""
    return str(dtype)


def _mapped(entry: _Spilled, maps: dict[Path, np.ndarray]) -> np.ndarray:
    if not entry.nbytes:
        return np.empty(entry.shape, entry.dtype)
    path = entry.file.path
    if path not in maps:
        maps[path] = np.memmap(path, dtype=np.uint8, mode="r")
    return maps[path][entry.offset : entry.offset + entry.nbytes].view(np.ndarray).view(entry.dtype).reshape(entry.shape)
