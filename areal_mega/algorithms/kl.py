"""Estimators of KL(policy || reference) from the log-probabilities of tokens that the policy sampled.

Source: J. Schulman, "Approximating KL divergence", 2020. With d = log pi_ref - log pi:

- k1 = -d: unbiased, high variance, may be negative;
- k2 = d^2 / 2: biased, never negative; its gradient is that of KL on-policy;
- k3 = exp(d) - 1 - d: unbiased, never negative.
"""

from __future__ import annotations

from torch import Tensor, expm1

from areal_mega.algorithms.registry import KLEstimator


def kl_estimate(estimator: KLEstimator, policy_t: Tensor, reference_t: Tensor) -> Tensor:
    """KL per token, shape [T], in nats; differentiable in ``policy_t``."""
    difference = reference_t - policy_t
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            # expm1: exp(d) - 1 loses every digit where the two policies nearly agree, which is where this is used.
            return expm1(difference) - difference
