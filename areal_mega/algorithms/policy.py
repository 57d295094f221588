"""The policy loss: ratio and clip, off-policy correction, KL, in one sum over tokens.

Three policies are kept apart: behaviour pi_b (the server's log-probabilities), proximal pi_p (the trainer's, before the update) and
current pi_theta. The ratio is pi_theta / pi_p; the correction weighs pi_p / pi_b.

Every per-token tensor describes the token at its own index; only tokens under ``loss_mask`` count. The denominator is already in
``weights`` (see ``aggregation``), so losses and gradients of micro-batches add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_mega.algorithms.kl import kl_estimate
from areal_mega.algorithms.measure import Measured, TokenMeter
from areal_mega.algorithms.registry import Algorithm


def policy_loss(
    logprobs_t: Tensor, fields: Mapping[str, Tensor], sequence_t: Tensor, num_sequences: int, algorithm: Algorithm
) -> tuple[Tensor, Measured]:
    """Loss of one micro-batch; whole sequences only.

    Args:
        logprobs_t: [T] current log-probabilities, with graph.
        fields: [T] each: ``loss_mask``, ``logprobs`` (behaviour), ``advantages``, ``weights``; ``proximal`` where
            ``algorithm.needs_proximal`` (otherwise the current policy before its only update *is* the proximal one);
            ``reference`` where ``algorithm.needs_reference``. Optional, for measurements: ``entropy``, and ``staleness``
            (versions between the server's token and the trainer).
        sequence_t: [T] int64, which of ``num_sequences`` sequences a token belongs to.
        num_sequences: sequences in the micro-batch, padding's own included.
        algorithm: the resolved algorithm.

    Returns:
        The loss (fp32 scalar) and what was measured on the way, detached.
    """
    mask_t = fields["loss_mask"].bool()
    current_t = _trained(logprobs_t, mask_t)
    behaviour_t = _trained(fields["logprobs"], mask_t)
    advantages_t = _trained(fields["advantages"], mask_t)
    weights_t = _trained(fields["weights"], mask_t)
    assert "proximal" in fields or not algorithm.needs_proximal, "the algorithm needs proximal log-probabilities"
    proximal_t = _trained(fields["proximal"], mask_t).detach() if "proximal" in fields else current_t.detach()

    meter = TokenMeter(mask_t)
    objective_t = _objective(algorithm, current_t, proximal_t, advantages_t, mask_t, sequence_t, num_sequences, meter)
    # As in _objective: a weight that overflowed must not make nan of a token that has nothing to learn.
    correction_t = _correction(algorithm, proximal_t - behaviour_t, meter).masked_fill(advantages_t == 0, 0.0)
    loss_t = -objective_t * correction_t
    if "reference" in fields:
        kl_t = kl_estimate(algorithm.kl_estimator, current_t, _trained(fields["reference"], mask_t))
        meter.mean("kl/reference", kl_t)
        if algorithm.kl_coef > 0 and algorithm.kl_where == "loss":
            loss_t = loss_t + algorithm.kl_coef * kl_t
    else:
        assert not algorithm.needs_reference, "the algorithm needs reference log-probabilities"

    meter.weighted("train/loss", loss_t, weights_t)
    _measure_mismatch(meter, behaviour_t, proximal_t, fields.get("staleness"))
    if "entropy" in fields:
        meter.mean("policy/entropy", fields["entropy"])
    return (loss_t * weights_t).sum(), meter.measured


def _trained(values_t: Tensor, mask_t: Tensor) -> Tensor:
    """fp32, with everything outside the mask replaced by 0: garbage there must reach neither an exponential nor a gradient."""
    return torch.where(mask_t, values_t.float(), 0.0)


def _objective(
    algorithm: Algorithm,
    current_t: Tensor,
    proximal_t: Tensor,
    advantages_t: Tensor,
    mask_t: Tensor,
    sequence_t: Tensor,
    num_sequences: int,
    meter: TokenMeter,
) -> Tensor:
    """What is to be maximised, per token, before correction and weights."""
    log_ratio_t = current_t - proximal_t
    if algorithm.ratio == "gspo":
        log_ratio_t = sequence_mean(log_ratio_t, mask_t, sequence_t, num_sequences)
    # Where the advantage is 0 nothing is to be learned: an overflowing ratio must not make 0 * inf = nan of it.
    ratio_t = torch.where(advantages_t != 0, log_ratio_t, 0.0).exp()
    clipped_t = ratio_t.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    measured_ratio_t = log_ratio_t.detach().exp()
    meter.mean("policy/ratio_mean", measured_ratio_t)
    meter.max("policy/ratio_max", measured_ratio_t)
    # k3 of KL(proximal || current), as if the tokens were the proximal policy's own.
    meter.mean("policy/approx_kl", measured_ratio_t - 1 - log_ratio_t.detach())
    if algorithm.ratio == "cispo":
        meter.fraction("policy/clip_fraction", clipped_t != ratio_t)
        return clipped_t.detach() * advantages_t * current_t
    plain_t, bounded_t = ratio_t * advantages_t, clipped_t * advantages_t
    meter.fraction("policy/clip_fraction", bounded_t < plain_t)
    objective_t = torch.minimum(plain_t, bounded_t)
    if algorithm.dual_clip is None:
        return objective_t
    floor_t = algorithm.dual_clip * advantages_t
    cut_t = (advantages_t < 0) & (objective_t < floor_t)
    meter.fraction("policy/dual_clip_fraction", cut_t)
    return torch.where(cut_t, floor_t, objective_t)


def sequence_mean(values_t: Tensor, mask_t: Tensor, sequence_t: Tensor, num_sequences: int) -> Tensor:
    """Mean over each sequence's trained tokens, given back to each of its tokens. Differentiable; shape [T]."""
    mask_float_t = mask_t.to(values_t.dtype)
    sums_s = values_t.new_zeros(num_sequences).index_add(0, sequence_t, values_t * mask_float_t)
    counts_s = values_t.new_zeros(num_sequences).index_add(0, sequence_t, mask_float_t)
    return (sums_s / counts_s.clamp(min=1.0))[sequence_t]


def _correction(algorithm: Algorithm, log_weight_t: Tensor, meter: TokenMeter) -> Tensor:
    """The weight pi_p / pi_b under the algorithm's rule, [T], without gradient.

    decoupled: as it is (AReaL, arXiv:2505.24298); tis: truncated above; mis: 0 outside [floor, cap] (IcePop, arXiv:2510.18855).
    """
    if algorithm.correction == "none":
        return torch.ones_like(log_weight_t)
    raw_t = log_weight_t.detach().exp()
    match algorithm.correction:
        case "decoupled":
            weight_t = raw_t
        case "tis":
            assert algorithm.correction_cap is not None
            meter.fraction("correction/truncated_fraction", raw_t > algorithm.correction_cap)
            weight_t = raw_t.clamp(max=algorithm.correction_cap)
        case "mis":
            assert algorithm.correction_cap is not None and algorithm.correction_floor is not None
            outside_t = (raw_t < algorithm.correction_floor) | (raw_t > algorithm.correction_cap)
            meter.fraction("correction/masked_fraction", outside_t)
            weight_t = raw_t.masked_fill(outside_t, 0.0)
    meter.mean("correction/weight_mean", weight_t)
    meter.max("correction/weight_max", weight_t)
    return weight_t


def _measure_mismatch(meter: TokenMeter, behaviour_t: Tensor, proximal_t: Tensor, staleness_t: Tensor | None) -> None:
    """How far the trainer's policy is from the one that generated: staleness and numerics together.

    On tokens of the current version only numerics differ: ``mismatch/fresh_abs_*`` is that part alone.
    """
    log_ratio_t = (proximal_t - behaviour_t).detach()
    ratio_t, distance_t = log_ratio_t.exp(), log_ratio_t.abs()
    meter.mean("mismatch/abs_mean", distance_t)
    meter.max("mismatch/abs_max", distance_t)
    meter.mean("mismatch/kl", ratio_t - 1 - log_ratio_t)  # k3 of KL(behaviour || proximal)
    meter.mean("mismatch/ratio_mean", ratio_t)
    meter.max("mismatch/ratio_max", ratio_t)
    if staleness_t is not None:
        fresh_t = meter.mask_t & (staleness_t == 0)
        meter.mean("mismatch/fresh_abs_mean", distance_t, fresh_t)
        meter.max("mismatch/fresh_abs_max", distance_t, fresh_t)
