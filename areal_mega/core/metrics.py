"""A measurement that carries its own reduction, so that nobody averages a maximum.

A metric that was not measured is absent. Merging is associative and commutative, so the order in which ranks answer is irrelevant
(``last`` alone keeps the right-hand side).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["sum", "mean", "min", "max", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """``value`` under ``reduction``. For ``mean``, ``value`` is a numerator and ``weight`` the denominator it belongs to."""

    reduction: Reduction
    value: float
    weight: float = 1.0

    def merge(self, other: Metric) -> Metric:
        assert self.reduction == other.reduction, f"cannot merge a {self.reduction} with a {other.reduction}"
        match self.reduction:
            case "sum":
                return Metric("sum", self.value + other.value)
            case "mean":
                return Metric("mean", self.value + other.value, self.weight + other.weight)
            case "min":
                return Metric("min", min(self.value, other.value))
            case "max":
                return Metric("max", max(self.value, other.value))
            case "last":
                return other

    @property
    def result(self) -> float | None:
        """The number to show; None for a mean over nothing."""
        if self.reduction == "mean":
            return self.value / self.weight if self.weight else None
        return self.value


Metrics = dict[str, Metric]


def total(value: float) -> Metric:
    return Metric("sum", float(value))


def mean(numerator: float, denominator: float) -> Metric:
    return Metric("mean", float(numerator), float(denominator))


def mean_of(values: Iterable[float]) -> Metric:
    items = [float(v) for v in values]
    return Metric("mean", sum(items), float(len(items)))


def minimum(value: float) -> Metric:
    return Metric("min", float(value))


def maximum(value: float) -> Metric:
    return Metric("max", float(value))


def last(value: float) -> Metric:
    return Metric("last", float(value))


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Reduce several measurements of the same names, each by its own reduction."""
    out: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            out[name] = out[name].merge(metric) if name in out else metric
    return out


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain numbers, leaving out what was not measured."""
    return {name: value for name, metric in metrics.items() if (value := metric.result) is not None}
