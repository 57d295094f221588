"""What the dispatch state machine hands out: settings, flights of prompts, batches. Plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.core.types import Group, Prompt
from areal_mega.rollout.lengths import LengthBias
from areal_mega.rollout.routing import Route
from areal_mega.rollout.staleness import StaleAction

_AHEAD = 4
"""A replica is given a quarter more prompts than it runs at once, so that none of its places is empty while an answer travels."""

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

    @classmethod
    def of(cls, recipe: Recipe, algorithm: Algorithm) -> DispatchSettings:
        """As a recipe says."""
        rollout = recipe.rollout
        at_once = rollout.max_concurrent_prompts
        return cls(
            batch_size=recipe.train.batch_size,
            action=recipe.staleness.action,
            group_size=rollout.group_size,
            max_per_replica=at_once + -(-at_once // _AHEAD),
            attempts=rollout.prompt_attempts,
            max_poisoned=rollout.max_poisoned_prompts,
            # The worker ends an episode after prompt_timeout_s. One that waited for a place waited for such an episode; and an
            # evaluation, which goes first, is given rpc_timeout_s.
            deadline_s=2 * rollout.prompt_timeout_s + recipe.launch.rpc_timeout_s,
            lone_is_useless=algorithm.singleton == "error",
            uniform_is_useless=algorithm.filter_uniform_groups,
            expected_tokens=rollout.max_new_tokens / 2,
        )


@dataclass(frozen=True, slots=True)
class Flight:
    """A prompt at a replica. ``ticket`` names this attempt; ``order`` is when the prompt was first submitted, over all its attempts."""

    ticket: int
    prompt: Prompt
    order: int
    route: Route
    since: float
    version: int
    """Every server held at least these weights when it was submitted."""

    @property
    def replica(self) -> str:
        return self.route.replica


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that is to be tried again: it counts as running all the while."""

    prompt: Prompt
    order: int
    avoid: frozenset[str]


@dataclass
class Batch:
    """The batch that is being made: orders, groups as bounded and as taken, and what was measured."""

    kept: list[tuple[int, Group, Group]] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    stale_tokens: int = 0
    dropped: int = 0
    refilled: int = 0
    bias: LengthBias = field(default_factory=LengthBias)


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
