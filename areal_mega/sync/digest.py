"""Digests of tensors: did the server load exactly what the trainer sent?

A digest covers dtype, shape and every bit, and is the same on CPU and GPU. It detects faults, not forgeries. There are two kinds, and a
server says which it reports: each is fast on one kind of memory.

- ``sums``, for GPUs: the bytes are read as 64-bit words in rows of ``ROW_WORDS``; a row's hash is sum(word_j * w_j) modulo 2**64 with fixed
  pseudo-random odd weights, so a moved, swapped or changed word changes it; row hashes are mixed and summed the same way. That is a few
  vectorised operations per megabyte, in bounded memory.
- ``xxh3``, for host memory: XXH3 (64 bits) of the bytes, by the xxhash library, which reads as fast as memory gives. Of a tensor on a GPU
  it is computed from a copy.

``xxh3-sampled`` covers dtype, shape, and of a larger tensor the first of every ``SAMPLE_EVERY`` blocks of ``SAMPLE_BYTES``, and the end.
For a sixtieth of the reading it shows another tensor, and one that is cut or put together in the wrong order; one that is old, as soon as
a value in a sample has changed. ``SAMPLE_EVERY`` is prime, so that samples move along the rows: a part of at least that many blocks, of a
tensor split into equal parts by rows or by columns, is in one of them where a row has at most 32 KiB. Few and longer rows may hide it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DigestKind = Literal["sums", "xxh3", "xxh3-sampled"]

SAMPLE_BYTES, SAMPLE_EVERY = 4096, 61

ROW_WORDS = 1 << 14
_BLOCK = 512 * ROW_WORDS
"""Words multiplied at once: bounds what a GPU holds beside them."""
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def tensor_digest(tensor: Tensor, kind: DigestKind = "sums") -> str:
    """16 hexadecimal digits of dtype, shape and contents (any shape, any dtype, contiguous or not)."""
    return tensor_digests({"": tensor}, kind)[""]


def tensor_digests(tensors: Mapping[str, Tensor], kind: DigestKind = "sums") -> dict[str, str]:
    """The digest of each."""
    if kind == "sums":
        return _sums(tensors)
    return {name: _finished(tensor, f"{_xxh3(tensor, sampled=kind == 'xxh3-sampled'):016x}") for name, tensor in tensors.items()}


def with_sampled(kind: DigestKind) -> tuple[DigestKind, ...]:
    """The kind, and its sampled one where there is such: who reads every byte has those for nearly nothing; servers report both."""
    return ("xxh3", "xxh3-sampled") if kind == "xxh3" else (kind,)


def kind_for(device: torch.device) -> DigestKind:
    """The faster kind for tensors there."""
    return "xxh3" if device.type == "cpu" else "sums"


def _finished(tensor: Tensor, contents: str) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}{contents}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _xxh3(tensor: Tensor, *, sampled: bool) -> int:
    import torch
    import xxhash

    if not tensor.numel():
        return xxhash.xxh3_64_intdigest(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    stride = SAMPLE_BYTES * SAMPLE_EVERY
    if not sampled or len(flat) <= stride:
        return xxhash.xxh3_64_intdigest(flat)
    hashed = xxhash.xxh3_64(flat[: len(flat) // stride * stride].reshape(-1, stride)[:, :SAMPLE_BYTES].copy())
    hashed.update(flat[-SAMPLE_BYTES:])
    return hashed.intdigest()


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """With one copy from their device for all of them."""
    import torch

    counts: list[int] = []
    hashes: list[Tensor] = []
    for tensor in tensors.values():
        of_rows = _row_hashes(tensor)
        counts.append(sum(part.numel() for part in of_rows) - 1)
        hashes += of_rows
    if not hashes:
        return {}
    totals = _mix(torch.cat(hashes).cpu(), counts)
    out = {}
    for (name, tensor), (total, tail) in zip(tensors.items(), totals, strict=True):
        out[name] = _finished(tensor, f"{total:016x}{tail:016x}")
    return out


def combine(digests: Mapping[str, str]) -> str:
    """One digest of many named ones; the order of the mapping does not matter, names and values do."""
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _row_hashes(tensor: Tensor) -> list[Tensor]:
    """Hashes of the rows of a tensor's words, and last one number of the bytes that make no whole word; int64, on the tensor's device."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if raw.storage_offset() % 8 or raw.data_ptr() % 8:
        raw = raw.clone()  # a slice of a bucket may start anywhere; words must be aligned
    whole = raw.numel() // 8 * 8
    words, weights = raw[:whole].view(torch.int64), _weights(ROW_WORDS, str(raw.device))
    full = words.numel() // ROW_WORDS * ROW_WORDS
    hashes = []
    for start in range(0, full, _BLOCK):
        hashes.append(_products(words[start : min(start + _BLOCK, full)].view(-1, ROW_WORDS), weights))
    if full < words.numel():
        hashes.append(_products(words[full:].view(1, -1), weights[: words.numel() - full]))
    tail = torch.zeros(8, dtype=torch.uint8, device=raw.device)
    tail[: raw.numel() - whole] = raw[whole:]
    return [*hashes, tail.view(torch.int64)]


def _products(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum of word times weight of each row, modulo 2**64. On a CPU one pass without a temporary; CUDA multiplies no integer matrices."""
    if rows.device.type == "cpu":
        return rows.mv(weights)
    return (rows * weights).sum(1)


def _mix(hashes: Tensor, counts: list[int]) -> list[tuple[int, int]]:
    """Of each tensor the hash of its row hashes, and its last number, as unsigned 64-bit numbers. ``counts``: rows of each."""
    import numpy as np

    values = hashes.numpy().view(np.uint64)
    # Not linear in the words any more: otherwise a change in one row could undo a change in another.
    mixed = values ^ (values >> np.uint64(29))
    longest = max(counts, default=0)
    weights = _weights(max(1024, 1 << max(longest - 1, 0).bit_length()), "cpu").numpy().view(np.uint64)
    out, start = [], 0
    with np.errstate(over="ignore"):
        for count in counts:
            total = int((mixed[start : start + count] * weights[:count]).sum(dtype=np.uint64)) if count else 0
            out.append((total, int(values[start + count])))
            start += count + 1
    return out


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
