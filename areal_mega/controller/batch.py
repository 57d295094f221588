"""From finished groups to a planned train step. Pure: samples in, per-rank work orders out; no tensor is touched.

Everything that makes the loss independent of how a batch is split is decided here, over the whole batch: advantages over explicit
group ids, and one weight per sample that already contains the global denominator (see ``algorithms.aggregation``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_mega.algorithms.advantages import compute_advantages, is_uniform, member_weights, shape_rewards
from areal_mega.algorithms.aggregation import sample_weights
from areal_mega.algorithms.registry import Algorithm
from areal_mega.core import metrics as m
from areal_mega.core.metrics import Metric, Metrics
from areal_mega.core.types import Group, Sample
from areal_mega.parallel.balance import CostModel, Microbatches, plan_microbatches, split_even
from areal_mega.rollout.lengths import LengthBias


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer update: the samples it covers and, for each data-parallel rank, its micro-batches of sample indices."""

    samples: tuple[int, ...]
    ranks: tuple[Microbatches, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One train step. Sample indices are positions in ``samples``; tokens older than ``min_version`` are masked."""

    samples: tuple[Sample, ...]
    min_version: int
    trained_tokens: tuple[int, ...]
    minibatches: tuple[MinibatchPlan, ...]

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.samples)

    def rank_samples(self, dp_rank: int) -> list[int]:
        """Indices of every sample that a data-parallel rank works on, over all minibatches."""
        return sorted({i for mb in self.minibatches for micro in mb.ranks[dp_rank] for i in micro})


def trained_tokens(sample: Sample, mask_truncated: bool) -> int:
    """Tokens of a (bounded) sample that enter the loss: none of a truncated answer when those are masked."""
    return 0 if mask_truncated and sample.finish_reason == "length" else sample.loss_tokens


def plan_step(
    groups: Sequence[Group],
    *,
    min_version: int,
    mask_truncated: bool,
    dp: int,
    minibatches: int,
    microbatch_tokens: int,
    cost: CostModel | None = None,
    multiple_of: int = 1,
    sequence_multiple: int = 1,
) -> StepBatch:
    """Split a batch into minibatches (whole groups, equally many in each) and each of those over data-parallel ranks, by cost.

    Minibatches run one after the other, so nothing is gained by balancing their costs against their numbers of groups.
    """
    assert len(groups) >= minibatches, f"{len(groups)} groups do not make {minibatches} minibatches"
    cost = cost or CostModel()
    samples = tuple(sample for group in groups for sample in group.samples)
    starts = np.cumsum([0] + [len(group.samples) for group in groups])
    group_costs = [sum(cost(s.length) for s in group.samples) for group in groups]
    plans = []
    for part in split_even(group_costs, minibatches):
        covered = tuple(i for g in part for i in range(int(starts[g]), int(starts[g + 1])))
        local = plan_microbatches(
            [samples[i].length for i in covered],
            ranks=dp,
            max_tokens=microbatch_tokens,
            cost=cost,
            multiple_of=multiple_of,
            sequence_multiple=sequence_multiple,
        )
        ranks = tuple(tuple(tuple(covered[j] for j in micro) for micro in rank) for rank in local)
        plans.append(MinibatchPlan(samples=covered, ranks=ranks))
    return StepBatch(
        samples=samples,
        min_version=min_version,
        trained_tokens=tuple(trained_tokens(s, mask_truncated) for s in samples),
        minibatches=tuple(plans),
    )


def loss_scalars(
    batch: StepBatch, algorithm: Algorithm, *, fixed_length: int, kl_s: Mapping[int, float] | None = None
) -> tuple[dict[int, float], dict[int, float]]:
    """Advantage and loss weight of every sample. Advantages over the whole batch, weights over each minibatch (one update each).

    Args:
        fixed_length: L of the ``fixed_length`` aggregation, tokens.
        kl_s: KL to the reference of each sample, where it goes into the reward.
    """
    penalty = None if kl_s is None else np.array([kl_s[i] for i in range(len(batch.samples))])
    rewards_s = shape_rewards([s.reward for s in batch.samples], algorithm, penalty)
    groups, members = [s.id.group_id for s in batch.samples], [s.id.member for s in batch.samples]
    advantages_s = compute_advantages(algorithm.advantage, rewards_s, groups, algorithm.singleton, members)
    length = fixed_length if algorithm.aggregation == "fixed_length" else None
    weights: dict[int, float] = {}
    for minibatch in batch.minibatches:
        counts = np.array([batch.trained_tokens[i] for i in minibatch.samples])
        for i, weight in zip(minibatch.samples, sample_weights(algorithm.aggregation, counts, length), strict=True):
            weights[i] = float(weight)
    return {i: float(a) for i, a in enumerate(advantages_s)}, weights


def batch_metrics(groups: Sequence[Group], batch: StepBatch, version: int, ages: Mapping[int, int], stale_tokens: int) -> Metrics:
    """Rewards, lengths and token ages of a batch. A member that has several turns counts once in the mean reward.

    Args:
        version: at which the batch is consumed.
        ages: histogram of all generated tokens by age in versions, those beyond the bound included.
        stale_tokens: tokens that the bound took out.
    """
    samples = batch.samples
    rewards = [s.reward for s in samples]
    generated = sum(ages.values())
    out: Metrics = {
        "reward/mean": mean_reward(samples),
        "reward/std": m.last(float(np.std(rewards))),
        "reward/min": m.minimum(min(rewards)),
        "reward/max": m.maximum(max(rewards)),
        "batch/uniform_groups": m.mean_of(is_uniform([s.reward for s in g.samples]) for g in groups),
        "batch/groups": m.total(len(groups)),
        "batch/samples": m.total(len(samples)),
        "batch/tokens": m.total(batch.tokens),
        "batch/trained_tokens": m.total(sum(batch.trained_tokens)),
        "batch/response_tokens": m.mean_of(s.loss_tokens for s in samples),
        "batch/truncated": m.mean_of(s.finish_reason == "length" for s in samples),
        "staleness/mean": m.mean(sum(age * n for age, n in ages.items()), generated),
        "staleness/max": m.maximum(max(ages)),
        "staleness/trained_max": m.maximum(max(version - s.oldest_version for s in samples)),
        "staleness/stale_tokens": m.total(stale_tokens),
    }
    return out | score_metrics("reward", samples, out)


def mean_reward(samples: Sequence[Sample]) -> Metric:
    """Mean over members; of one that has several turns, the mean of its turns."""
    weights = member_weights([s.id.group_id for s in samples], [s.id.member for s in samples])
    return m.mean(sum(w * s.reward for w, s in zip(weights, samples, strict=True)), float(sum(weights)))


def bias_metrics(bias: LengthBias) -> Metrics:
    """What the action ``drop_sample`` would have done to the samples that came in: lengths and rewards of both parts, and the shifts."""
    fresh, late = bias.fresh, bias.late
    out: Metrics = {"staleness/late_samples": m.mean(late.samples, late.samples + fresh.samples)}
    if fresh.samples:
        out["staleness/fresh_tokens"] = m.mean(fresh.tokens, fresh.samples)
        out["staleness/fresh_reward"] = m.mean(fresh.reward, fresh.samples)
    if late.samples:
        out["staleness/late_tokens"] = m.mean(late.tokens, late.samples)
        out["staleness/late_reward"] = m.mean(late.reward, late.samples)
    if bias.length_shift is not None and bias.reward_shift is not None:
        out["staleness/drop_length_shift"] = m.last(bias.length_shift)
        out["staleness/drop_reward_shift"] = m.last(bias.reward_shift)
    return out


def score_metrics(prefix: str, samples: Sequence[Sample], taken: Container[str]) -> Metrics:
    """Mean of every named score over the samples that have it: ``prefix/name``, or ``prefix/score/name`` where the first is ``taken``."""
    names = sorted({name for s in samples for name in s.scores})
    places = {name: f"{prefix}/score/{name}" if f"{prefix}/{name}" in taken else f"{prefix}/{name}" for name in names}
    return {place: m.mean_of(s.scores[name] for s in samples if name in s.scores) for name, place in places.items()}


def work_order(batch: StepBatch, dp_rank: int, version: int) -> dict[str, Any]:
    """What one data-parallel rank must fetch and how it packs it: the arguments of its ``load`` call."""
    mine = batch.rank_samples(dp_rank)
    return {
        "samples": {i: batch.samples[i] for i in mine},
        "trained_tokens": {i: batch.trained_tokens[i] for i in mine},
        "minibatches": [minibatch.ranks[dp_rank] for minibatch in batch.minibatches],
        "min_version": batch.min_version,
        "version": version,
    }
