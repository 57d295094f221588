"""GSM8K: is the final number right? Numbers are compared exactly; LaTeX and expressions by the math-verify library."""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

from areal_mega.rewards.numbers import Quantity, Reading, clean, last_quantity, read_quantity

MARKER = "####"
BOXED = "\\boxed"

# It warns at every call that its own time-outs are off; they are, on purpose (see `_verify`).
logging.getLogger("math_verify").setLevel(logging.ERROR)


def gsm8k_reward(
    prompt: str, completion: str, row: dict[str, Any], *, strict: bool = False, format_reward: float = 0.0
) -> dict[str, float]:
    """Score one completion against ``row["answer"]``.

    The answer is what follows the *last* ``####`` up to the end of its line, however much text comes after that line. Without a
    marker, and unless ``strict``, it is the last ``\\boxed{…}``, else the last number of the text.

    Args:
        strict: only an answer after ``####`` counts.
        format_reward: added to the reward where the marker is followed by a readable answer, right or wrong.

    Returns:
        ``reward``, and apart from it ``correct`` (0 or 1), ``parsed`` (0 where no single answer could be read) and ``format``
        (1 where the answer stood after the marker).

    Raises:
        ValueError: the reference answer itself is unreadable: no completion could be right.
    """
    reference = row["answer"]
    marked = _after_marker(completion)
    verdict = _agrees(marked, reference) if marked is not None else None
    format_score = float(verdict is not None)
    if marked is None and not strict:
        boxed = _last_boxed(completion)
        if boxed is not None:
            verdict = _agrees(boxed, reference)
        else:
            verdict = _compare(last_quantity(completion), reference)
    correct = float(verdict is True)
    return {
        "reward": correct + format_reward * format_score,
        "correct": correct,
        "parsed": float(verdict is not None),
        "format": format_score,
    }


def _after_marker(completion: str) -> str | None:
    _, marker, rest = completion.rpartition(MARKER)
    if not marker:
        return None
    lines = rest.lstrip(" :\t").split("\n")
    # A model may break the line after the marker; the answer is then on the next one.
    return lines[0].strip() or (lines[1].strip() if len(lines) > 1 else "")


def _last_boxed(completion: str) -> str | None:
    """Content of the last ``\\boxed{…}`` with its braces balanced; None where there is none."""
    start = completion.rfind(BOXED)
    if start < 0:
        return None
    opening = re.compile(r"\s*\{").match(completion, start + len(BOXED))
    if opening is None:
        return None
    depth = 1
    for end in range(opening.end(), len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[end], 0)
        if depth == 0:
            return completion[opening.end() : end]
    return None


def _agrees(answer: str, reference: str) -> bool | None:
    """True or False for a readable answer, None where no single answer can be read."""
    reading = read_quantity(answer)
    return _verify(answer, reference) if reading is Reading.EXPRESSION else _compare(reading, reference)


def _compare(reading: Quantity | Reading, reference: str) -> bool | None:
    expected = read_quantity(reference)
    if isinstance(expected, Quantity):
        return reading.equals(expected) if isinstance(reading, Quantity) else None
    if expected is not Reading.EXPRESSION:
        raise ValueError(f"the reference answer {reference!r} is {expected.value}")
    return _verify(str(reading.value), reference) if isinstance(reading, Quantity) else None


def _verify(answer: str, reference: str) -> bool | None:
    """By mathematics. The library's own time-outs are alarms; the process that runs this has a time-out that always fires."""
    expected = parse(_as_latex(reference), parsing_timeout=None, raise_on_error=True)
    if not expected:
        raise ValueError(f"the reference answer {reference!r} cannot be read")
    found = parse(_as_latex(answer), parsing_timeout=None)
    return verify(expected, found, timeout_seconds=None) if found else None


def _as_latex(text: str) -> str:
    """Delimited, so that the library reads all of it instead of searching it for something that looks like an answer."""
    return "$" + re.sub(r"\\?\$|(?<=\d),(?=\d{3})|(?<=\d) (?=\d{3}(?!\d))", "", clean(text)).strip() + "$"
