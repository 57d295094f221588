"""Advantages over explicit group ids. Pure numpy; ragged groups are legal; nothing depends on the order of samples.

Sums are exact (``math.fsum``), so a permutation of the samples permutes the advantages and changes no bit of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from areal_mega.algorithms.registry import AdvantageRule, Algorithm, SingletonRule
from areal_mega.core.errors import UserError

EPS = 1e-6
"""Added to a standard deviation. It only ever divides a group that does have spread: equal rewards give exactly 0 before it."""


def shape_rewards(rewards_s: Sequence[float] | np.ndarray, algorithm: Algorithm, kl_s: np.ndarray | None = None) -> np.ndarray:
    """Rewards as the advantage sees them: ``scale * (reward + shift) - kl.coef * KL``, shape [S], float64.

    Args:
        rewards_s: [S] rewards of the verifier.
        algorithm: the resolved algorithm.
        kl_s: [S] KL to the reference summed over each sample's trained tokens; given exactly when KL goes in the reward.
    """
    shaped = algorithm.reward_scale * (np.asarray(rewards_s, dtype=np.float64) + algorithm.reward_shift)
    penalised = algorithm.kl_coef > 0 and algorithm.kl_where == "reward"
    assert (kl_s is not None) == penalised, "KL per sample is given exactly when algorithm.kl goes in the reward"
    return shaped if kl_s is None else shaped - algorithm.kl_coef * np.asarray(kl_s, dtype=np.float64)


def members_by_group(group_ids: Sequence[Hashable]) -> dict[Hashable, np.ndarray]:
    """Positions of each group's samples, wherever they stand in the list."""
    positions: dict[Hashable, list[int]] = {}
    for position, group in enumerate(group_ids):
        positions.setdefault(group, []).append(position)
    return {group: np.asarray(members) for group, members in positions.items()}


def is_uniform(rewards_g: Sequence[float] | np.ndarray) -> bool:
    """All rewards of one group are equal: it has no signal under any group estimator (DAPO drops and refills it)."""
    rewards = np.asarray(rewards_g, dtype=np.float64)
    return len(rewards) == 0 or bool(rewards.min() == rewards.max())


def member_weights(group_ids: Sequence[Hashable], members: Sequence[Hashable]) -> np.ndarray:
    """[S] float64: 1 over the number of turns of a sample's member, so that every member of a group weighs 1."""
    turns = Counter(zip(group_ids, members, strict=True))
    return np.array([1 / turns[key] for key in zip(group_ids, members, strict=True)], dtype=np.float64)


def compute_advantages(
    rule: AdvantageRule,
    rewards_s: Sequence[float] | np.ndarray,
    group_ids: Sequence[Hashable],
    singleton: SingletonRule,
    members: Sequence[Hashable] | None = None,
) -> np.ndarray:
    """One advantage per sample.

    ==================== ================================================ ================
    group_norm           (r - mean_g) / (std_g + eps)                     arXiv:2402.03300
    group_mean           r - mean_g                                       arXiv:2503.20783
    leave_one_out        r - mean of the other members                    arXiv:2402.14740
    group_mean_batch_std (r - mean_g) / (std_batch + eps)                 arXiv:2508.08221
    ==================== ================================================ ================

    Standard deviations are of the population (divided by n), so that groups of different sizes share one scale. A group whose
    rewards are all equal has advantage exactly 0. A group of one has no group statistic; ``singleton`` says what then:

    - ``error``: refused, naming the group;
    - ``batch_mean``: the whole batch stands in for the group, for its mean and (``group_norm``) its standard deviation;
    - ``reward``: no baseline and no scale; the advantage is the reward.

    Statistics are over *members*. A member may be several samples, one per turn; each then weighs 1 over their number, so that a member
    does not count more for talking longer. "The other members" of ``leave_one_out`` excludes all turns of the sample's own member.

    Args:
        rule: estimator.
        rewards_s: [S] shaped rewards.
        group_ids: S ids; equal ids are one group, in whatever order.
        singleton: see above.
        members: S ids within the groups; None: every sample is a member of its own.

    Returns:
        [S] float32.

    Raises:
        UserError: a reward is not finite, or a group of one has no fallback.
    """
    rewards = np.asarray(rewards_s, dtype=np.float64)
    assert rewards.ndim == 1 and len(rewards) == len(group_ids), f"{rewards.shape} rewards for {len(group_ids)} group ids"
    for group, reward in zip(group_ids, rewards, strict=True):
        if not np.isfinite(reward):
            raise UserError(f"the reward of a sample of group {group} is {reward}; a reward must be a finite number")
    who: Sequence[Hashable] = range(len(rewards)) if members is None else members
    weights = member_weights(group_ids, who)
    batch_scale = _std(rewards, weights) + EPS if rule == "group_mean_batch_std" else None
    advantages = np.zeros(len(rewards))
    for group, positions in members_by_group(group_ids).items():
        mine = [who[i] for i in positions]
        if len(set(mine)) == 1:
            advantages[positions] = _lone(rule, rewards, weights, positions, group, singleton)
        elif rule == "leave_one_out":
            advantages[positions] = _leave_one_out(rewards[positions], weights[positions], mine)
        else:
            advantages[positions] = _centred(rule, rewards[positions], weights[positions], batch_scale)
    return advantages.astype(np.float32)


def _centred(rule: AdvantageRule, rewards_g: np.ndarray, weights_g: np.ndarray, batch_scale: float | None) -> np.ndarray:
    if is_uniform(rewards_g):
        return np.zeros(len(rewards_g))
    centred = rewards_g - _mean(rewards_g, weights_g)
    match rule:
        case "group_norm":
            return centred / (_std(rewards_g, weights_g) + EPS)
        case "group_mean":
            return centred
        case "group_mean_batch_std":
            assert batch_scale is not None
            return centred / batch_scale
        case _:
            raise AssertionError(f"{rule} is not a centred rule")


def _leave_one_out(rewards_g: np.ndarray, weights_g: np.ndarray, members_g: Sequence[Hashable]) -> np.ndarray:
    if is_uniform(rewards_g):
        return np.zeros(len(rewards_g))
    own = {who: _mean(rewards_g[turns], weights_g[turns]) for who, turns in members_by_group(members_g).items()}
    n, mean = len(own), _mean(rewards_g, weights_g)
    return rewards_g - np.array([(n * mean - own[who]) / (n - 1) for who in members_g])


def _lone(
    rule: AdvantageRule,
    rewards: np.ndarray,
    weights: np.ndarray,
    positions: np.ndarray,
    group: Hashable,
    singleton: SingletonRule,
) -> np.ndarray:
    """Advantages of the turns of a group's only member."""
    if singleton == "error":
        raise UserError(
            f"group {group} has one sample and {rule} needs a group statistic; raise rollout.group_size, or set algorithm.singleton "
            "to batch_mean or reward"
        )
    if singleton == "reward":
        return rewards[positions]
    if len(rewards) == len(positions):
        raise UserError(
            f"group {group} is the only sample of the batch, so algorithm.singleton batch_mean has no mean to offer; raise "
            "train.batch_size or rollout.group_size, or set algorithm.singleton to reward"
        )
    if is_uniform(rewards):
        return np.zeros(len(positions))
    centred = rewards[positions] - _mean(rewards, weights)
    return centred / (_std(rewards, weights) + EPS) if rule in ("group_norm", "group_mean_batch_std") else centred


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    return math.fsum(weights * values) / math.fsum(weights)


def _std(values: np.ndarray, weights: np.ndarray) -> float:
    return math.sqrt(math.fsum(weights * (values - _mean(values, weights)) ** 2) / math.fsum(weights))
