"""Generated arithmetic: the completion must be the integer, and nothing else."""

from __future__ import annotations

import re
from typing import Any

_INTEGER = re.compile(r"\s*([+-]?[0-9]+)\s*")
MAX_DIGITS = 4000
"""Python refuses to convert longer texts; no problem has such an answer."""


def arithmetic_reward(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, float]:
    """1 where the completion is exactly the integer ``row["answer"]``, else 0.

    Returns:
        ``reward``; ``parsed`` is 0 where the completion is not one integer, so that broken answers are counted apart from wrong ones.
    """
    expected = int(row["answer"])
    match = _INTEGER.fullmatch(completion)
    if match is None or len(match[1]) > MAX_DIGITS:
        return {"reward": 0.0, "parsed": 0.0}
    return {"reward": float(int(match[1]) == expected), "parsed": 1.0}
