"""Samples and groups as rollout workers describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_mega.core.types import FinishReason, Group, Prompt, RTensor, Sample, SampleId, VersionCount

ARRAYS = ("input_ids", "logprobs", "loss_mask", "versions")


def prompt(number: int | str, epoch: int = 0) -> Prompt:
    return Prompt(id=f"p{number}", epoch=epoch, row={"id": f"p{number}", "prompt": f"{number}", "answer": "1"})


def sample(
    group_id: str = "g",
    member: int = 0,
    *,
    versions: Mapping[int, int] | None = None,
    prompt_length: int = 3,
    reward: float = 0.0,
    finish_reason: FinishReason = "stop",
    scores: Mapping[str, float] | None = None,
    prompt_id: str = "p0",
    epoch: int = 0,
    owner: str = "w:0",
) -> Sample:
    """``versions``: trained tokens by the weight version that made them."""
    counts = tuple(VersionCount(version=v, tokens=n) for v, n in sorted((versions or {0: 2}).items()))
    tokens = sum(v.tokens for v in counts)
    length = prompt_length + tokens
    handles = {
        name: RTensor(owner=owner, key=f"{group_id}/{member}/{name}", shape=(length,), dtype="int32", nbytes=4 * length) for name in ARRAYS
    }
    return Sample(
        id=SampleId(run="r", step=0, prompt_id=prompt_id, epoch=epoch, group_id=group_id, member=member),
        length=length,
        prompt_length=prompt_length,
        loss_tokens=tokens,
        versions=counts,
        reward=reward,
        finish_reason=finish_reason,
        scores=dict(scores or {}),
        tensors=handles,
    )


def group(group_id: str, members: Sequence[Mapping[str, Any]], *, of: Prompt | None = None, worker: str = "w:0") -> Group:
    """One sample per mapping of ``sample``'s arguments."""
    of = of or prompt(group_id)
    samples = tuple(
        sample(group_id, i, **{"prompt_id": of.id, "epoch": of.epoch, "owner": worker, **member}) for i, member in enumerate(members)
    )
    return Group(id=group_id, prompt=of, samples=samples, worker=worker, seconds=0.1)


def keys_of(groups: Sequence[Group]) -> set[str]:
    """Keys of every array of these groups."""
    return {handle.key for g in groups for s in g.samples for handle in s.tensors.values()}
