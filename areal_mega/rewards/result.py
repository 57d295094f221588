"""What a verifier said about one completion, and how the many things a function may return are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

RewardStatus = Literal["ok", "unparsed", "timeout", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """``value`` is None exactly for ``timeout`` and ``error``: no reward is known, and 0.0 would be a lie.

    ``unparsed``: the verifier found no answer to judge; ``value`` is what it gives for that. ``scores`` are named parts, logged apart.
    """

    value: float | None
    status: RewardStatus
    scores: Mapping[str, float] = field(default_factory=dict)
    message: str = ""


def interpret(returned: Any) -> RewardResult:
    """Read a reward function's return value: a number, or a mapping with ``reward`` and named scores.

    Anything else (None, NaN, text, a mapping without ``reward``) is an ``error`` that says what came back.
    """
    if not isinstance(returned, Mapping):
        value = _number(returned)
        if value is None:
            return _error(f"the reward function returned {_shown(returned)}, not a finite number or a mapping with 'reward'")
        return RewardResult(value=value, status="ok")
    scores: dict[str, float] = {}
    for name, raw in returned.items():
        number = _number(raw)
        if number is None:
            return _error(f"the reward function returned {name}={_shown(raw)}, not a finite number")
        scores[str(name)] = number
    if "reward" not in scores:
        return _error(f"the reward function returned a mapping without 'reward' (it has {', '.join(map(str, returned)) or 'nothing'})")
    value = scores.pop("reward")
    return RewardResult(value=value, status="ok" if scores.get("parsed", 1.0) else "unparsed", scores=scores)


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and not isinstance(value, Real):  # one-element arrays and tensors
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _error(message: str) -> RewardResult:
    return RewardResult(value=None, status="error", message=message)
