"""Named algorithms, and the resolution of a recipe's ``algorithm`` section into one complete, consistent choice.

An algorithm is five independent pieces: advantage, ratio (with its clip), off-policy correction, aggregation, and where KL to the
reference goes. A name fills in all of them; the recipe overrides any; what contradicts is refused before a process starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, get_args

from areal_mega.config.schema import AlgorithmSection, Recipe
from areal_mega.core.errors import UserError

AdvantageRule = Literal["group_norm", "group_mean", "leave_one_out", "group_mean_batch_std"]
RatioRule = Literal["ppo", "gspo", "cispo"]
CorrectionRule = Literal["none", "decoupled", "tis", "mis"]
AggregationRule = Literal["token_mean", "sequence_mean", "fixed_length"]
SingletonRule = Literal["error", "batch_mean", "reward"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Every choice made. The trainer reads this and never the recipe's section.

    ``clip_low`` and ``clip_high`` bound the ratio to [1 - clip_low, 1 + clip_high]. ``correction_cap`` and ``correction_floor`` are
    None where the rule has no such bound.
    """

    name: str
    advantage: AdvantageRule
    singleton: SingletonRule
    ratio: RatioRule
    clip_low: float
    clip_high: float
    dual_clip: float | None
    correction: CorrectionRule
    correction_cap: float | None
    correction_floor: float | None
    aggregation: AggregationRule
    kl_coef: float
    kl_where: Literal["loss", "reward"]
    kl_estimator: KLEstimator
    filter_uniform_groups: bool
    mask_truncated: bool
    reward_scale: float
    reward_shift: float
    needs_proximal: bool
    """The trainer must compute proximal log-probabilities in a pass of their own, before the first update of the step.

    False only where the first update is the only one and nothing before it reads them: its own forward pass then yields the
    proximal policy exactly, since no weight has changed yet.
    """
    needs_reference: bool
    """Reference log-probabilities are used. With a coefficient of 0 they are measured and logged, and push nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a name stands for. ``clip`` None means: as the ratio rule has it. ``correction`` None means: the paper is on-policy."""

    advantage: AdvantageRule
    ratio: RatioRule
    aggregation: AggregationRule
    source: str
    clip: tuple[float, float] | None = None
    correction: CorrectionRule | None = None
    filter_uniform_groups: bool = False
    mask_truncated: bool = False


PRESETS: dict[str, Preset] = {
    "grpo": Preset(advantage="group_norm", ratio="ppo", aggregation="sequence_mean", source="arXiv:2402.03300"),
    "dr_grpo": Preset(advantage="group_mean", ratio="ppo", aggregation="fixed_length", source="arXiv:2503.20783"),
    # RLOO sums over a sequence's tokens; dividing by a fixed length changes only the scale of that sum.
    "rloo": Preset(advantage="leave_one_out", ratio="ppo", aggregation="fixed_length", source="arXiv:2402.14740"),
    "dapo": Preset(
        advantage="group_norm",
        ratio="ppo",
        clip=(0.2, 0.28),
        aggregation="token_mean",
        filter_uniform_groups=True,
        mask_truncated=True,
        source="arXiv:2503.14476",
    ),
    "gspo": Preset(advantage="group_norm", ratio="gspo", aggregation="sequence_mean", source="arXiv:2507.18071"),
    "cispo": Preset(advantage="group_norm", ratio="cispo", aggregation="token_mean", source="arXiv:2506.13585"),
}

# A clip range only means something for its own ratio: a sequence-level geometric mean moves by 1e-4 where a token's ratio moves by
# 1e-1, and CISPO has no lower bound. So overriding the ratio alone brings that ratio's own range along.
DEFAULT_CLIP: dict[RatioRule, tuple[float, float]] = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
# tis: one-sided truncation at 2; mis: the interval of IcePop (arXiv:2510.18855).
DEFAULT_CAP: dict[CorrectionRule, float] = {"tis": 2.0, "mis": 5.0}
DEFAULT_FLOOR: dict[CorrectionRule, float] = {"mis": 0.5}


def resolve_algorithm(
    section: AlgorithmSection,
    *,
    max_staleness: int,
    minibatches: int,
    has_reference: bool,
    group_size: int | None = None,
    sync_every: int = 1,
) -> Algorithm:
    """Fill in the named algorithm, apply the recipe's overrides, refuse contradictions.

    Args:
        section: the recipe's ``algorithm``.
        max_staleness: ``staleness.max_staleness``; above 0 the correction must have been chosen.
        minibatches: optimizer updates per train step.
        has_reference: ``model.reference_path`` is set.
        group_size: ``rollout.group_size`` where known: groups of one are then refused here rather than at the first step.
        sync_every: train steps between weight syncs; above 1 the policy leaves the servers' behind within one version.

    Raises:
        UserError: unknown name or piece, or pieces that contradict each other or the rest of the recipe.
    """
    preset = PRESETS[_one_of("algorithm.name", section.name, PRESETS)]
    advantage: AdvantageRule = _piece("advantage", section.advantage, get_args(AdvantageRule), preset.advantage)
    ratio: RatioRule = _piece("ratio", section.ratio, get_args(RatioRule), preset.ratio)
    correction: CorrectionRule = _piece("correction", section.correction, get_args(CorrectionRule), preset.correction or "none")
    aggregation: AggregationRule = _piece("aggregation", section.aggregation, get_args(AggregationRule), preset.aggregation)
    clip_low, clip_high = preset.clip if preset.clip and ratio == preset.ratio else DEFAULT_CLIP[ratio]
    kl = section.kl
    algorithm = Algorithm(
        name=section.name,
        advantage=advantage,
        singleton=section.singleton,
        ratio=ratio,
        clip_low=clip_low if section.clip_low is None else section.clip_low,
        clip_high=clip_high if section.clip_high is None else section.clip_high,
        dual_clip=section.dual_clip,
        correction=correction,
        correction_cap=DEFAULT_CAP.get(correction) if section.correction_cap is None else section.correction_cap,
        correction_floor=DEFAULT_FLOOR.get(correction) if section.correction_floor is None else section.correction_floor,
        aggregation=aggregation,
        kl_coef=kl.coef,
        kl_where=kl.where,
        kl_estimator=kl.estimator,
        filter_uniform_groups=_choose(section.filter_uniform_groups, preset.filter_uniform_groups),
        mask_truncated=_choose(section.mask_truncated, preset.mask_truncated),
        reward_scale=section.reward_scale,
        reward_shift=section.reward_shift,
        needs_proximal=minibatches > 1 or (kl.coef > 0 and kl.where == "reward"),
        needs_reference=has_reference or kl.coef > 0,
    )
    if max_staleness > 0 and section.correction is None and preset.correction is None:
        raise UserError(
            f"algorithm.correction is not chosen and staleness.max_staleness is {max_staleness}: tokens will be older than the policy "
            f"that trains on them; set algorithm.correction to {_listing(get_args(CorrectionRule))}, or staleness.max_staleness to 0"
        )
    if sync_every > 1 and section.correction is None and preset.correction is None:
        raise UserError(
            f"algorithm.correction is not chosen and sync.every_steps is {sync_every}: the policy will have been trained since the servers "
            f"got its weights; set algorithm.correction to {_listing(get_args(CorrectionRule))}, or sync.every_steps to 1"
        )
    _check_ratio(algorithm)
    _check_correction(algorithm)
    _check_kl(algorithm, has_reference)
    _check_groups(algorithm, group_size)
    return algorithm


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The algorithm of a whole recipe.

    Raises:
        UserError: as ``resolve_algorithm``.
    """
    return resolve_algorithm(
        recipe.algorithm,
        max_staleness=recipe.staleness.max_staleness,
        minibatches=recipe.train.minibatches,
        has_reference=recipe.model.reference_path is not None,
        group_size=recipe.rollout.group_size,
        sync_every=recipe.sync.every_steps,
    )


def describe(algorithm: Algorithm) -> dict[str, str]:
    """Every resolved choice as text, for ``config show`` and the run report."""
    return {field.name: str(getattr(algorithm, field.name)) for field in fields(algorithm)}


def _choose(override: bool | None, named: bool) -> bool:
    return named if override is None else override


def _piece[T: str](name: str, override: str | None, known: tuple[T, ...], named: T) -> T:
    if override is None:
        return named
    return known[known.index(_one_of(f"algorithm.{name}", override, known))]


def _listing(names: Iterable[str]) -> str:
    *head, tail = list(names)
    return f"{', '.join(head)} or {tail}" if head else tail


def _one_of(where: str, value: str, known: Iterable[str]) -> str:
    names = list(known)
    if value in names:
        return value
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"{where}: {value!r} is not known; {hint}it is one of {', '.join(names)}")


def _check_ratio(a: Algorithm) -> None:
    # CISPO's clip bounds a weight that is never negative, so its lower bound may reach 0; elsewhere that would be no clip at all.
    limit_reached = a.clip_low > 1 if a.ratio == "cispo" else a.clip_low >= 1
    if limit_reached:
        raise UserError(
            f"algorithm.clip_low is {a.clip_low:g}: the ratio {a.ratio} would be clipped at 1 - {a.clip_low:g} = {1 - a.clip_low:g}, "
            "and a ratio is never below 0; give a value below 1"
        )
    if a.dual_clip is None:
        return
    if a.ratio != "ppo":
        raise UserError(f"algorithm.dual_clip belongs to the ratio ppo and algorithm.ratio is {a.ratio}; remove one of the two")
    if a.dual_clip <= 1 + a.clip_high:
        raise UserError(
            f"algorithm.dual_clip is {a.dual_clip:g} and must be above 1 + clip_high = {1 + a.clip_high:g}: below it negative "
            "advantages would be cut inside the clip range; 3 is usual"
        )


def _check_correction(a: Algorithm) -> None:
    if a.correction_cap is not None and a.correction not in DEFAULT_CAP:
        remedy = "tis is the decoupled weight with a cap" if a.correction == "decoupled" else "choose tis or mis, or remove the cap"
        raise UserError(f"algorithm.correction_cap is {a.correction_cap:g} and algorithm.correction {a.correction} has no cap: {remedy}")
    if a.correction_floor is not None and a.correction not in DEFAULT_FLOOR:
        raise UserError(
            f"algorithm.correction_floor is {a.correction_floor:g} and algorithm.correction {a.correction} has no floor: "
            "choose mis, or remove the floor"
        )
    if a.correction_cap is not None and a.correction_cap < 1:
        raise UserError(
            f"algorithm.correction_cap is {a.correction_cap:g}: an on-policy token has weight 1 and would be cut; give 1 or more"
        )
    if a.correction_floor is not None and a.correction_floor > 1:
        raise UserError(
            f"algorithm.correction_floor is {a.correction_floor:g}: an on-policy token has weight 1 and would be masked; give 1 or less"
        )


def _check_kl(a: Algorithm, has_reference: bool) -> None:
    if a.kl_coef > 0 and not has_reference:
        raise UserError(
            f"algorithm.kl.coef is {a.kl_coef:g} and model.reference_path is not set: there is no reference model to measure KL "
            "against; set model.reference_path (model.path may be named again) or algorithm.kl.coef to 0"
        )
    if a.kl_coef > 0 and a.kl_where == "loss" and a.kl_estimator == "k1":
        raise UserError(
            "algorithm.kl.estimator is k1 and algorithm.kl.where is loss: the gradient of k1 has mean zero and would regularise "
            "nothing; use k2 or k3, or set algorithm.kl.where to reward"
        )


def _check_groups(a: Algorithm, group_size: int | None) -> None:
    if a.reward_scale == 0:
        raise UserError("algorithm.reward_scale is 0: every reward would be equal and nothing would be learned; give another value")
    if group_size != 1:
        return
    if a.filter_uniform_groups:
        raise UserError(
            "algorithm.filter_uniform_groups is on and rollout.group_size is 1: the rewards of a group of one are always equal, so "
            "every group would be dropped; give rollout.group_size 2 or more, or set algorithm.filter_uniform_groups to false"
        )
    if a.singleton == "error":
        raise UserError(
            f"algorithm.advantage {a.advantage} needs a group statistic and rollout.group_size is 1; give rollout.group_size 2 or "
            "more, or set algorithm.singleton to batch_mean or reward"
        )
