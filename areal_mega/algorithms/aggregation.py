"""How token losses become one number: a weight per token whose denominator is global to one optimizer update.

With the denominator inside the weight, the loss of an update is a plain sum over tokens. Its gradient is then the same, to rounding,
for every split into micro-batches, data-parallel ranks, or packing order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_mega.algorithms.registry import AggregationRule


def sample_weights(rule: AggregationRule, loss_tokens_s: Sequence[int] | np.ndarray, fixed_length: int | None = None) -> np.ndarray:
    """The weight that every trained token of a sample carries.

    ============= =================== ======================================================================
    token_mean    1 / sum of n        mean over the update's tokens (DAPO, arXiv:2503.14476)
    sequence_mean 1 / (S n_i)         mean over a sample's tokens, then over samples (GRPO, arXiv:2402.03300)
    fixed_length  1 / (S L)           sum over a sample's tokens by a constant (Dr.GRPO, arXiv:2503.20783)
    ============= =================== ======================================================================

    S counts the samples that have a trained token: one that was masked whole neither pushes nor dilutes.

    Args:
        rule: aggregation.
        loss_tokens_s: [S] trained tokens of *all* samples of one optimizer update, over all data-parallel ranks.
        fixed_length: L, usually ``rollout.max_new_tokens``; given exactly with ``fixed_length``.

    Returns:
        [S] float64; 0 for a sample without trained tokens.
    """
    tokens = np.asarray(loss_tokens_s, dtype=np.int64)
    assert tokens.ndim == 1 and bool((tokens >= 0).all()), "loss tokens are counts, one per sample"
    assert (fixed_length is not None) == (rule == "fixed_length"), "fixed_length is given exactly with the rule of that name"
    trained = tokens > 0
    samples = int(trained.sum())
    weights = np.zeros(len(tokens))
    if samples == 0:
        return weights
    match rule:
        case "token_mean":
            weights[trained] = 1.0 / int(tokens.sum())
        case "sequence_mean":
            weights[trained] = 1.0 / (samples * tokens[trained].astype(np.float64))
        case "fixed_length":
            assert fixed_length is not None and fixed_length > 0
            weights[trained] = 1.0 / (samples * fixed_length)
    return weights
