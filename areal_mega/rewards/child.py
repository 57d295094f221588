"""The verifier's own process: imports one reward function and answers requests until its standard input ends.

Messages are encoded (`areal_mega.rpc.codec`) maps behind a 4-byte big-endian length. The protocol uses private copies of the
pipes: what the reward function prints goes to standard error, hence to the log of the worker, and cannot break it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, BinaryIO

from areal_mega.core.errors import UserError
from areal_mega.core.imports import import_object
from areal_mega.rewards.result import RewardResult, interpret
from areal_mega.rpc.codec import decode, encode

LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


def main(parent_pid: int) -> None:
    """Serve the process ``parent_pid``; end when it does, even when the reward function is stuck."""
    _die_with(parent_pid)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    setup = read_message(requests)
    if setup is None:
        return
    try:
        function = load_function(setup["path"], setup["kwargs"])
    except UserError as error:
        write_message(answers, {"ready": False, "user_error": str(error)})
        return
    except Exception:  # the user's module failed while it was imported: the parent reports it as it is
        write_message(answers, {"ready": False, "traceback": traceback.format_exc()})
        return
    write_message(answers, {"ready": True})
    while (request := read_message(requests)) is not None:
        result = call(function, request["prompt"], request["completion"], request["row"], setup["kwargs"])
        write_message(answers, {"id": request["id"], **asdict(result)})


def load_function(path: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Import the reward function and check that it can be called as it will be.

    Raises:
        UserError: no such function, or one that does not take these arguments.
    """
    function = import_object(path, "reward")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UserError(f"reward '{path}' must be a plain function (prompt, completion, row, **kwargs): it runs in a process of its own")
    try:
        inspect.signature(function).bind("", "", {}, **kwargs)
    except TypeError as error:
        raise UserError(f"reward '{path}' takes {inspect.signature(function)}: {error} (reward.kwargs: {sorted(kwargs)})") from None
    return function


def call(function: Callable[..., Any], prompt: str, completion: str, row: dict[str, Any], kwargs: dict[str, Any]) -> RewardResult:
    """One verification; an exception of the reward function is a result with status ``error``."""
    try:
        return interpret(function(prompt, completion, row, **kwargs))
    except Exception as error:  # whatever a verifier raises concerns this one sample, and is reported with it
        where = traceback.extract_tb(error.__traceback__)[-1]
        return RewardResult(value=None, status="error", message=f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return decode(body) if len(body) == size else None


def write_message(stream: BinaryIO, message: dict[str, Any]) -> None:
    body = encode(message)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the line above
        sys.exit(0)
