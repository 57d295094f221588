"""Sampling of one token per row, all rows at once, each with its own seed.

A row's random number depends on its seed and on the token's position in the sequence alone: not on who else is in the batch, nor on
where the request was interrupted and continued.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from areal_mega.serving.ops import Kernels, Ops

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [rows] in [0, 1): two rounds of splitmix64 (Steele, Lea and Flood, 2014), keyed by seed, counted by position."""
    with np.errstate(over="ignore"):
        x = _mix(seeds.astype(np.uint64) + _GOLDEN)
        x = _mix(x ^ (positions.astype(np.uint64) * _GOLDEN))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters of the rows to sample, each [rows]. ``temperature`` 0 is greedy; ``top_k`` <= 0, ``top_p`` 1, ``min_p`` 0 are off."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray

    def subset(self, rows: np.ndarray) -> RowSampling:
        return RowSampling(*(getattr(self, field.name)[rows] for field in fields(self)))


class NotFinite(ArithmeticError):
    """The logits of ``row`` give no probabilities."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__("logits are not finite")


def sample(logits_rv: Tensor, rows: RowSampling, ops: Ops) -> tuple[Tensor, Tensor]:
    """Draw a token for every row.

    Args:
        logits_rv: [rows, vocab], of any float type; computed with in float32.

    Returns:
        tokens int64 [rows]; their log-probabilities float32 [rows], see ``log_probabilities``.

    Raises:
        NotFinite: a row has NaN or infinity, or -infinity throughout (some -infinity is a token's exclusion).
    """
    if not isinstance(ops, Kernels):
        return _sample_by_torch(logits_rv, rows)
    random = torch.from_numpy(uniforms(rows.seed, rows.position))
    tokens, logprobs = ops.draw(logits_rv.contiguous(), torch.from_numpy(rows.temperature), random)
    bad = logprobs.isnan()
    if bad.any():
        raise NotFinite(int(bad.to(torch.uint8).argmax()))
    limited = np.flatnonzero(_limited(rows) & (rows.temperature > 0.0))
    if len(limited):
        where = torch.from_numpy(limited)
        tokens[where], logprobs[where] = _sample_by_torch(logits_rv[where], rows.subset(limited))
    return tokens, logprobs


def _sample_by_torch(logits_rv: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    greedy = rows.temperature == 0.0
    logprobs_rv = log_probabilities(logits_rv, rows.temperature)
    bad = logprobs_rv[:, 0].isnan()  # the sum over a row makes one bad logit all of its log-probabilities' affair
    if bad.any():
        raise NotFinite(int(bad.to(torch.uint8).argmax()))
    if greedy.all():
        tokens = logits_rv.argmax(-1)
    else:
        tokens = _draw(logprobs_rv, rows)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy), logits_rv.argmax(-1), tokens)
    return tokens, logprobs_rv.gather(1, tokens[:, None]).squeeze(1)


def log_probabilities(logits_rv: Tensor, temperature: np.ndarray) -> Tensor:
    """log_softmax(logits / temperature) before top-k, top-p and min-p, as SGLang reports them; of a greedy row, log_softmax(logits)."""
    scale = np.where(temperature == 0.0, 1.0, temperature).astype(np.float32)
    scaled = logits_rv.float() if (scale == 1.0).all() else logits_rv / torch.from_numpy(scale)[:, None]
    return torch.log_softmax(scaled, -1)


def _limited(rows: RowSampling) -> np.ndarray:
    limited: np.ndarray = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    return limited


def _draw(logprobs_rv: Tensor, rows: RowSampling) -> Tensor:
    """Inverse transform sampling: the first token whose cumulated probability exceeds the row's uniform number.

    In two steps, over blocks of tokens and then within one, so that the whole vocabulary is summed (fast) and only a part cumulated.
    """
    count, vocab = logprobs_rv.shape
    blocks = -(-vocab // _BLOCK)
    probabilities = torch.empty(count, blocks * _BLOCK)
    torch.exp(logprobs_rv, out=probabilities[:, :vocab])
    probabilities[:, vocab:] = 0.0
    limited = np.flatnonzero(_limited(rows))
    if len(limited):
        where = torch.from_numpy(limited)
        probabilities[where] = _limit(probabilities[where], rows, limited)
    # Double precision, or the tail of a large vocabulary would never be drawn.
    blocked = probabilities.view(count, blocks, _BLOCK)
    ends = blocked.sum(-1).cumsum(-1, dtype=torch.float64)
    draw = torch.from_numpy(uniforms(rows.seed, rows.position))[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, draw, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocked.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    within = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), draw - before, right=True)
    # The block's sum in single precision may exceed its cumulated end by a rounding: then it is the last token with a probability.
    last = _BLOCK - 1 - (inside.flip(-1) > 0).to(torch.uint8).argmax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(within, last)).clamp_(max=vocab - 1).squeeze(1)


def _limit(probabilities: Tensor, rows: RowSampling, where: np.ndarray) -> Tensor:
    """Zero what top-k, top-p or min-p exclude, in that order; the likeliest token always stays. Not renormalised."""
    top_k, top_p, min_p = (torch.from_numpy(a[where]) for a in (rows.top_k, rows.top_p, rows.min_p))
    ordered, index = probabilities.sort(-1, descending=True)
    rank = torch.arange(ordered.shape[1])
    keep = (top_k[:, None] <= 0) | (rank < top_k[:, None])
    kept = ordered * keep
    # Nucleus of what top-k left: a token stays while the mass before it is below top_p of the whole.
    before = kept.cumsum(-1, dtype=torch.float64) - kept
    keep &= before < top_p[:, None].double() * kept.sum(-1, keepdim=True, dtype=torch.float64)
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter_(1, index, ordered * keep)
