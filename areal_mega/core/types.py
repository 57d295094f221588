"""Prompts, trajectories, samples and groups: what travels between the processes of a run.

A *trajectory* is what a workflow makes: whole arrays, in the rollout worker's memory. A *sample* is its description: identity,
lengths, reward, weight versions, and handles to the arrays. Only samples reach the controller; only train ranks fetch the arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
NOT_GENERATED = -1
"""Version of a token that no server made: prompts, tool answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset row, once per epoch.

    ``id`` is stable over runs and epochs; ``epoch`` counts passes over the dataset; ``row`` is the row itself (``messages`` or
    ``prompt``, ``answer``, and whatever else the workflow and the reward read).
    """

    id: str
    epoch: int
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One member of a group, as its workflow returns it. All arrays have shape [length].

    ``loss_mask[t]`` is True where token t was generated and is to be trained; ``logprobs[t]`` is the behaviour policy's
    log-probability of token t given the tokens before it (0.0 where the mask is False); ``versions[t]`` is the weight version that
    made token t, as the server said (``NOT_GENERATED`` elsewhere). ``scores`` are named parts of the reward, logged apart.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    finish_reason: FinishReason
    scores: Mapping[str, float] = field(default_factory=dict)
    turn: int = 0
    member: int | None = None
    """Which member of the group this is (the one whose seed it was sampled with); None: numbered in the order returned."""

    def __post_init__(self) -> None:
        n = len(self.input_ids)
        lengths = {name: len(getattr(self, name)) for name in ("loss_mask", "logprobs", "versions")}
        if any(length != n for length in lengths.values()):
            raise ValueError(f"trajectory of {n} tokens has arrays of other lengths: {lengths}")
        if n and bool(self.loss_mask[0]):
            raise ValueError("the first token of a trajectory cannot be trained: nothing precedes it")

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays in the dtypes that travel: int32, bool, float32, int32."""
        return {
            "input_ids": np.ascontiguousarray(self.input_ids, dtype=np.int32),
            "loss_mask": np.ascontiguousarray(self.loss_mask, dtype=np.bool_),
            "logprobs": np.ascontiguousarray(self.logprobs, dtype=np.float32),
            "versions": np.ascontiguousarray(self.versions, dtype=np.int32),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RTensor:
    """A handle to an array that another process holds: where (``owner``, host:port), under which key, and its shape."""

    owner: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleId:
    """Who a sample is. Nothing about a sample is ever inferred from its position in a list."""

    run: str
    step: int
    """Training step during which its prompt was submitted."""
    prompt_id: str
    epoch: int
    group_id: str
    member: int
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCount:
    """``tokens`` trained tokens of a sample were made by weight ``version``."""

    version: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the controller knows of one trajectory. ``versions`` covers exactly the trained tokens, oldest version first."""

    id: SampleId
    length: int
    prompt_length: int
    loss_tokens: int
    versions: tuple[VersionCount, ...]
    reward: float
    finish_reason: FinishReason
    scores: Mapping[str, float]
    tensors: Mapping[str, RTensor]

    @property
    def oldest_version(self) -> int:
        return min((v.version for v in self.versions), default=NOT_GENERATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The finished samples of one prompt. May hold fewer than were asked for: ragged groups are legal."""

    id: str
    prompt: Prompt
    samples: tuple[Sample, ...]
    worker: str
    """Address of the rollout worker whose store holds the tensors."""
    seconds: float
    """From submission to the last member's reward."""


def sampling_seed(run_seed: int, prompt_id: str, epoch: int, member: int) -> int:
    """Seed of one member: 31 bits of a hash over everything that distinguishes it, so that no two members share one."""
    text = f"{run_seed}/{prompt_id}/{epoch}/{member}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") & 0x7FFF_FFFF


def count_versions(versions: np.ndarray, loss_mask: np.ndarray) -> tuple[VersionCount, ...]:
    """Count the trained tokens of each weight version. Both arguments have shape [length]."""
    made = np.asarray(versions)[np.asarray(loss_mask, dtype=bool)]
    if len(made) and (made == made[0]).all():  # nearly always, and many times faster
        return (VersionCount(version=int(made[0]), tokens=len(made)),)
    values, counts = np.unique(made, return_counts=True)
    return tuple(VersionCount(version=int(v), tokens=int(c)) for v, c in zip(values, counts, strict=True))
