"""The key-value cache: one row per sequence in the batch, all rows of one length, grown when needed.

Rows of sequences that decode are kept adjacent (see ``rows``), so that their keys and values are views of the cache and not gathered.
"""

from __future__ import annotations

import torch

from areal_mega.serving.arch import Arch

_LENGTH_STEP = 64


class KVCache:
    """Keys and values, each [layers, rows, kv_heads, length, head_dim].

    With ``routed`` also the experts chosen, [rows, length, layers, k].
    """

    def __init__(self, arch: Arch, dtype: torch.dtype, *, routed: bool) -> None:
        self.arch, self.dtype = arch, dtype
        self.rows = self.length = 0
        self._routed_k = arch.experts.top_k if routed and arch.experts is not None else 0
        self._allocate(0, 0)

    def _allocate(self, rows: int, length: int) -> None:
        shape = (self.arch.layers, rows, self.arch.kv_heads, length, self.arch.head_dim)
        # Zeros, not empty: padding is masked out of scores, but 0 x NaN of uninitialised values would still poison the weighted sum.
        self.keys, self.values = torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)
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
        new_length = max(self.length, self.padded_length(length))
        if new_rows * new_length > max_tokens:
            new_rows, new_length = rows, self.padded_length(length)
        keys, values, routed = self.keys, self.values, self.routed
        kept_rows, kept_length = min(self.rows, new_rows), min(self.length, new_length)
        self._allocate(new_rows, new_length)
        self.keys[:, :kept_rows, :, :kept_length] = keys[:, :kept_rows, :, :kept_length]
        self.values[:, :kept_rows, :, :kept_length] = values[:, :kept_rows, :, :kept_length]
        if self.routed is not None and routed is not None:
            self.routed[:kept_rows, :kept_length] = routed[:kept_rows, :kept_length]

    def copy_row(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` positions of one row to another."""
        self.keys[:, target, :, :count] = self.keys[:, source, :, :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]
        if self.routed is not None:
            self.routed[target, :count] = self.routed[source, :count]

    def clear(self) -> None:
        self._allocate(0, 0)

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()


def bytes_per_token(arch: Arch, dtype: torch.dtype) -> int:
    return 2 * arch.layers * arch.kv_heads * arch.head_dim * dtype.itemsize
