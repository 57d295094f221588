"""Measurements made on the device during a loss, and their one trip to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from areal_mega.core.metrics import Metric, Metrics, Reduction, merge

Measured = dict[str, tuple[Reduction, Tensor, Tensor]]
"""Name -> (reduction, value, weight), both scalar tensors. For ``mean``, value is the numerator and weight its denominator;
elsewhere weight is the number of tokens looked at. Weight 0 means: not measured."""


def to_metrics(parts: Iterable[Mapping[str, tuple[Reduction, Tensor, Tensor]]]) -> Metrics:
    """Reduce the measurements of several micro-batches. One device synchronisation in all; what was not measured is absent."""
    labels: list[tuple[int, str, Reduction]] = []
    tensors: list[Tensor] = []
    for index, part in enumerate(parts):
        for name, (reduction, value, weight) in part.items():
            labels.append((index, name, reduction))
            tensors += [value.detach().double().reshape(()), weight.detach().double().reshape(())]
    if not tensors:
        return {}
    numbers = torch.stack(tensors).tolist()
    by_part: dict[int, Metrics] = {}
    for position, (index, name, reduction) in enumerate(labels):
        value, weight = numbers[2 * position], numbers[2 * position + 1]
        if weight > 0:
            by_part.setdefault(index, {})[name] = Metric(reduction, value, weight if reduction == "mean" else 1.0)
    return merge(by_part.values())


class TokenMeter:
    """Reductions over the trained tokens of one micro-batch. Every argument has shape [T]; nothing keeps a graph."""

    def __init__(self, mask_t: Tensor) -> None:
        self.mask_t = mask_t
        self.count = mask_t.sum()
        self.measured: Measured = {}

    def mean(self, name: str, values_t: Tensor, mask_t: Tensor | None = None) -> None:
        mask_t = self.mask_t if mask_t is None else mask_t
        self.measured[name] = ("mean", values_t.detach().masked_fill(~mask_t, 0.0).sum(), mask_t.sum())

    def max(self, name: str, values_t: Tensor, mask_t: Tensor | None = None) -> None:
        mask_t = self.mask_t if mask_t is None else mask_t
        if values_t.numel():
            self.measured[name] = ("max", values_t.detach().masked_fill(~mask_t, -torch.inf).max(), mask_t.sum())

    def fraction(self, name: str, hits_t: Tensor) -> None:
        self.measured[name] = ("mean", (hits_t & self.mask_t).sum(), self.count)

    def weighted(self, name: str, losses_t: Tensor, weights_t: Tensor) -> None:
        """Mean of ``losses_t`` under ``weights_t``, whose own sum is the denominator."""
        weights_t = weights_t.detach().masked_fill(~self.mask_t, 0.0)
        numerator = (losses_t.detach().masked_fill(~self.mask_t, 0.0) * weights_t).sum()
        self.measured[name] = ("mean", numerator, weights_t.sum())
