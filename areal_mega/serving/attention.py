"""Attention of one step: the next token of every decoding row, and the new tokens of rows that are being filled.

All other layers see the tokens of a step as one flat list, without padding: first one token per decoding row, then the new tokens row
after row. Only attention knows of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_mega.serving.kv import KVCache
from areal_mega.serving.ops import Kernels, Ops

_WASTE = 1.5
"""Rows are filled together as long as padding makes at most so many times the work."""
_RUN_COST = 4000
"""What a further set of operations costs, in cached positions of one head that could be attended to instead (estimated)."""
_WHOLE = 1.4
"""Rows are read to their ends, which needs no copy, where that is at most so much more than is used."""
_SMALL = 8000
"""Below so many positions of all rows and heads the fused kernel beats products over the whole batch, which begin slower."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows ``[first, end)`` that decode together, as if each had ``length`` tokens."""

    first: int
    end: int
    length: int


def cut_rows(lengths: np.ndarray, heads: int) -> list[Run]:
    """Cut decoding rows where that saves more padding than a further run costs.

    Args:
        lengths: tokens of each row, the new one included; best in the order of ``by_length``.
        heads: of the cache.
    """
    if not len(lengths):
        return []
    classes = length_class(lengths)
    edges = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(lengths)]
    runs: list[Run] = []
    for first, end in pairwise(edges):
        run = Run(first, end, int(lengths[first:end].max()))
        if runs:
            last = runs[-1]
            longest = max(last.length, run.length)
            padding = (last.end - last.first) * (longest - last.length) + (end - first) * (longest - run.length)
            if padding * heads < _RUN_COST:
                runs[-1] = Run(last.first, end, longest)
                continue
        runs.append(run)
    return runs


def length_class(lengths: np.ndarray) -> np.ndarray:
    """Rows of one class differ in length by less than half, or than 64 tokens."""
    return np.floor(np.log(np.maximum(lengths, 64) / 64) / np.log(1.5)).astype(np.int64)


def wasted(lengths: np.ndarray, heads: int) -> float:
    """Positions attended to in vain (runs included at their cost), as a part of those that count."""
    runs = cut_rows(lengths, heads)
    work = sum((r.end - r.first) * r.length for r in runs) + len(runs) * _RUN_COST // heads
    return work / max(int(lengths.sum()) + _RUN_COST // heads, 1) - 1.0


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


@dataclass(frozen=True, slots=True)
class _DecodeRun:
    rows: Run
    mask: Tensor
    """Added to scores: fp32 [rows, 1, 1, length], or [rows * heads, 1, length] for fp32 models."""
    scores: Tensor | None
    """Room for the scores, fp32 [rows, heads, queries, length]; None: the fused kernel, or an fp32 model."""


class StepAttention:
    """Plan of one step, used by every layer.

    Args:
        cache: with room for every row and position of the step.
        lengths: cached tokens of each decoding row, [rows]; its new token goes to that position.
        fills: the filled rows.
        ops: how the model computes.
    """

    def __init__(self, cache: KVCache, lengths: np.ndarray, fills: Sequence[Fill], ops: Ops) -> None:
        arch = cache.arch
        self._kernels = ops if isinstance(ops, Kernels) else None
        self.cache, self.decoding, self.scale = cache, len(lengths), arch.scale
        self._groups, self._value_dim = arch.heads // arch.kv_heads, arch.value_dim
        decode_positions = torch.from_numpy(lengths.astype(np.int64))
        self._fills = [f for f in fills if f.count]
        fill_rows = torch.tensor([f.row for f in self._fills for _ in range(f.count)], dtype=torch.int64)
        ranges = [torch.arange(f.start, f.start + f.count) for f in self._fills]
        self.rows_t = torch.cat([torch.arange(self.decoding), fill_rows])
        self.positions_t = torch.cat([decode_positions, *ranges])
        # The kernel takes each token by its own length.
        self._runs = [] if self._kernels else [self._decode_run(run, decode_positions) for run in cut_rows(lengths + 1, arch.kv_heads)]
        self._batches = [] if self._kernels else list(self._plan_fills())

    def _decode_run(self, run: Run, positions: Tensor) -> _DecodeRun:
        heads, rows = self.cache.arch.kv_heads, run.end - run.first
        if run.length * _WHOLE >= self.cache.length:
            run = Run(run.first, run.end, self.cache.length)
        mask = torch.zeros(rows, run.length)
        mask.masked_fill_(torch.arange(run.length) > positions[run.first : run.end, None], float("-inf"))
        if self.cache.dtype == torch.float32:
            return _DecodeRun(run, mask.repeat_interleave(heads, 0).unsqueeze(1), None)
        fused = self._value_dim == self.cache.arch.key_dim and rows * heads * run.length < _SMALL
        scores = None if fused else torch.empty(rows, heads, self._groups, run.length)
        return _DecodeRun(run, (mask.to(self.cache.dtype) if fused else mask)[:, None, None, :], scores)

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

    def __call__(self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor | None) -> Tensor:
        """Write the step's keys and values, attend; returns [t, heads * value_dim].

        ``v_thd`` is None where values are part of the keys.
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows_t, :, self.positions_t] = k_thd
        if v_thd is not None:
            values[self.rows_t, :, self.positions_t] = v_thd
        return self.attend(layer, q_thd)

    def attend(self, layer: int, q_thd: Tensor) -> Tensor:
        """The same, once the keys and values are written."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self._kernels is not None:
            return self._kernels.attend(q_thd.contiguous(), keys, values, self.rows_t, self.positions_t, self.scale)
        parts = [self._decode(run, q_thd, keys, values) for run in self._runs]
        parts += [self._fill(batch, q_thd, keys, values) for batch in self._batches]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, run: _DecodeRun, q_thd: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query per row. Queries that share a key head are taken together, so keys are read once and never copied."""
        first, end, length = run.rows.first, run.rows.end, run.rows.length
        rows, heads, dim = end - first, keys.shape[1], keys.shape[-1]
        q = q_thd[first:end].reshape(rows, heads, self._groups, dim)
        k, v = keys[first:end, :, :length], values[first:end, :, :length]
        if q.dtype == torch.float32:
            k, v = (x.flatten(0, 1) for x in (k, v))
            scores = torch.baddbmm(run.mask.expand(-1, self._groups, -1), q.flatten(0, 1), k.transpose(1, 2), alpha=self.scale)
            out = torch.bmm(torch.softmax(scores, -1), v)
        elif run.scores is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=run.mask, scale=self.scale)
        else:
            out = self._decode_products(run, run.scores, q, k, v)
        return out.reshape(rows, -1)

    def _decode_products(self, run: _DecodeRun, scores: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Products over all rows at once, faster than the fused kernel where rows are many, scores as exact as its fp32 ones.

        A product in bf16 sums in fp32 and rounds at the end, an error of up to 2^-9 of a score. Its second run subtracts what the first
        returned before it rounds, and so returns what rounding had taken. oneDNN wants dense operands: ends of rows that are cut off cost
        a copy, made here once.
        """
        q, k_t, v = q.flatten(0, 1), k.contiguous().flatten(0, 1).transpose(1, 2), v.contiguous().flatten(0, 1)
        rounded = torch.bmm(q, k_t)
        taken = torch.baddbmm(rounded, q, k_t, beta=-1)
        torch.add(run.mask, rounded.view(scores.shape), alpha=self.scale, out=scores)
        scores.add_(taken.view(scores.shape), alpha=self.scale)
        return torch.bmm(torch.softmax(scores, -1).to(q.dtype).flatten(0, 1), v)

    def _fill(self, batch: _FillBatch, q_thd: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = q_thd[batch.tokens_pq].transpose(1, 2)
        k = keys[:, :, : batch.kv_length].index_select(0, batch.rows_p)
        # The fused kernel wants values as wide as keys: where they are part of the keys, the keys, and the rest of the result is cut off.
        shared = self._value_dim != k.shape[-1]
        v = k if shared else values[:, :, : batch.kv_length].index_select(0, batch.rows_p)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask_pqk, scale=self.scale, enable_gqa=self._groups > 1)
        flat = out[..., : self._value_dim].transpose(1, 2).reshape(-1, q.shape[1] * self._value_dim)
        return flat if len(batch.valid) == len(flat) else flat[batch.valid]
