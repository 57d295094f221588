"""Rewards of these runs, imported by their own processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any


def digits_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Part of even digits: differs between random answers."""
    return {"reward": sum(c in "02468" for c in completion) / max(1, len(completion)), "length": float(len(completion))}


def slow_digits_reward(prompt: str, completion: str, row: Mapping[str, Any], while_there: str) -> dict[str, float]:
    """The same, after a while as long as there is a file: a run that lasts until something has happened in it."""
    if os.path.exists(while_there):
        time.sleep(0.2)
    return digits_reward(prompt, completion, row)


def hanging_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    time.sleep(3600)
    return 0.0
