"""Staleness: how many groups may be under way, and what happens to tokens that are too old all the same. Pure.

*Admission* paces generation: with B groups per train step and a bound of η versions, at version v no more than (η + v + 1)·B groups
may ever have been started that were or will be trained (AReaL, arXiv 2505.24298, equation 3). Consumed in the order of
submission, no token is then older than η. Groups do not finish in that order, and an update may be late, so on top there is
the *strict bound*, applied to every token when its batch is consumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from areal_mega.core.types import Group, Sample, VersionCount

StaleAction = Literal["mask_token", "drop_sample", "refill_prompt"]


class StalenessControl:
    """Counts groups from submission to consumption.

    A group is *running* (submitted), then *ready* (finished), then *consumed* (in a train batch); or it leaves: rejected while
    running, discarded while ready. Whatever leaves makes room for another. Evaluation episodes are never counted here.

    Args:
        batch_size: groups per train step (B).
        every: train steps per version; B * every groups are consumed under one.
        max_staleness: bound in versions (η); 0 is synchronous.
        start_version: weight version at which the first train step consumes.
        total: groups that all steps of the run consume; more than the last step can use are never started. None: no end is known.
    """

    def __init__(self, batch_size: int, max_staleness: int, *, every: int = 1, start_version: int = 0, total: int | None = None) -> None:
        assert batch_size > 0 and every > 0 and max_staleness >= 0
        self.batch_size, self.max_staleness, self.start_version, self.total = batch_size, max_staleness, start_version, total
        self.every = every
        self.running = 0
        self.ready = 0
        self.consumed = 0

    def capacity(self, version: int) -> int:
        """Groups that may be submitted now that the trainer's weights are at ``version``."""
        started = self.running + self.ready + self.consumed
        most = (self.max_staleness + version - self.start_version + 1) * self.batch_size * self.every
        return max(0, (most if self.total is None else min(most, self.total)) - started)

    def on_submitted(self, n: int = 1) -> None:
        self.running += n

    def on_accepted(self, n: int = 1) -> None:
        """Running groups finished."""
        self._leave("running", n)
        self.ready += n

    def on_rejected(self, n: int = 1) -> None:
        """Running groups ended without a usable result: rejected by the workflow, or failed."""
        self._leave("running", n)

    def on_discarded(self, n: int = 1) -> None:
        """Ready groups will not be trained: beyond the bound, or filtered (dynamic sampling)."""
        self._leave("ready", n)

    def on_consumed(self, n: int) -> None:
        """Ready groups went into a train batch."""
        self._leave("ready", n)
        self.consumed += n

    def on_given_back(self, n: int) -> None:
        """Groups of a batch that was not trained after all are ready again."""
        self._leave("consumed", n)
        self.ready += n

    def unscheduled(self, versions: int) -> None:
        """So many of the versions to come end no interval of ``every`` steps (a server was given weights in between): they buy nothing."""
        self.start_version += versions

    def snapshot(self) -> dict[str, int]:
        """What survives the controller: groups consumed. Running and ready ones live in workers, and are submitted again."""
        return {"consumed": self.consumed, "start_version": self.start_version, "batch_size": self.batch_size, "every": self.every}

    def restore(self, snapshot: Mapping[str, int]) -> None:
        """Go on where a checkpoint was made. With nothing under way the counters are what they were at that step, no more.

        Batch size and steps per version may have changed. The steps done count as steps of today's size, and the versions so far as those
        that today's schedule would have made of them: what is left of the interval under way, and the bound beyond it, may start.
        """
        self.running = self.ready = 0
        self.consumed = -(-snapshot["consumed"] * self.batch_size // snapshot["batch_size"])
        made = snapshot["consumed"] // (snapshot["batch_size"] * snapshot["every"])
        self.start_version = snapshot["start_version"] + made - self.consumed // (self.batch_size * self.every)

    def _leave(self, state: Literal["running", "ready", "consumed"], n: int) -> None:
        have = getattr(self, state)
        assert 0 <= n <= have, f"{n} groups cannot leave state {state}: it has {have}"
        setattr(self, state, have - n)


def age_histogram(samples: Iterable[Sample], current_version: int) -> dict[int, int]:
    """Trained tokens by age (current version minus the version that made them)."""
    ages: Counter[int] = Counter()
    for sample in samples:
        for made in sample.versions:
            ages[current_version - made.version] += made.tokens
    return dict(sorted(ages.items()))


def oldest_allowed(current_version: int, max_staleness: int) -> int:
    """The oldest version whose tokens may be trained at ``current_version``."""
    return current_version - max_staleness


def fresh_mask(loss_mask: np.ndarray, versions: np.ndarray, min_version: int) -> np.ndarray:
    """``loss_mask`` without tokens made before ``min_version``. All of shape [length]; returns a new array."""
    return np.asarray(loss_mask, dtype=bool) & (np.asarray(versions) >= min_version)


@dataclass(frozen=True, slots=True)
class Bounded:
    """A sample under the strict bound: what is left of it (None: nothing), and the tokens that were taken out."""

    sample: Sample | None
    stale_tokens: int


def apply_bound(sample: Sample, current_version: int, max_staleness: int, action: StaleAction) -> Bounded:
    """Apply the strict bound to one sample.

    ``mask_token`` takes out the stale tokens: the sample that is left counts (``loss_tokens``, ``versions``) only fresh ones, and
    whoever reads its arrays must mask with `fresh_mask`. The other actions take out the whole sample if any token is stale.
    """
    min_version = oldest_allowed(current_version, max_staleness)
    fresh = tuple(v for v in sample.versions if v.version >= min_version)
    stale_tokens = _tokens(sample.versions) - _tokens(fresh)
    if stale_tokens == 0:
        return Bounded(sample, 0)
    if action == "mask_token" and fresh:
        return Bounded(replace(sample, versions=fresh, loss_tokens=_tokens(fresh)), stale_tokens)
    return Bounded(None, stale_tokens)


@dataclass(frozen=True, slots=True)
class BoundedGroups:
    """Groups under the strict bound.

    ``groups`` may be trained. The prompts of ``refill`` lost all their samples, or lost one under ``refill_prompt``: they are to
    be generated again, because prompts that are dropped for being late are the long and hard ones. ``stale_tokens`` were taken
    out in all, ``dropped_samples`` is the number of whole samples among them.
    """

    groups: tuple[Group, ...]
    refill: tuple[Group, ...]
    stale_tokens: int
    dropped_samples: int
    ages: dict[int, int] = field(default_factory=dict)
    """Histogram of all tokens that came in, stale ones included."""


def apply_bound_to_groups(groups: Sequence[Group], current_version: int, max_staleness: int, action: StaleAction) -> BoundedGroups:
    """Apply the strict bound to groups that are about to be consumed at ``current_version``."""
    kept: list[Group] = []
    refill: list[Group] = []
    stale_tokens = dropped = 0
    for group in groups:
        bounded = [apply_bound(sample, current_version, max_staleness, action) for sample in group.samples]
        left = tuple(b.sample for b in bounded if b.sample is not None)
        stale_tokens += sum(b.stale_tokens for b in bounded)
        if not left or (action == "refill_prompt" and len(left) < len(bounded)):
            refill.append(group)
            dropped += len(bounded)
            continue
        dropped += len(bounded) - len(left)
        kept.append(replace(group, samples=left))
    ages = age_histogram((s for g in groups for s in g.samples), current_version)
    return BoundedGroups(tuple(kept), tuple(refill), stale_tokens, dropped, ages)


def _tokens(versions: Iterable[VersionCount]) -> int:
    return sum(v.tokens for v in versions)
