"""One sample in the making, and its sampling parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """As a request gives them, checked; SGLang's names and defaults. ``top_k`` -1 is off."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the answer should hold besides tokens."""

    logprobs: bool = False
    logprob_start: int = -1
    """First prompt position whose log-probability is wanted; -1: none."""
    top_logprobs: int = 0
    text_in_logprobs: bool = False
    routed_experts: bool = False
    routed_start: int = 0
    stream: bool = False


class Sequence:
    """State of one sample. Between steps the engine's thread owns it; once ``finish`` is set nothing changes any more."""

    def __init__(self, rid: str, prompt: np.ndarray, params: SamplingParams, wanted: Wanted, seed: int) -> None:
        self.rid, self.prompt, self.params, self.wanted, self.seed = rid, prompt, params, wanted, seed
        self.key = prompt.tobytes()
        self.output_ids = np.empty(0, dtype=np.int64)
        self.output_logprobs = np.empty(0, dtype=np.float32)
        self.prompt_logprobs: list[float | None] = []
        self.top_logprobs: list[list[tuple[float, int]]] = []
        self.routed: np.ndarray | None = None
        self.finish: dict[str, Any] | None = None
        self.trim: str = ""
        """The stop string that ended it, cut from the text."""
        self.row = -1
        self.epoch = -1
        """Which load of weights its cached keys come from."""
        self.stored: tuple[int, int, int] = (-1, -1, 0)
        """At which change of the store of prefixes it was looked up, the number of the entry found (-1: none), tokens shared with it. Not
        the entry itself: sequences that wait would keep its memory, which the store counts as free."""
        self.cached_tokens = 0
        self.retractions = 0
        self.spans: list[tuple[str, int]] = []
        self.received = time.time()
        self.admitted = self.first_token = self.finished = 0.0
        self.on_progress: Callable[[Sequence, Any], None] | None = None
        """Called in the event loop when it has finished, and when streaming after every token with the event to send."""

    @property
    def context(self) -> np.ndarray:
        """All tokens known so far, int64."""
        return np.concatenate([self.prompt, self.output_ids]) if len(self.output_ids) else self.prompt

    @property
    def watched(self) -> bool:
        """Needs a look from Python after every token."""
        return bool(self.params.stop) or self.wanted.stream or self.wanted.top_logprobs > 0

    def version_is(self, version: str, made: int) -> None:
        """From its ``made``-th output token on, the weights are ``version``."""
        if self.spans and self.spans[-1][1] == made:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, made))

    def version_spans(self) -> list[dict[str, Any]]:
        """Spans over the output tokens, each with the version that made them; none is empty. [] before it has begun."""
        if not self.spans:
            return []
        ends = [start for _, start in self.spans[1:]] + [len(self.output_ids)]
        return [{"version": v, "start": s, "end": e} for (v, s), e in zip(self.spans, ends, strict=True) if e > s]
