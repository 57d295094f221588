"""What a simulation is told: lengths of answers, speeds of both sides. Plain data and samplers. Pure."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from areal_mega.core.errors import UserError
from areal_mega.rollout.lengths import bin_width

Sampler = Callable[[random.Random], int]
"""Draws the length of one answer, in tokens."""


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Tokens per second of one replica by the number of sequences that it runs at once, as points in ascending order.

    Between points it is interpolated; below the first it is proportional (a sequence is never faster than alone); beyond the last it is
    flat: more sequences take turns.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        assert self.points and all(n > 0 and rate > 0 for n, rate in self.points), f"not a table: {self.points}"
        assert all(a[0] < b[0] for a, b in pairwise(self.points)), "numbers of sequences ascend"

    def rate(self, sequences: int) -> float:
        """Tokens per second of ``sequences`` together."""
        place = bisect_left(self.points, (sequences, 0.0))
        if place == 0:
            n, rate = self.points[0]
            return rate * sequences / n
        if place == len(self.points):
            return self.points[-1][1]
        (n0, r0), (n1, r1) = self.points[place - 1], self.points[place]
        return r0 + (r1 - r0) * (sequences - n0) / (n1 - n0)

    def scaled(self, factor: float) -> DecodeTable:
        return DecodeTable(tuple((n, rate * factor) for n, rate in self.points))

    @property
    def peak(self) -> float:
        return max(rate for _, rate in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything besides the recipe.

    Attributes:
        lengths: draws the length of one answer.
        prompt_tokens: of one prompt, on average.
        decode: of one replica.
        replicas: of inference servers.
        train_s_per_token: all train ranks together, prompt tokens included; seconds.
        step_s: what a train step takes besides, whatever its size; seconds.
        sync_s: one weight sync, generation paused and the trainer busy; seconds.
        interruptible: a sync interrupts running requests; otherwise it waits until they have ended, and none starts meanwhile.
        uniform: fraction of groups whose rewards are all equal.
    """

    lengths: Sampler
    prompt_tokens: float
    decode: DecodeTable
    replicas: int
    train_s_per_token: float
    step_s: float = 0.0
    sync_s: float = 0.0
    interruptible: bool = True
    uniform: float = 0.0


def lognormal(mean: float, sigma: float, longest: int) -> Sampler:
    """Heavy-tailed lengths: log-normal with this mean (before it is cut at ``longest``) and this standard deviation of the logarithm."""
    mu = math.log(mean) - sigma**2 / 2

    def draw(rng: random.Random) -> int:
        return max(1, min(longest, round(rng.lognormvariate(mu, sigma))))

    return draw


def from_histogram(bins: Mapping[int, int], longest: int) -> Sampler:
    """Lengths as they were measured: a bin by its count, and a length in it evenly."""
    edges = sorted(bins)
    cumulated = list(accumulate(bins[edge] for edge in edges))

    def draw(rng: random.Random) -> int:
        edge = edges[bisect_left(cumulated, rng.random() * cumulated[-1])]
        return max(1, min(longest, edge + rng.randrange(bin_width(edge))))

    return draw


def parse_lengths(text: str, longest: int) -> Sampler:
    """A sampler from ``mean`` or ``mean:sigma`` (log-normal; sigma 0.8 where none is given), or ``fixed:n``.

    Raises:
        UserError: another form.
    """
    try:
        if text.startswith("fixed:"):
            n = int(text.removeprefix("fixed:"))
            if n < 1:
                raise ValueError
            return lambda rng: min(n, longest)
        mean, _, sigma = text.partition(":")
        if float(mean) <= 0 or float(sigma or 0.8) < 0:
            raise ValueError
        return lognormal(float(mean), float(sigma or 0.8), longest)
    except ValueError:
        raise UserError(f"--lengths {text!r} is not MEAN, MEAN:SIGMA (log-normal, tokens) or fixed:N; e.g. --lengths 800:0.9") from None


def parse_decode(text: str) -> DecodeTable:
    """A table from ``sequences:tokens/s`` pairs, e.g. ``1:60,16:700,128:2500``.

    Raises:
        UserError: another form, or numbers of sequences that do not ascend.
    """
    points: Sequence[tuple[float, float]] = ()
    try:
        points = [(float(n), float(rate)) for n, _, rate in (pair.partition(":") for pair in text.split(","))]
    except ValueError:
        points = ()
    ascending = all(a[0] < b[0] for a, b in pairwise(points))
    if not points or not ascending or any(n <= 0 or rate <= 0 for n, rate in points):
        raise UserError(
            f"--decode {text!r} is not a list SEQUENCES:TOKENS_PER_SECOND in ascending order, of one replica; "
            "e.g. --decode 1:60,16:700,128:2500"
        )
    return DecodeTable(tuple(points))
