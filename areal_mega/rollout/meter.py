"""How fast a server generates by how much it has to do: tokens per second by the number of sequences that run at once.

A request is answered when its last member ends, so when the others ended is not seen. All members of a request are taken to generate at
one speed: the longest one's length over the request's duration.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from areal_mega.rollout.inference import GenerateRequest, Generation
from areal_mega.rollout.lengths import length_bin
from areal_mega.rollout.workflow import GenerationEngine


class DecodeMeter:
    """Times of requests in, totals by number of running sequences out."""

    def __init__(self) -> None:
        self._running: dict[int, float] = {}
        """When each request under way started."""
        self._events: list[tuple[float, int, float]] = []
        """(when, change in running sequences, change in tokens per second) of requests that have ended; a heap."""
        self._requests = 0
        self._at = self._rate = 0.0
        self._sequences = 0

    def started(self, now: float) -> int:
        """A request is sent; returns its number."""
        self._requests += 1
        self._running[self._requests] = now
        return self._requests

    def ended(self, request: int, now: float, lengths: Sequence[int]) -> None:
        """A request is answered with members of so many tokens; none where it failed, which is then not counted."""
        start = self._running.pop(request)
        longest = max(lengths, default=0)
        if now > start and longest:
            speed = longest / (now - start)
            for length in lengths:
                heapq.heappush(self._events, (start, 1, speed))
                heapq.heappush(self._events, (start + length / speed, -1, -speed))

    def take(self) -> tuple[dict[int, int], dict[int, int]]:
        """Tokens and milliseconds by number of running sequences (lower edges of bins) since the last call.

        What happened after the start of the oldest request under way is kept for a later call: that request was running then, too.
        """
        horizon = min(self._running.values(), default=float("inf"))
        tokens: dict[int, float] = {}
        seconds: dict[int, float] = {}
        while self._events and self._events[0][0] <= horizon:
            when, change, speed = heapq.heappop(self._events)
            if self._sequences:
                place, passed = length_bin(self._sequences), when - self._at
                tokens[place] = tokens.get(place, 0.0) + self._rate * passed
                seconds[place] = seconds.get(place, 0.0) + passed
            self._at = when
            self._sequences += change
            # Sums of many differences drift; where nothing runs the rate is 0 exactly.
            self._rate = self._rate + speed if self._sequences else 0.0
        return {n: round(t) for n, t in tokens.items()}, {n: round(1000 * s) for n, s in seconds.items()}


class Metered:
    """An engine, with the times of its requests told to a meter."""

    def __init__(self, engine: GenerationEngine, meter: DecodeMeter) -> None:
        self._engine, self._meter = engine, meter

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        request, answers = self._meter.started(time.monotonic()), list[Generation]()
        try:
            answers = await self._engine.generate(requests)
            return answers
        finally:
            self._meter.ended(request, time.monotonic(), [len(answer.output_ids) for answer in answers])
