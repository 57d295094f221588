"""One inference replica on a simulated clock: sequences that share its speed, and the versions under which their tokens are made. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from areal_mega.simulate.inputs import DecodeTable


@dataclass
class Episode:
    """A prompt's group under way. ``began`` and lengths are in tokens per sequence on the replica's own scale."""

    ticket: int
    lengths: Sequence[int]
    began: float = 0.0
    left: int = 0


class SimulatedReplica:
    """All running sequences advance at one speed, so a single number (``_work``: tokens each has made since the start) tells when each
    ends: one heap, and no loop over sequences.

    Args:
        max_episodes: started at once; others wait in line.
    """

    def __init__(self, decode: DecodeTable, max_episodes: int) -> None:
        self._decode, self._max_episodes = decode, max_episodes
        self._waiting: deque[Episode] = deque()
        self._ends: list[tuple[float, int, Episode]] = []
        self._running = self._count = 0
        self._work = 0.0
        self._marks: list[float] = [0.0]
        """Work at which each version became current; the first is version 0's."""
        self.paused = self.closed = False
        """Paused: nothing advances. Closed: nothing starts."""
        self.tokens = self.idle_s = 0.0

    @property
    def sequences(self) -> int:
        return len(self._ends)

    @property
    def busy(self) -> bool:
        return bool(self._ends)

    def submit(self, episode: Episode) -> None:
        self._waiting.append(episode)
        self.fill()

    def fill(self) -> None:
        """Start what may start."""
        while self._waiting and not self.closed and self._running < self._max_episodes:
            episode = self._waiting.popleft()
            episode.began, episode.left = self._work, len(episode.lengths)
            self._running += 1
            for length in episode.lengths:
                self._count += 1
                heapq.heappush(self._ends, (self._work + length, self._count, episode))

    def next_end(self) -> float:
        """Seconds until a sequence ends, if nothing changes."""
        if not self._ends or self.paused:
            return float("inf")
        return max(0.0, self._ends[0][0] - self._work) / self._speed

    def advance(self, seconds: float) -> list[Episode]:
        """Let time pass, at most ``next_end``; the episodes that ended with it."""
        if not self._ends or self.paused:
            self.idle_s += seconds
            return []
        speed, running = self._speed, len(self._ends)
        self._work += speed * seconds
        self.tokens += speed * seconds * running
        done = []
        while self._ends and self._ends[0][0] <= self._work + 1e-9:
            _, _, episode = heapq.heappop(self._ends)
            episode.left -= 1
            if not episode.left:
                self._running -= 1
                done.append(episode)
        if done:
            self.fill()
        return done

    def new_version(self) -> None:
        """Tokens are made by the next version from now on."""
        self._marks.append(self._work)

    def versions_of(self, episode: Episode, length: int) -> dict[int, int]:
        """Tokens of one member by the version that made them."""
        counts: dict[int, int] = {}
        version, made = bisect_right(self._marks, episode.began) - 1, 0
        while made < length:
            until = self._marks[version + 1] - episode.began if version + 1 < len(self._marks) else float(length)
            upto = min(length, round(until))
            if upto > made:
                counts[version] = upto - made
                made = upto
            version += 1
        return counts

    @property
    def _speed(self) -> float:
        return self._decode.rate(len(self._ends)) / len(self._ends)
