"""The running batch: one row per sequence, its state in arrays, so that a step costs no Python per row.

Rows ``[0, decoding)`` hold sequences whose next token comes from one new token; at most one more row, the last, holds a prompt that is
being computed in several steps. Removing a row moves another into the gap, cache included. Rows that decode are sorted by length when
padding has become dear; all grow alike, so the order lasts until rows come or go.
"""

from __future__ import annotations

import numpy as np
import torch

from areal_mega.serving.attention import length_class
from areal_mega.serving.kv import KVCache
from areal_mega.serving.sampling import RowSampling
from areal_mega.serving.sequence import Sequence

_NO_TOKEN = -1


class Rows:
    """``lengths[row]`` tokens of the row's sequence are cached; ``made[row]`` output tokens exist, the newest in ``last[row]``."""

    def __init__(self, kv: KVCache, max_rows: int, max_tokens: int, eos: tuple[int, ...]) -> None:
        self.kv, self.max_rows, self.max_tokens = kv, max_rows, max_tokens
        self._eos = eos
        self.sequences: list[Sequence] = []
        self.decoding = 0
        n = max_rows
        self.last, self.lengths, self.made, self.budget, self.start, self.minimum, self.top_k = (np.zeros(n, np.int64) for _ in range(7))
        self.temperature, self.top_p, self.min_p = (np.zeros(n, np.float32) for _ in range(3))
        self.seed = np.zeros(n, np.uint64)
        self.watched = np.zeros(n, np.bool_)
        self.stops = np.full((n, max(1, len(eos))), _NO_TOKEN, np.int64)
        self.ids, self.logprobs = np.zeros((n, 64), np.int64), np.zeros((n, 64), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    def _columns(self) -> list[np.ndarray]:
        return [
            *(self.last, self.lengths, self.made, self.budget, self.start, self.minimum, self.top_k),
            *(self.temperature, self.top_p, self.min_p, self.seed, self.watched, self.stops, self.ids, self.logprobs),
        ]

    def fits(self, count: int, length: int) -> bool:
        """Whether ``count`` rows of up to ``length`` tokens are within the limits."""
        return count <= self.max_rows and (count <= 1 or count * self.kv.padded_length(length) <= self.max_tokens)

    def longest(self) -> int:
        return int(self.lengths[: len(self)].max(initial=0))

    def reserve(self, count: int, length: int) -> None:
        """Room for ``count`` rows of ``length`` cached tokens and the next output token of each."""
        self.kv.reserve(count, length, self.max_tokens)
        self._widen(int(self.made[: len(self)].max(initial=0)) + 1)

    def add(self, sequence: Sequence) -> int:
        """Give the sequence the next row; nothing of it is cached yet."""
        row, params = len(self.sequences), sequence.params
        self.sequences.append(sequence)
        sequence.row = row
        made = len(sequence.output_ids)
        self.last[row], self.lengths[row], self.made[row] = _NO_TOKEN, 0, made
        self.budget[row], self.start[row], self.minimum[row] = params.max_new_tokens, len(sequence.prompt), params.min_new_tokens
        self.temperature[row], self.top_p[row], self.top_k[row], self.min_p[row] = (
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
        )
        self.seed[row], self.watched[row] = sequence.seed, sequence.watched
        stops = (() if params.ignore_eos else self._eos) + params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, len(stops) - self.stops.shape[1])), constant_values=_NO_TOKEN)
        self.stops[row] = _NO_TOKEN
        self.stops[row, : len(stops)] = stops
        self._widen(made + 1)
        if made:
            self.ids[row, :made], self.logprobs[row, :made] = sequence.output_ids, sequence.output_logprobs
        return row

    def _widen(self, width: int) -> None:
        if width > self.ids.shape[1]:
            extra = ((0, 0), (0, 2 * width - self.ids.shape[1]))
            self.ids, self.logprobs = np.pad(self.ids, extra), np.pad(self.logprobs, extra)

    def save(self, row: int) -> Sequence:
        """Write the row's output back to its sequence."""
        sequence, made = self.sequences[row], int(self.made[row])
        sequence.output_ids, sequence.output_logprobs = self.ids[row, :made].copy(), self.logprobs[row, :made].copy()
        if self.kv.routed is not None and sequence.wanted.routed_experts:
            sequence.routed = self.kv.routed[row, : int(self.lengths[row])].numpy().copy()
        return sequence

    def remove(self, row: int) -> Sequence:
        """Free a row: save its output, fill the gap with the last decoding row, that gap with the unfinished one, if any."""
        sequence = self.save(row)
        sequence.row = -1
        end = len(self) - 1
        if row < self.decoding:
            self.decoding -= 1
            self._move(self.decoding, row)
            self._move(end, self.decoding)
        else:
            self._move(end, row)
        self.sequences.pop()
        return sequence

    def _move(self, source: int, target: int) -> None:
        if source == target:
            return
        for column in self._columns():
            column[target] = column[source]
        moved = self.sequences[source]
        self.sequences[target], moved.row = moved, target
        self.kv.copy_row(source, target, int(self.lengths[source]))

    def sort(self) -> None:
        """Bring decoding rows into classes of length, longest first, moving only those that stand in another class's place."""
        classes = length_class(self.lengths[: self.decoding] + 1)
        places = -np.sort(-classes)
        targets = np.flatnonzero(classes != places)
        sources = targets[np.argsort(-classes[targets], kind="stable")]
        if not len(targets):
            return
        for column in self._columns():
            column[targets] = column[sources]
        moved = [self.sequences[i] for i in sources]
        for row, sequence in zip(targets.tolist(), moved, strict=True):
            self.sequences[row], sequence.row = sequence, row
        self.kv.permute(torch.from_numpy(sources), torch.from_numpy(targets), int(self.lengths[targets].max()))

    def sampling(self, rows: np.ndarray) -> RowSampling:
        return RowSampling(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.min_p[rows],
            self.seed[rows],
            self.start[rows] + self.made[rows],
        )

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Add one output token to each of ``rows``. Returns, per given row, whether it ends: 0 no, 1 stop token, 2 budget."""
        made = self.made[rows]
        self.ids[rows, made], self.logprobs[rows, made] = tokens, logprobs
        self.last[rows] = tokens
        self.made[rows] = made = made + 1
        stopped = (self.stops[rows] == tokens[:, None]).any(1) & (made >= self.minimum[rows])
        return np.where(stopped, 1, np.where(made >= self.budget[rows], 2, 0))
