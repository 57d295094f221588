"""Supervised losses on the same engine: the signature of ``policy_loss`` without its algorithm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_mega.algorithms.measure import Measured, TokenMeter


def sft_loss(logprobs_t: Tensor, fields: Mapping[str, Tensor], sequence_t: Tensor, num_sequences: int) -> tuple[Tensor, Measured]:
    """Negative log-likelihood of the trained tokens: ``-sum(weights * logprobs)`` over ``loss_mask``.

    Args:
        logprobs_t: [T] log-probabilities, with graph, aligned to the token they describe.
        fields: [T] each: ``loss_mask`` and ``weights`` (see ``aggregation``).
        sequence_t: [T] int64, the sequence of each token; not needed here.
        num_sequences: not needed here.

    Returns:
        The loss (fp32 scalar) and ``train/loss``, ``sft/nll`` (nats per token) and ``sft/tokens``.
    """
    del sequence_t, num_sequences
    mask_t = fields["loss_mask"].bool()
    nll_t = -torch.where(mask_t, logprobs_t.float(), 0.0)
    weights_t = torch.where(mask_t, fields["weights"].float(), 0.0)
    meter = TokenMeter(mask_t)
    meter.weighted("train/loss", nll_t, weights_t)
    meter.mean("sft/nll", nll_t)
    meter.measured["sft/tokens"] = ("sum", meter.count, meter.count)
    return (nll_t * weights_t).sum(), meter.measured
