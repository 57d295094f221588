"""The engine: a thread that admits, computes, samples and finishes sequences, one step after another.

The event loop hands it sequences and commands; between two steps it takes them. Commands therefore see a consistent state: pausing,
aborting, changing weights never happen inside a step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from areal_mega.serving.kv import KVCache
from areal_mega.serving.model import Model
from areal_mega.serving.prefix import PrefixStore
from areal_mega.serving.rows import Rows
from areal_mega.serving.sequence import Sequence
from areal_mega.serving.step import StepRunner

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """``max_rows`` sequences at once; ``max_tokens`` = rows x longest; ``chunk`` prompt tokens computed per step; ``prefixes`` tokens
    of ended sequences kept for those that begin alike."""

    max_rows: int
    max_tokens: int
    context_length: int
    chunk: int
    routed_experts: bool = False
    prefixes: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start, for ``/metrics``."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    retractions: int = 0
    finished: int = 0


class Engine:
    """Continuous batching over one model.

    Args:
        decode: token ids to text, for stop strings.
        deliver: called on the engine's thread with sequences that made progress somebody waits for.
        on_failure: called on the engine's thread when it dies.
    """

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        *,
        eos: tuple[int, ...],
        version: str,
        decode: Callable[[list[int]], str],
        deliver: Callable[[list[Sequence]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.model, self.limits, self.version = model, limits, version
        self.rows = Rows(KVCache(model.arch, model.weights.dtype, routed=limits.routed_experts), limits.max_rows, limits.max_tokens, eos)
        self.prefixes = PrefixStore(limits.prefixes)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.paused: PauseMode | None = None
        self.holding = False
        """Weights are half replaced: nothing is computed until the rest has come, paused or not."""
        self.broken = ""
        """Why the rest will not come by itself: an update failed. New requests are turned away with it."""
        self.epoch = 0
        self.failure: BaseException | None = None
        self._runner = StepRunner(self, decode)
        self._deliver, self._on_failure = deliver, on_failure
        self._inbox: deque[Callable[[], None]] = deque()
        self._exclusive: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from other threads.

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the current step; unfinished sequences are left as they are."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        batch = list(sequences)
        self._post(lambda: self.waiting.extend(batch))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the engine's thread between two steps."""
        future, job = self._job(function)
        self._post(job)
        return future

    def call_exclusive(self, function: Callable[[], T]) -> Future[T]:
        """The same, but while generation is not paused wait until no sequence runs; none starts meanwhile."""
        future, job = self._job(function)
        self._post(lambda: self._exclusive.append(job))
        return future

    def _job(self, function: Callable[[], T]) -> tuple[Future[T], Callable[[], None]]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # belongs to the caller, who gets it from the future
                future.set_exception(error)

        return future, job

    def _post(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self.failure is not None:
                raise RuntimeError(f"the engine has failed: {self.failure}")
            self._inbox.append(job)
            self._wake.notify()

    # The engine's thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._next():
                    pass
        except BaseException as error:
            log.exception("the engine failed")
            with self._wake:
                self.failure = error
            self._on_failure(error)

    def _next(self) -> bool:
        """Take what has come in, then do one step or sleep. False: stop."""
        with self._wake:
            while not (self._stopping or self._inbox or self._runnable() or self._exclusive_ready()):
                self._wake.wait()
            if self._stopping:
                return False
            inbox, self._inbox = self._inbox, deque()
        for job in inbox:
            job()
        if self._exclusive_ready():
            self._exclusive.popleft()()
        elif self._runnable():
            changed = self._runner.step(admit=not self._exclusive)
            if changed:
                self._deliver(changed)
        return True

    def _runnable(self) -> bool:
        return self.paused is None and not self.holding and (len(self.rows) > 0 or (bool(self.waiting) and not self._exclusive))

    def _exclusive_ready(self) -> bool:
        return bool(self._exclusive) and (self.paused is not None or len(self.rows) == 0)

    # Commands: call these on the engine's thread only, through ``call``.

    def pause(self, mode: PauseMode) -> None:
        """``abort``: end all requests as they are; ``retract``: back to the queue, caches dropped; ``in_place``: freeze."""
        self.paused = mode
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            self.retract_all()

    def resume(self) -> None:
        self.paused = None

    def abort(self, matches: Callable[[Sequence], bool]) -> int:
        """End matching sequences with what they have; returns how many."""
        ended: list[Sequence] = []
        for row in range(len(self.rows) - 1, -1, -1):
            if matches(self.rows.sequences[row]):
                sequence = self.rows.remove(row)
                ended.append(sequence)
        waiting = [s for s in self.waiting if matches(s)]
        if waiting:
            gone = set(map(id, waiting))
            self.waiting = deque(s for s in self.waiting if id(s) not in gone)
        for sequence in ended + waiting:
            self._runner.finish(sequence, dict(ABORTED))
        if ended or waiting:
            self._deliver(ended + waiting)
        return len(ended) + len(waiting)

    def retract_all(self) -> None:
        """Running sequences go back to the head of the queue with their tokens, in the order in which they came."""
        back = [self.retract(row) for row in range(len(self.rows) - 1, -1, -1)]
        self.waiting.extendleft(sorted(back, key=lambda s: s.received, reverse=True))

    def retract(self, row: int) -> Sequence:
        sequence = self.rows.remove(row)
        sequence.retractions += 1
        self.counters.retractions += 1
        return sequence

    def keep_prefix(self, row: int) -> None:
        """Keep the keys of a row that ends, if all of them are of the present weights."""
        sequence, cached = self.rows.sequences[row], int(self.rows.lengths[row])
        if sequence.epoch != self.epoch or not self.prefixes.max_tokens:
            return
        made = self.rows.ids[row, : int(self.rows.made[row])]
        tokens = np.concatenate([sequence.prompt, made])[:cached]
        self.prefixes.add(tokens, lambda: self.rows.kv.read(row, cached))

    def weights_changed(self, version: str | None) -> None:
        """After a load: cached keys of before are not shared with new sequences; tokens from now on carry ``version``."""
        self.epoch += 1
        self.prefixes.clear()
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        self.version = version
        for row, sequence in enumerate(self.rows.sequences):
            sequence.version_is(version, int(self.rows.made[row]))
        for sequence in self.waiting:
            sequence.version_is(version, len(sequence.output_ids))

    def flush_cache(self) -> bool:
        """Drop all cached keys; False (and nothing dropped) while a sequence holds some."""
        if len(self.rows):
            return False
        self.rows.kv.clear()
        self.prefixes.clear()
        return True

    def state(self) -> dict[str, Any]:
        return {
            "running": len(self.rows),
            "waiting": len(self.waiting),
            "paused": self.paused,
            "cached_tokens": int(self.rows.lengths[: len(self.rows)].sum()),
            "kv_bytes": self.rows.kv.nbytes,
            "prefix_tokens": self.prefixes.tokens,
        }
