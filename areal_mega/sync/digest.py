"""Digests of tensors: did the server load exactly what the trainer sent?

A digest covers dtype, shape and every bit, and is the same on CPU and GPU. The bytes are read as 64-bit words in rows of
``ROW_WORDS``; a row's hash is sum(word_j * w_j) modulo 2**64 with fixed pseudo-random odd weights, so a moved, swapped or changed word
changes it; row hashes are mixed and summed the same way. That is a few vectorised operations per megabyte, in bounded memory. It
detects faults, not forgeries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROW_WORDS = 1 << 14
_CPU_ROWS, _GPU_ROWS = 2, 512
_MASK = (1 << 64) - 1
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def tensor_digest(tensor: Tensor) -> str:
    """16 hexadecimal digits of dtype, shape and contents (any shape, any dtype, contiguous or not)."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    whole = raw.numel() // 8 * 8
    if raw.storage_offset() % 8 or raw.data_ptr() % 8:
        raw = raw.clone()  # a slice of a bucket may start anywhere; words must be aligned
    words = raw[:whole].view(torch.int64)
    tail = int.from_bytes(bytes(raw[whole:].cpu().tolist()), "little")
    total = _words_digest(words)
    text = f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}{total:016x}{tail:016x}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """One digest of many named ones; the order of the mapping does not matter, names and values do."""
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _words_digest(words: Tensor) -> int:
    """Hash of int64 words [n] as an unsigned 64-bit number."""
    import torch

    weights = _weights(ROW_WORDS, str(words.device))
    block = ROW_WORDS * (_CPU_ROWS if words.device.type == "cpu" else _GPU_ROWS)
    hashes = []
    full = words.numel() // ROW_WORDS * ROW_WORDS
    for start in range(0, full, block):
        rows = words[start : min(start + block, full)].view(-1, ROW_WORDS)
        hashes.append((rows * weights).sum(1))
    if full < words.numel():
        rest = words[full:]
        hashes.append((rest * weights[: rest.numel()]).sum().view(1))
    if not hashes:
        return 0
    rows_h = torch.cat(hashes).cpu()
    mixed = rows_h ^ ((rows_h >> 29) & 0x7FFFFFFFF)  # not linear in the words any more; the mask makes the shift a logical one
    row_weights = _weights(max(1024, 1 << (len(rows_h) - 1).bit_length()), "cpu")[: len(rows_h)]
    return int((mixed * row_weights).sum()) & _MASK


@lru_cache(maxsize=32)
def _weights(count: int, device: str) -> Tensor:
    """Odd 64-bit weights [count]: splitmix64 of the index (Steele, Lea and Flood, 2014)."""
    import numpy as np
    import torch

    with np.errstate(over="ignore"):
        x = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_A)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_B)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)
