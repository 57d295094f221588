"""Histograms of lengths in logarithmic bins, and what dropping late samples would have done to lengths and rewards. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from areal_mega.core.types import Sample

_PER_OCTAVE = 16
"""Bins between a power of two and the next: a bin is at most a sixteenth of its lower edge wide. Lengths up to 32 have one each."""


def length_bin(length: int) -> int:
    """Lower edge of the bin of a length."""
    width = bin_width(length)
    return length // width * width


def bin_width(length: int) -> int:
    """Width of the bin that holds ``length``."""
    return max(1, 2 ** (max(length, 1).bit_length() - 1) // _PER_OCTAVE)


def histogram(lengths: Iterable[int]) -> Counter[int]:
    """How many of the lengths are in each bin, by its lower edge."""
    return Counter(length_bin(length) for length in lengths)


def mean_length(bins: Mapping[int, int]) -> float | None:
    """Mean over a histogram, each bin standing for its middle; None over nothing."""
    count = sum(bins.values())
    return sum((edge + (bin_width(edge) - 1) / 2) * n for edge, n in bins.items()) / count if count else None


@dataclass
class Tally:
    """Samples of one kind: how many, their generated tokens, the sum of their rewards, and their lengths by bin."""

    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, sample: Sample) -> None:
        self.samples += 1
        self.tokens += sample.loss_tokens
        self.reward += sample.reward
        self.lengths[length_bin(sample.loss_tokens)] += 1

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.samples

    @property
    def mean_reward(self) -> float:
        return self.reward / self.samples


@dataclass
class LengthBias:
    """Everything that came in for a step, split by what the action ``drop_sample`` would have done, whatever the recipe's action is.

    ``fresh`` samples have no token beyond the bound and would have been trained; ``late`` ones would have been dropped. Late answers are
    long ones, and often answers to hard prompts: training on ``fresh`` alone would shift lengths and rewards.
    """

    fresh: Tally = field(default_factory=Tally)
    late: Tally = field(default_factory=Tally)

    def add(self, samples: Iterable[Sample], min_version: int) -> None:
        """Count samples that are consumed when tokens older than ``min_version`` are beyond the bound."""
        for sample in samples:
            (self.late if sample.oldest_version < min_version else self.fresh).add(sample)

    @property
    def late_share(self) -> float:
        """Fraction of samples that would have been dropped."""
        return self.late.samples / (self.late.samples + self.fresh.samples)

    @property
    def length_shift(self) -> float | None:
        """Relative change of the mean length that dropping would have made; None where nothing would have been left."""
        if not self.fresh.samples:
            return None
        whole = (self.fresh.tokens + self.late.tokens) / (self.fresh.samples + self.late.samples)
        return self.fresh.mean_tokens / whole - 1

    @property
    def reward_shift(self) -> float | None:
        """Change of the mean reward that dropping would have made; None where nothing would have been left."""
        if not self.fresh.samples:
            return None
        return self.fresh.mean_reward - (self.fresh.reward + self.late.reward) / (self.fresh.samples + self.late.samples)
