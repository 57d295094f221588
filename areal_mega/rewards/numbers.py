"""Reading one number out of text as people and models write them: exactly, or not at all.

Plain numbers (``18``, ``-3``, ``$1,234.50``, ``18.00``, ``3/4``, ``1 1/2``, ``50%``, ``18 eggs``) are read here, as exact fractions.
What is left (LaTeX, expressions) is for the math-verify library, which knows mathematics but not money, mixed numbers or exponents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\u2044": "/", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_THIN_THOUSANDS = re.compile(r"(?<=\d)[\u00a0\u202f\u2009](?=\d{3})")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\s*\{([^{}]*)\}")
_EMPHASIS = re.compile(r"\*\*(.+?)\*\*|`(.+?)`")
_NOISE = re.compile(r"\\[,;:! ]|\\[()\[\]]")
_CURRENCY = r"(?:\\?[$€£¥₹]|\b(?:USD|EUR|GBP)\b)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]\s*)?(?:{_CURRENCY}\s*)?(?P<inner_sign>-)?
    (?P<value>(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)
    (?P<exponent>[eE][-+]?\d+)?
    (?:\s*/\s*(?P<denominator>\d+)(?!\.?\d) | \s+(?P<part>\d+)\s*/\s*(?P<whole>\d+)(?!\.?\d))?
    (?:\s*(?P<percent>\\?%|percent\b))?
    (?:\s*(?P<scale>thousand|million|billion)\b)?
    """,
    re.VERBOSE,
)
MAX_DIGITS = 300
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_CONJUNCTION = re.compile(rf"(?:.*[\s,;])?(?:or|and|to)\s*{_CURRENCY}?\s*|\s*[,;&|]\s*{_CURRENCY}?\s*", re.DOTALL)
_OPERATOR = re.compile(rf"[\s)]*(?:[-+*/×·÷^:x(]|\*\*)?[\s(]*{_CURRENCY}?\s*")


class Reading(Enum):
    """Why a text is not one plain number."""

    NOTHING = "no number"
    SEVERAL = "more than one number"
    EXPRESSION = "an expression"


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact value; ``percent`` where a percent sign followed it (``value`` is the number before the sign)."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Quantity) -> bool:
        """Equal values. Where only one side writes a percent sign, ``50%`` equals both ``50`` and ``0.5``."""
        if self.percent == other.percent:
            return self.value == other.value
        with_sign, without = (self, other) if self.percent else (other, self)
        return without.value in (with_sign.value, with_sign.value / 100)


@dataclass(frozen=True, slots=True)
class _Found:
    quantity: Quantity | None
    """None where it is written like a number and is none (a division by zero, hundreds of digits)."""
    start: int
    end: int


def read_quantity(text: str) -> Quantity | Reading:
    """The one number that ``text`` states, its unit ignored; of an equation, the right-hand side (``12 - 5 = 7``).

    ``7 or 8`` is SEVERAL: whoever names two answers has given none. ``5 * 4`` and LaTeX are an EXPRESSION.
    """
    text = clean(text)
    sides = [side for side in text.split("=") if re.search(r"\d", side)]
    if not sides:
        return Reading.EXPRESSION if "\\" in text else Reading.NOTHING
    text = sides[-1]
    if re.search(r"\\(?![$%])|[{}]", text):
        return Reading.EXPRESSION
    found = list(_numbers(text))
    if not found:
        return Reading.NOTHING
    if len(found) > 1:
        gap = text[found[0].end : found[1].start]
        if _CONJUNCTION.fullmatch(gap):
            return Reading.SEVERAL
        if _OPERATOR.fullmatch(gap):
            return Reading.EXPRESSION
    return found[0].quantity or Reading.NOTHING


def last_quantity(text: str) -> Quantity | Reading:
    """The last number in running text."""
    found = list(_numbers(clean(text)))
    return (found[-1].quantity if found else None) or Reading.NOTHING


def clean(text: str) -> str:
    """Plain signs and spaces; markup around words and numbers taken off."""
    text = _THIN_THOUSANDS.sub("", text).translate(_SIGNS)
    text = _TEXT_COMMAND.sub(r" \1 ", text)
    text = _EMPHASIS.sub(lambda m: m[1] or m[2], text)
    return _NOISE.sub(" ", text).strip()


def _numbers(text: str) -> Iterator[_Found]:
    for match in _NUMBER.finditer(text):
        value = _value(match)
        start = match.start()
        if value is None:
            yield _Found(None, start, match.end())
            continue
        if match["sign"]:
            before = text[:start]
            # `10-3`, `10 - 3` and `part-3` do not hold a negative number; `loses -3` does.
            joined = before[-1:].isalnum() or before.rstrip()[-1:].isdigit() or before.rstrip()[-1:] in (")", "%")
            if joined and before.strip():
                start += len(match["sign"])
            elif match["sign"].startswith("-"):
                value = -value
        if match["inner_sign"]:
            value = -value
        yield _Found(Quantity(value, match["percent"] is not None), start, match.end())


def _value(match: re.Match[str]) -> Fraction | None:
    """Without its sign; None for a division by zero, and for more digits than any answer has."""
    if any(len(match[part] or "") > MAX_DIGITS for part in ("value", "denominator", "part", "whole")) or len(match["exponent"] or "") > 4:
        return None
    value = Fraction(match["value"].replace(",", ""))
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"][1:])
    if match["denominator"]:
        if int(match["denominator"]) == 0:
            return None
        value /= int(match["denominator"])
    elif match["whole"]:
        if int(match["whole"]) == 0:
            return None
        value += Fraction(int(match["part"]), int(match["whole"]))
    return value * _SCALES.get(match["scale"] or "", 1)
