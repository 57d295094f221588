"""What the dispatch state machine hands out: settings, flights of prompts, batches. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from areal_mega.core.types import Group, Prompt
from areal_mega.rollout.lengths import LengthBias
from areal_mega.rollout.routing import Route
from areal_mega.rollout.staleness import StaleAction

Key = tuple[str, int]
"""(prompt id, epoch)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """What the recipe says.

    ``max_per_replica`` prompts are given to one replica at once; a prompt is tried ``attempts`` times; more than ``max_poisoned`` that
    fail every time end the run; one that has flown ``deadline_s`` seconds is overdue. ``lone_is_useless``: a group of one member cannot
    be trained; ``uniform_is_useless``: nor one of equal rewards. ``expected_tokens``: of an answer, before any was seen.
    """

    batch_size: int
    action: StaleAction
    group_size: int
    max_per_replica: int
    attempts: int
    max_poisoned: int
    deadline_s: float
    lone_is_useless: bool
    uniform_is_useless: bool
    expected_tokens: float


@dataclass(frozen=True, slots=True)
class Flight:
    """A prompt at a replica. ``ticket`` names this attempt; ``order`` is when the prompt was first submitted, over all its attempts."""

    ticket: int
    prompt: Prompt
    order: int
    route: Route
    since: float

    @property
    def replica(self) -> str:
        return self.route.replica


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that is to be tried again: it counts as running all the while."""

    prompt: Prompt
    order: int
    avoid: frozenset[str]


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """Groups to train on. ``ages`` counts every token that came in by age in versions; ``stale_tokens`` of them were taken out."""

    groups: tuple[Group, ...]
    taken: tuple[Group, ...]
    """The same groups before the bound took samples out: what is to be released after the step."""
    ages: dict[int, int]
    stale_tokens: int
    dropped_samples: int
    refilled: int
    bias: LengthBias


def key_of(prompt: Prompt) -> Key:
    return prompt.id, prompt.epoch
