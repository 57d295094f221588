"""What came of one submitted prompt. Every submission ends in exactly one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from areal_mega.core.types import Group, Prompt
from areal_mega.rpc.codec import register

Purpose = Literal["train", "eval"]
PURPOSES: tuple[Purpose, ...] = ("train", "eval")
Outcome = Literal["group", "rejected", "failed", "timed_out"]


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """``group`` is set exactly for outcome ``group``.

    ``ticket`` is the caller's name for this submission: a prompt that is submitted again has another. ``rejected``: the workflow
    returned None. ``failed``: an exception, trajectories that cannot be right, or no member left; ``reason`` says which, and
    ``server_fault`` that the inference server is to blame. ``timed_out``: ended by its deadline. ``dropped``: members without a
    trajectory, by reason (also where the rest formed a group). Groups of purpose ``eval`` carry rewards and scores but no tensors:
    there is nothing to fetch or to release.
    """

    purpose: Purpose
    step: int
    prompt: Prompt
    ticket: int
    outcome: Outcome
    seconds: float
    group: Group | None = None
    reason: str = ""
    server_fault: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)
