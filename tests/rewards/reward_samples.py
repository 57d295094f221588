"""Reward functions that the tests of the runner name by import path."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any


def echo(prompt: str, completion: str, row: dict[str, Any], *, scale: float = 1.0) -> float:
    return scale * float(completion)


def behave(prompt: str, completion: str, row: dict[str, Any]) -> Any:
    """Does what the completion names."""
    match completion:
        case "spin":
            while True:
                pass
        case "c code":
            re.match(r"(a+)+$", "a" * 64 + "b")  # exponential backtracking inside one C call
        case "sleep":
            time.sleep(3600)
        case "raise":
            raise RuntimeError("this verifier is broken")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "print":
            print("noise on standard output" * 100)
            os.write(1, b"\x00\x00\x00\x01raw noise")
            return 0.25
        case "read":
            return float(len(sys.stdin.read()))
        case "none":
            return None
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "zero":
            return 0.0
        case "scores":
            return {"reward": 0.5, "correct": True, "parsed": 1}
        case "unparsed":
            return {"reward": 0.0, "parsed": False}
        case "no reward":
            return {"correct": 1.0}
        case "pid":
            return float(os.getpid())
        case "spawn":
            pid = os.fork()
            if pid == 0:
                time.sleep(3600)
            with open(row["file"], "w") as file:
                file.write(str(pid))
            time.sleep(3600)
    return float(completion)


async def coroutine(prompt: str, completion: str, row: dict[str, Any]) -> float:
    return 0.0
