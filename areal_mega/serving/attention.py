"""Attention of one step: the next token of every decoding row, and the new tokens of rows that are being filled.

All other layers see the tokens of a step as one flat list, without padding: first one token per decoding row, then the new tokens row
after row. Only attention knows of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_mega.serving.kv import KVCache

_WASTE = 1.5
"""Rows are filled together as long as padding makes at most so many times the work."""


@dataclass(frozen=True, slots=True)
class Fill:
    """New tokens of one row: positions ``start`` to ``start + count`` (those before ``start`` are cached)."""

    row: int
    start: int
    count: int


@dataclass(slots=True)
class _FillBatch:
    rows_p: Tensor
    tokens_pq: Tensor
    """Index into the step's flat tokens; padding repeats a row's first token."""
    mask_pqk: Tensor
    valid: Tensor
    """Where, in the flattened [p, q], the real tokens are; in the order of the flat tokens."""
    first: int
    count: int
    kv_length: int


class StepAttention:
    """Plan of one step, used by every layer.

    Args:
        cache: with room for every row and position of the step.
        lengths: cached tokens of each decoding row, [rows]; its new token goes to that position.
        fills: the filled rows.
    """

    def __init__(self, cache: KVCache, lengths: np.ndarray, fills: Sequence[Fill]) -> None:
        self.cache = cache
        self.decoding = len(lengths)
        self.scale = cache.arch.head_dim**-0.5
        self.groups = cache.arch.heads // cache.arch.kv_heads
        decode_positions = torch.from_numpy(lengths.astype(np.int64))
        self._decode_rows = torch.arange(self.decoding)
        self._decode_positions = decode_positions
        self._fills = [f for f in fills if f.count]
        self._fill_rows = torch.tensor([f.row for f in self._fills for _ in range(f.count)], dtype=torch.int64)
        self._fill_positions = torch.cat(
            [torch.arange(f.start, f.start + f.count) for f in self._fills] or [torch.empty(0, dtype=torch.int64)]
        )
        self.rows_t = torch.cat([self._decode_rows, self._fill_rows])
        self.positions_t = torch.cat([decode_positions, self._fill_positions])
        if self.decoding:
            self._decode_length = int(lengths.max()) + 1
            mask = torch.zeros(self.decoding, self._decode_length, dtype=cache.dtype)
            mask.masked_fill_(torch.arange(self._decode_length) > decode_positions[:, None], float("-inf"))
            self._decode_mask = mask[:, None, None, :]
            # One row of the mask for each (row, kv head) pair: [rows * kv_heads, 1, length].
            self._pair_mask = mask.repeat_interleave(cache.arch.kv_heads, 0).unsqueeze(1)
        self._batches = list(self._plan_fills())

    def _plan_fills(self) -> Iterator[_FillBatch]:
        """Cut the fills into neighbours of similar length and lay out each cut, padded."""
        offset = self.decoding
        batch: list[Fill] = []
        for fill in self._fills:
            longest = max([f.count for f in batch] + [fill.count])
            if batch and longest * (len(batch) + 1) > _WASTE * (sum(f.count for f in batch) + fill.count):
                yield self._layout(batch, offset)
                offset, batch = offset + sum(f.count for f in batch), []
            batch.append(fill)
        if batch:
            yield self._layout(batch, offset)

    @staticmethod
    def _layout(fills: list[Fill], offset: int) -> _FillBatch:
        starts, counts = torch.tensor([f.start for f in fills]), torch.tensor([f.count for f in fills])
        longest, kv_length = int(counts.max()), max(f.start + f.count for f in fills)
        firsts = offset + torch.cumsum(counts, 0) - counts
        within_q = torch.arange(longest)
        real_pq = within_q < counts[:, None]
        tokens_pq = firsts[:, None] + torch.where(real_pq, within_q, 0)
        position_pq = starts[:, None] + within_q
        return _FillBatch(
            rows_p=torch.tensor([f.row for f in fills]),
            tokens_pq=tokens_pq,
            mask_pqk=(torch.arange(kv_length) <= position_pq[:, :, None]).unsqueeze(1),
            valid=real_pq.flatten().nonzero().squeeze(1),
            first=offset,
            count=int(counts.sum()),
            kv_length=kv_length,
        )

    def __call__(self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        """Write the step's keys and values, attend; returns [t, heads * head_dim]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows_t, :, self.positions_t] = k_thd
        values[self.rows_t, :, self.positions_t] = v_thd
        parts = [self._decode(q_thd[: self.decoding], keys, values)] if self.decoding else []
        parts += [self._fill(batch, q_thd, keys, values) for batch in self._batches]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, q_bhd: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query per row. Queries that share a key head are taken together, so keys are read once and never copied."""
        rows, heads, dim = q_bhd.shape
        pairs, length = rows * keys.shape[1], self._decode_length
        if q_bhd.dtype != torch.float32:
            # Products in bf16 round the scores (errors of 5e-2 on outputs of one); the fused kernel keeps them in fp32.
            q = q_bhd.reshape(rows, keys.shape[1], self.groups, dim)
            k, v = keys[:rows, :, :length], values[:rows, :, :length]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self._decode_mask, scale=self.scale).reshape(rows, heads * dim)
        k = keys[:rows].view(pairs, -1, dim)[:, :length]
        v = values[:rows].view(pairs, -1, dim)[:, :length]
        q = q_bhd.reshape(pairs, self.groups, dim)
        scores = torch.baddbmm(self._pair_mask.expand(-1, self.groups, -1), q, k.transpose(1, 2), alpha=self.scale)
        return torch.bmm(torch.softmax(scores, -1), v).view(rows, heads * dim)

    def _fill(self, batch: _FillBatch, q_thd: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = q_thd[batch.tokens_pq].transpose(1, 2)
        k = keys[:, :, : batch.kv_length].index_select(0, batch.rows_p)
        v = values[:, :, : batch.kv_length].index_select(0, batch.rows_p)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask_pqk, scale=self.scale, enable_gqa=self.groups > 1)
        flat = out.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3])
        return flat if len(batch.valid) == len(flat) else flat[batch.valid]
