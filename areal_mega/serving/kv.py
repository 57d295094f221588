"""The key-value cache: one slot (row) per sequence in the batch, grown when needed.

Rows of sequences that decode are kept adjacent and about in the order of their lengths (see ``rows``), so that keys and values of
neighbours of similar length are views of the cache: neither gathered nor padded to the longest of all. Memory is mapped as it is written,
so the unused ends of short rows take none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_mega.serving.arch import Arch

_LENGTH_STEP = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """Cached positions of one sequence outside of the cache: arrays [layers, kv_heads, positions, dim], experts [positions, layers, k]."""

    arrays: list[Tensor]
    routed: Tensor | None


class KVCache:
    """Keys and values, each [layers, rows, kv_heads, length, key_dim or value_dim].

    In latent attention ``values`` is a view of ``keys``. With ``routed`` also the experts chosen, [rows, length, layers, k].
    """

    def __init__(self, arch: Arch, dtype: torch.dtype, *, routed: bool) -> None:
        self.arch, self.dtype = arch, dtype
        self.rows = self.length = 0
        self._routed_k = arch.experts.top_k if routed and arch.experts is not None else 0
        self._allocate(0, 0)

    def _allocate(self, rows: int, length: int) -> None:
        arch = self.arch
        shape = (arch.layers, rows, arch.kv_heads, length)
        # Zeros, not empty: padding is masked out of scores, but 0 x NaN of uninitialised values would still poison the weighted sum.
        self.keys = torch.zeros((*shape, arch.key_dim), dtype=self.dtype)
        latent = arch.latent is not None
        self.values = self.keys[..., : arch.value_dim] if latent else torch.zeros((*shape, arch.value_dim), dtype=self.dtype)
        self.routed = torch.zeros((rows, length, self.arch.layers, self._routed_k), dtype=torch.int32) if self._routed_k else None
        self.rows, self.length = rows, length

    @staticmethod
    def padded_length(length: int) -> int:
        return -(-length // _LENGTH_STEP) * _LENGTH_STEP

    def reserve(self, rows: int, length: int, max_tokens: int) -> None:
        """Make room for ``rows`` x ``length`` at least; contents stay.

        Grows by more than asked while rows x length stays within ``max_tokens``, else to exactly what is asked (shrinking the other
        dimension, which an earlier step may have needed larger).
        """
        if rows <= self.rows and length <= self.length:
            return
        new_rows = max(self.rows, 1 << max(rows - 1, 0).bit_length())
        new_length = max(self.length, self.padded_length(length + length // 8))
        if new_rows * new_length > max_tokens:
            new_rows, new_length = rows, self.padded_length(length)
        keys, values, routed = self.keys, self.values, self.routed
        kept_rows, kept_length = min(self.rows, new_rows), min(self.length, new_length)
        self._allocate(new_rows, new_length)
        self.keys[:, :kept_rows, :, :kept_length] = keys[:, :kept_rows, :, :kept_length]
        if self.arch.latent is None:
            self.values[:, :kept_rows, :, :kept_length] = values[:, :kept_rows, :, :kept_length]
        if self.routed is not None and routed is not None:
            self.routed[:kept_rows, :kept_length] = routed[:kept_rows, :kept_length]

    def copy_row(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` positions of one row to another."""
        for array in self._arrays():
            array[:, target, :, :count] = array[:, source, :, :count]
        if self.routed is not None:
            self.routed[target, :count] = self.routed[source, :count]

    def permute(self, sources: Tensor, targets: Tensor, count: int) -> None:
        """Move the first ``count`` positions of rows ``sources`` to rows ``targets``, the same rows in another order."""
        for array in self._arrays():
            for layer in array:  # one at a time: the copy on the way is of one layer
                layer[targets, :, :count] = layer[sources, :, :count]
        if self.routed is not None:
            self.routed[targets, :count] = self.routed[sources, :count]

    def read(self, row: int, count: int) -> Stored:
        """A copy of the first ``count`` positions of a row."""
        routed = None if self.routed is None else self.routed[row, :count].clone()
        return Stored([array[:, row, :, :count].clone() for array in self._arrays()], routed)

    def write(self, row: int, stored: Stored, count: int) -> None:
        """The reverse: the first ``count`` positions of what was read, into a row."""
        for array, kept in zip(self._arrays(), stored.arrays, strict=True):
            array[:, row, :, :count] = kept[:, :, :count]
        if self.routed is not None and stored.routed is not None:
            self.routed[row, :count] = stored.routed[:count]

    def _arrays(self) -> list[Tensor]:
        return [self.keys] if self.arch.latent is not None else [self.keys, self.values]

    def clear(self) -> None:
        self._allocate(0, 0)

    @property
    def nbytes(self) -> int:
        """As mapped, whether written or not."""
        return sum(array.numel() * array.element_size() for array in self._arrays())


def bytes_per_token(arch: Arch, dtype: torch.dtype) -> int:
    width = arch.key_dim if arch.latent is not None else arch.key_dim + arch.value_dim
    return arch.layers * arch.kv_heads * width * dtype.itemsize
