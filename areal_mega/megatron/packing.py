"""Packed (THD) micro-batches: samples end to end in one row of tokens, and back.

Padding stands at the end as a sequence of its own, so that no sample's attention can see it. Under context parallelism each sample is
also padded, behind its last token, to a multiple of 2·CP, which its causal tokens cannot see either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

PAD_ID = 0


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of n sequences (samples in order, then the padding's own sequence where there is one)."""

    input_ids_t: Tensor
    """[T] int64."""
    position_ids_t: Tensor
    """[T] int64, from 0 in each sequence."""
    cu_seqlens: Tensor
    """[n + 1] int32, where each sequence starts; ends with T."""
    max_seqlen: int
    sample_index: tuple[int, ...]
    """Who each sample is, in the caller's numbering."""
    lengths: tuple[int, ...]
    """Tokens of each sample, without padding."""
    fields: Mapping[str, Tensor]
    """[T] each, aligned to the token they describe; zero on padding."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @cached_property
    def sequence_t(self) -> Tensor:
        """[T] int64: which sequence each token belongs to."""
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=lengths.device), lengths)

    @cached_property
    def padding_t(self) -> Tensor:
        """[T] bool: True on padding of either kind."""
        real = torch.tensor([*self.lengths, *([0] * (self.num_sequences - len(self.lengths)))], device=self.cu_seqlens.device)
        return self.position_ids_t >= real[self.sequence_t]

    def to(self, device: torch.device) -> PackedBatch:
        if self.input_ids_t.device == device:
            return self
        moved = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return PackedBatch(
            input_ids_t=self.input_ids_t.to(device, non_blocking=True),
            position_ids_t=self.position_ids_t.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            max_seqlen=self.max_seqlen,
            sample_index=self.sample_index,
            lengths=self.lengths,
            fields=moved,
        )


def pack(
    samples: Sequence[Mapping[str, np.ndarray]], indices: Sequence[int], multiple_of: int = 1, sequence_multiple: int = 1
) -> PackedBatch:
    """Pack samples into one micro-batch.

    Args:
        samples: each with ``input_ids`` and any other arrays, all of the sample's length [n].
        indices: the caller's number of each sample.
        multiple_of: T is a multiple of this (TP, for sequence parallelism; times 2·CP under context parallelism).
        sequence_multiple: each sample's place is a multiple of this (2·CP under context parallelism, else 1).
    """
    assert len(samples) == len(indices), f"{len(samples)} samples, {len(indices)} indices"
    names = [name for name in (samples[0] if samples else ()) if name != "input_ids"]
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert all(n > 0 for n in lengths), "a sample has no tokens"
    places = [-(-n // sequence_multiple) * sequence_multiple for n in lengths]
    used = sum(places)
    total = max(multiple_of, -(-used // multiple_of) * multiple_of)
    assert total % sequence_multiple == 0, f"{multiple_of=} is not a multiple of {sequence_multiple=}"
    if total > used:
        places = [*places, total - used]
    starts = np.concatenate([[0], np.cumsum(places)])

    def row(name: str) -> Tensor:
        arrays = [np.asarray(sample[name]) for sample in samples]
        out: np.ndarray = np.zeros(total, dtype=_travelling_dtype(arrays[0].dtype))
        for array, start, n in zip(arrays, starts, lengths, strict=False):
            assert array.shape == (n,), f"field {name!r} has shape {array.shape}, the sample {n} tokens"
            out[start : start + n] = array
        return torch.from_numpy(out)

    return PackedBatch(
        input_ids_t=row("input_ids") if samples else torch.full((total,), PAD_ID, dtype=torch.int64),
        position_ids_t=torch.from_numpy(np.arange(total) - np.repeat(starts[:-1], places)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(places),
        sample_index=tuple(indices),
        lengths=tuple(lengths),
        fields={name: row(name) for name in names},
    )


_PADDING_SEQUENCE = 128


def lengthen(batch: PackedBatch, total: int, sequence_multiple: int = 1) -> PackedBatch:
    """The same samples in ``total`` tokens, T or more: padding is added at the end.

    It stands in sequences no longer than the longest that is there (or 128 tokens), for attention costs their squares.

    Args:
        sequence_multiple: as the batch was packed with; ``total`` is a multiple of it.
    """
    have = len(batch.input_ids_t)
    assert total >= have and total % sequence_multiple == 0, f"{have} tokens do not lengthen to {total} in steps of {sequence_multiple}"
    if total == have:
        return batch
    longest = max(batch.max_seqlen, -(-_PADDING_SEQUENCE // sequence_multiple) * sequence_multiple)
    starts = torch.arange(have, total, longest)
    device = batch.input_ids_t.device

    def longer(values_t: Tensor) -> Tensor:
        return torch.cat([values_t, values_t.new_zeros(total - have)])

    return PackedBatch(
        input_ids_t=torch.cat([batch.input_ids_t, batch.input_ids_t.new_full((total - have,), PAD_ID)]),
        position_ids_t=torch.cat([batch.position_ids_t, (torch.arange(total - have) % longest).to(device)]),
        cu_seqlens=torch.cat([batch.cu_seqlens, torch.cat([starts[1:], torch.tensor([total])]).to(batch.cu_seqlens)]),
        max_seqlen=max(batch.max_seqlen, min(longest, total - have)),
        sample_index=batch.sample_index,
        lengths=batch.lengths,
        fields={name: longer(values_t) for name, values_t in batch.fields.items()},
    )


def _travelling_dtype(dtype: np.dtype) -> type:
    if dtype == np.bool_:
        return np.bool_
    return np.float32 if np.issubdtype(dtype, np.floating) else np.int64


def unpack(values_t: Tensor, batch: PackedBatch) -> list[np.ndarray]:
    """[T] values back to one array [n] per sample, in the order of ``batch.sample_index``."""
    values = values_t.detach().cpu().numpy()
    starts = batch.cu_seqlens[:-1].tolist()
    return [values[start : start + n].copy() for start, n in zip(starts, batch.lengths, strict=False)]


def zigzag_index(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """[T/cp] int64: the tokens that a context-parallel rank holds.

    Each sequence is cut into 2·cp chunks; rank r holds chunks r and 2·cp-1-r, which balances causal attention. Every sequence length
    must be a multiple of 2·cp.
    """
    parts = []
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        chunk, rest = divmod(end - start, 2 * cp_size)
        assert rest == 0, f"a sequence of {end - start} tokens does not split into {2 * cp_size} chunks"
        for c in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + c * chunk, start + (c + 1) * chunk))
    return torch.cat(parts).to(cu_seqlens.device)


def unzigzag_index(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """[T] int64: where each token stands in the concatenation of all context-parallel ranks' tokens."""
    held = torch.cat([zigzag_index(cu_seqlens, cp_size, r) for r in range(cp_size)])
    index = torch.empty_like(held)
    index[held] = torch.arange(len(held), device=held.device)
    return index
