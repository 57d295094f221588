"""One step of the engine: admit, compute all new tokens in one forward pass, sample one token per ready row, finish what is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from areal_mega.core.errors import RunFailed
from areal_mega.serving.admission import Candidate, Pick, admit
from areal_mega.serving.attention import Fill, StepAttention, wasted
from areal_mega.serving.sampling import NotFinite, log_probabilities, sample
from areal_mega.serving.sequence import Sequence

if TYPE_CHECKING:
    from areal_mega.serving.engine import Engine

_SORT_ABOVE = 0.3
"""Rows are sorted when so large a part of attention's work is padding."""
_LOOKAHEAD = 512
"""Waiting sequences looked at in one step."""


class StepRunner:
    """Runs steps on the engine's rows and queue."""

    def __init__(self, engine: Engine, decode: Callable[[list[int]], str]) -> None:
        self._engine, self._decode = engine, decode
        self._live: dict[bytes, int] = {}

    def step(self, *, admit: bool) -> list[Sequence]:
        """Returns sequences that somebody should be told of: finished, or streaming."""
        engine, rows = self._engine, self._engine.rows
        self._make_room()
        ops = engine.model.weights.ops
        if not ops.native and wasted(rows.lengths[: rows.decoding] + 1, rows.kv.arch.kv_heads) > _SORT_ABOVE:
            rows.sort()
        before = rows.decoding
        fills, followers = self._fills(admit)
        if before == 0 and not fills:
            return []
        rows.reserve(len(rows), max([rows.longest() + 1] + [f.start + f.count + 1 for f in fills]))
        for fill in fills:  # after the cache has its room: prefixes of live rows
            self._copy_prefix(fill)
        contexts = [rows.sequences[f.row].context[f.start : f.start + f.count] for f in fills]
        tokens = torch.from_numpy(np.concatenate([rows.last[:before], *contexts]))
        hidden = engine.model.forward(tokens, StepAttention(rows.kv, rows.lengths[:before], fills, ops))
        rows.lengths[:before] += 1
        ready, hidden_index = self._close_fills(fills, followers, hidden, before)
        engine.counters.steps += 1
        # Without fills every row is sampled from its own hidden state; equal counts alone say nothing: four samples of four tokens.
        return self._sample(ready, hidden[torch.from_numpy(hidden_index)] if fills else hidden)

    # Admission.

    def _make_room(self) -> None:
        """Retract the newest sequences while the batch, one token longer, exceeds the cache."""
        engine, rows = self._engine, self._engine.rows
        while len(rows) > 1 and not rows.fits(len(rows), rows.longest() + 1):
            newest = max(range(len(rows)), key=lambda r: (rows.sequences[r].received, r))
            engine.waiting.appendleft(engine.retract(newest))

    def _fills(self, may_admit: bool) -> tuple[list[Fill], dict[int, int]]:
        """The step's fills; and, by row, the fill whose result a follower shares."""
        engine, rows = self._engine, self._engine.rows
        budget, fills = engine.limits.chunk, []
        if len(rows) > rows.decoding:
            row = len(rows) - 1
            start, total = int(rows.lengths[row]), len(rows.sequences[row].context)
            fills.append(Fill(row, start, min(total - start, budget)))
            budget -= fills[-1].count
            if fills[-1].count < total - start:
                return fills, {}
        if not (may_admit and engine.waiting):
            return fills, {}
        self._live = self._index_live()
        longest = rows.longest() + 1
        picks = admit(
            (self._candidate(s) for s in islice(engine.waiting, _LOOKAHEAD)),
            budget=budget,
            fits=lambda more, length: rows.fits(len(rows) + more, max(longest, length)),
            shared=lambda key: int(rows.lengths[self._live[key]]) if key in self._live else 0,
        )
        return self._take(picks, fills)

    def _candidate(self, sequence: Sequence) -> Candidate:
        length = len(sequence.prompt) + len(sequence.output_ids)
        if sequence.wanted.logprob_start >= 0:  # must see its own prompt computed
            alone = sequence.rid.encode()
            return Candidate(length, alone, alone, len(sequence.prompt))
        whole = sequence.key if not len(sequence.output_ids) else sequence.context.tobytes()
        store = self._engine.prefixes
        if len(store) and sequence.stored[0] != store.changes:
            entry, shared = store.find(sequence.context)
            sequence.stored = (store.changes, -1 if entry is None else entry.number, shared)
        elif not len(store):
            sequence.stored = (store.changes, -1, 0)
        return Candidate(length, sequence.key, whole, len(sequence.prompt), sequence.stored[2])

    def _index_live(self) -> dict[bytes, int]:
        """By prompt, a row that has it cached under the present weights: a wholly cached one, else any."""
        rows, epoch = self._engine.rows, self._engine.epoch
        index: dict[bytes, int] = {}
        for row, sequence in enumerate(rows.sequences):
            if sequence.epoch == epoch and rows.lengths[row] > 0 and (sequence.key not in index or row < rows.decoding):
                index[sequence.key] = row
        return index

    def _take(self, picks: list[Pick], fills: list[Fill]) -> tuple[list[Fill], dict[int, int]]:
        engine, rows = self._engine, self._engine.rows
        queue = engine.waiting
        chosen = {pick.index for pick in picks}
        looked = [queue.popleft() for _ in range(max(chosen) + 1)] if chosen else []
        queue.extendleft(s for i, s in reversed(list(enumerate(looked))) if i not in chosen)
        followers: dict[int, int] = {}
        fill_of: dict[int, int] = {}
        for number, pick in enumerate(picks):
            sequence = looked[pick.index]
            if not sequence.admitted:
                sequence.admitted = time.time()
            if not sequence.spans:
                sequence.version_is(engine.version, len(sequence.output_ids))
            row = rows.add(sequence)
            sequence.epoch = engine.epoch
            if pick.leader is not None:
                followers[row] = fill_of[pick.leader]
                cached = pick.cached - 1  # as if the last token had been computed again, which is how SGLang counts
            else:
                fill_of[number] = len(fills)
                fills.append(Fill(row, pick.cached, pick.count))
                cached = pick.cached
            if not sequence.retractions:
                sequence.cached_tokens = cached
                engine.counters.cached_tokens += cached
                engine.counters.prompt_tokens += len(sequence.prompt)
        return fills, followers

    def _copy_prefix(self, fill: Fill) -> None:
        """Bring what the row begins with from a live row or from the store, whichever has enough."""
        rows = self._engine.rows
        if fill.start == 0 or rows.lengths[fill.row] != 0:
            return
        sequence = rows.sequences[fill.row]
        live, (_, number, stored) = self._live.get(sequence.key), sequence.stored
        if live is not None and rows.lengths[live] >= fill.start and len(sequence.prompt) >= fill.start:
            rows.kv.copy_row(live, fill.row, fill.start)
        else:
            assert number >= 0 and stored >= fill.start
            rows.kv.write(fill.row, self._engine.prefixes.entry(number).kept, fill.start)
        rows.lengths[fill.row] = fill.start
        sequence.stored = (-1, -1, 0)

    # After the forward pass.

    def _close_fills(self, fills: list[Fill], followers: dict[int, int], hidden: Tensor, before: int) -> tuple[np.ndarray, np.ndarray]:
        """Count what is cached now. Returns rows ready to sample, and for each its index into ``hidden``."""
        rows = self._engine.rows
        ready, index = [np.arange(before)], [np.arange(before)]
        offset, last_of = before, []
        for fill in fills:
            sequence, end = rows.sequences[fill.row], fill.start + fill.count
            rows.lengths[fill.row] = end
            if sequence.wanted.logprob_start >= 0:
                self._prompt_logprobs(sequence, fill, hidden[offset : offset + fill.count])
            offset += fill.count
            last_of.append(offset - 1)
            if end == len(sequence.prompt) + int(rows.made[fill.row]):
                ready.append(np.array([fill.row]))
                index.append(np.array([offset - 1]))
        for row, leader in followers.items():
            count = fills[leader].start + fills[leader].count
            rows.kv.copy_row(fills[leader].row, row, count)
            rows.lengths[row] = count
            ready.append(np.array([row]))
            index.append(np.array([last_of[leader]]))
        rows_ready = np.concatenate(ready)
        rows.decoding = len(rows_ready)
        order = np.argsort(rows_ready)
        return rows_ready[order], np.concatenate(index)[order]

    def _prompt_logprobs(self, sequence: Sequence, fill: Fill, hidden: Tensor) -> None:
        """log_softmax(logits) of the prompt's own tokens, from ``logprob_start`` on; the first of them has none."""
        first, prompt = sequence.wanted.logprob_start, sequence.prompt
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        # Hidden state of position p predicts token p + 1.
        low, high = max(fill.start, first, first + len(sequence.prompt_logprobs) - 1), min(fill.start + fill.count, len(prompt) - 1)
        if high <= low:
            return
        logits = self._engine.model.logits(hidden[low - fill.start : high - fill.start]).float()
        targets = torch.from_numpy(prompt[low + 1 : high + 1])[:, None]
        sequence.prompt_logprobs += torch.log_softmax(logits, -1).gather(1, targets).squeeze(1).tolist()

    def _sample(self, ready: np.ndarray, hidden: Tensor) -> list[Sequence]:
        """Draw and append a token for every ready row; finish what ends. Rows that only score a prompt end without one."""
        engine, rows = self._engine, self._engine.rows
        scoring = rows.budget[ready] == 0
        ends: dict[int, dict[str, Any]] = {int(r): {"type": "length", "length": 0} for r in ready[scoring]}
        told: list[Sequence] = []
        if ends:
            ready, hidden = ready[~scoring], hidden[torch.from_numpy(~scoring)]
        if len(ready):
            logits = engine.model.logits(hidden)
            if (rows.made[ready] < rows.minimum[ready]).any():
                self._forbid_stops(logits, ready)
            try:
                tokens_t, logprobs_t = sample(logits, rows.sampling(ready), engine.model.weights.ops)
            except NotFinite as error:
                rid, dtype = rows.sequences[int(ready[error.row])].rid, str(engine.model.weights.dtype).removeprefix("torch.")
                raise RunFailed(
                    f"weight version {engine.version}: {error} (request {rid}); the weights hold NaN or infinity, or {dtype} overflows: "
                    "load other weights, or serve float32"
                ) from error
            tokens = tokens_t.numpy()
            self._stamp_first(ready)
            verdict = rows.append(ready, tokens, logprobs_t.numpy())
            engine.counters.generated_tokens += len(ready)
            for i in np.flatnonzero(verdict):
                row = int(ready[i])
                stopped = verdict[i] == 1
                ends[row] = {"type": "stop", "matched": int(tokens[i])} if stopped else {"type": "length", "length": int(rows.budget[row])}
            if rows.watched[: len(rows)].any():
                told = self._watch(ready, logits, ends)
        finished = []
        for row in sorted(ends, reverse=True):  # from the end, so that no row to be removed is moved
            engine.keep_prefix(row)
            sequence = rows.remove(row)
            self.finish(sequence, ends[row])
            finished.append(sequence)
        return finished + [s for s in told if s.finish is None]

    def finish(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        sequence.finish, sequence.finished = reason, time.time()
        self._engine.counters.finished += 1

    def _stamp_first(self, ready: np.ndarray) -> None:
        rows = self._engine.rows
        fresh = ready[rows.made[ready] == 0]
        if len(fresh):
            now = time.time()
            for row in fresh:
                rows.sequences[row].first_token = now

    def _forbid_stops(self, logits: Tensor, ready: np.ndarray) -> None:
        """Rows below their ``min_new_tokens`` may not stop: their stop tokens get probability zero."""
        rows = self._engine.rows
        for i in np.flatnonzero(rows.made[ready] < rows.minimum[ready]):
            stops = rows.stops[ready[i]]
            logits[int(i), torch.from_numpy(stops[stops >= 0])] = float("-inf")

    def _watch(self, ready: np.ndarray, logits_rv: Tensor, ends: dict[int, dict[str, Any]]) -> list[Sequence]:
        """Rows with stop strings, top log-probabilities or a stream. Adds to ``ends``; returns those that stream."""
        rows, streaming = self._engine.rows, []
        for i in np.flatnonzero(rows.watched[ready]):
            row = int(ready[i])
            sequence = rows.sequences[row]
            if sequence.wanted.top_logprobs:
                every = log_probabilities(logits_rv[int(i)][None], rows.temperature[row : row + 1])[0]
                top = torch.topk(every, sequence.wanted.top_logprobs)
                sequence.top_logprobs.append(list(zip(top.values.tolist(), top.indices.tolist(), strict=True)))
            if sequence.params.stop and (ends.get(row, {}).get("type") != "stop"):
                found = self._stop_string(row, sequence.params.stop)
                if found is not None:
                    sequence.trim = found
                    ends[row] = {"type": "stop", "matched": found}
            if sequence.wanted.stream:
                rows.save(row)
                streaming.append(sequence)
        return streaming

    def _stop_string(self, row: int, stops: tuple[str, ...]) -> str | None:
        """The first of ``stops`` in the text's end. A token is a byte at least, so so many tokens hold every new occurrence."""
        rows = self._engine.rows
        made = int(rows.made[row])
        window = max(len(s.encode()) for s in stops) + 8
        text = self._decode(rows.ids[row, max(0, made - window) : made].tolist())
        return next((s for s in stops if s in text), None)
