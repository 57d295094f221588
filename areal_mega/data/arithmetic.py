"""Generated integer arithmetic: data that needs no download, with a held-out part that training can never have seen."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from areal_mega.core.errors import UserError
from areal_mega.data.files import Located

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
COMMUTATIVE = frozenset("+*")
SPLITS = ("train", "valid")
ENUMERABLE = 1 << 22
"""Largest problem space that is shuffled as a whole (32 MiB of indices); larger ones are drawn from."""


def arithmetic_rows(
    *,
    path: str | None,
    split: str,
    operations: Sequence[str] = ("+",),
    low: int = 0,
    high: int = 99,
    held_out: float = 0.1,
    count: int | None = None,
    seed: int = 0,
    digits: int | None = None,
    refusals: int = 0,
) -> Iterator[Located]:
    """Problems ``"17+25="`` with answer and response ``"42"``; the id is the problem, so ids are the same in every run.

    A problem belongs to ``valid`` where a hash of it falls below ``held_out``, else to ``train``: the splits are disjoint for every
    ``seed`` and ``count``. A sum or product is hashed with its operands sorted, so that ``25+17`` is held out with ``17+25``.
    Order is a function of ``seed`` alone; ``count`` and ``limit`` take a prefix of it.

    Args:
        path: must be None: nothing is read.
        split: ``train`` or ``valid``.
        operations: of ``+``, ``-``, ``*``.
        low, high: smallest and largest operand, both included; a negative second operand is written in brackets.
        held_out: part of all problems that belongs to ``valid``, between 0 and 1.
        count: number of problems; None for all of the split.
        seed: order of the problems.
        digits: operands are written with leading zeros up to so many digits (``"07+25="``); None writes them as they are.
        refusals: every problem is followed by so many further rows whose response is ``"?"``. A supervised warm-up on 1 teaches a model
            that knows the answer and gives it half the time: something that a reward can then correct.

    Raises:
        UserError: arguments that make no data, with the numbers.
    """
    if path is not None:
        raise UserError(f"data loader 'arithmetic' generates its rows and reads no file; remove path '{path}'")
    if split not in SPLITS:
        raise UserError(f"data loader 'arithmetic' has splits {' and '.join(SPLITS)}, not '{split}'")
    if not operations or any(op not in OPERATIONS for op in operations) or len(set(operations)) < len(operations):
        raise UserError(f"arithmetic operations must be a list of distinct {', '.join(OPERATIONS)}, not {list(operations)}")
    if not low <= high:
        raise UserError(f"arithmetic operands run from low to high, and {low} > {high}")
    if (digits is not None and digits < 1) or refusals < 0:
        raise UserError(f"arithmetic digits is at least 1 and refusals at least 0, not {digits} and {refusals}")
    if not 0 < held_out < 1:
        raise UserError(f"arithmetic held_out is a part between 0 and 1 (both excluded), not {held_out}")
    width = high - low + 1
    space = len(operations) * width * width
    if count is None and space > ENUMERABLE:
        raise UserError(f"arithmetic has {len(operations)} x {width}^2 = {space} problems, too many to list; set count")

    made = 0
    for index in _order(space, seed):
        if made == count:
            return
        pair, op_index = divmod(index, len(operations))
        first, second = divmod(pair, width)
        op, a, b = operations[op_index], low + first, low + second
        if _is_held_out(op, a, b, held_out) == (split == "valid"):
            made += 1
            where, row = _row(op, a, b, digits or 1)
            yield where, row
            for number in range(1, refusals + 1):
                yield where, {**row, "id": f"{row['id']} ?{number}", "response": "?"}
    if count is not None and made < count:
        raise UserError(f"arithmetic split '{split}' has {made} problems of {space} at held_out {held_out}, and count asks for {count}")


def _row(op: str, a: int, b: int, digits: int) -> Located:
    first, second = f"{a:0{digits}d}", f"{b:0{digits}d}"
    problem = f"{first}{op}{second}" if b >= 0 else f"{first}{op}({second})"
    answer = str(OPERATIONS[op](a, b))
    return f"arithmetic, problem {problem}", {"id": problem, "prompt": f"{problem}=", "answer": answer, "response": answer}


def _is_held_out(op: str, a: int, b: int, part: float) -> bool:
    first, second = sorted((a, b)) if op in COMMUTATIVE else (a, b)
    digest = hashlib.blake2b(f"{first} {op} {second}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < part * 2.0**64


def _order(space: int, seed: int) -> Iterator[int]:
    """Distinct problem numbers in an order that depends on the seed alone."""
    generator = np.random.default_rng(seed)
    if space <= ENUMERABLE:
        yield from map(int, generator.permutation(space))
        return
    drawn: set[int] = set()
    while len(drawn) < space:
        for index in map(int, generator.integers(0, space, size=4096)):
            if index not in drawn:
                drawn.add(index)
                yield index
