"""Keys and values of finished sequences, kept for requests that begin with the same tokens: the next turn of a conversation.

An entry belongs to the weights that made it: a change of weights empties the store. Bounded in tokens; the entry that was used longest
ago goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from areal_mega.serving.kv import Stored

_BLOCK = 16
"""Prefixes are looked up by whole blocks of so many tokens; what an entry shares beyond is found by comparing."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """``tokens`` int64 [n] and their keys and values."""

    tokens: np.ndarray
    kept: Stored


class PrefixStore:
    """At most ``max_tokens`` cached positions; 0 keeps nothing."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.tokens, self.changes = max_tokens, 0, 0
        self._entries: OrderedDict[int, Prefix] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, context: np.ndarray) -> tuple[Prefix | None, int]:
        """The entry that shares most of the context's beginning, and how many tokens; (None, 0) below one block."""
        found = -1
        for digest in self._digests(context):
            number = self._index.get(digest, -1)
            if number < 0:
                break
            found = number
        if found < 0:
            return None, 0
        entry = self._entries[found]
        self._entries.move_to_end(found)
        n = min(len(entry.tokens), len(context))
        differs = np.flatnonzero(entry.tokens[:n] != context[:n])
        return entry, int(differs[0]) if len(differs) else n

    def add(self, tokens: np.ndarray, read: Callable[[], Stored]) -> None:
        """Keep a sequence unless an entry holds all of it; entries that are the beginning of it go."""
        if not _BLOCK <= len(tokens) <= self.max_tokens:
            return
        entry, shared = self.find(tokens)
        if entry is not None and shared == len(tokens):
            return
        if entry is not None and shared == len(entry.tokens):
            self._drop(next(number for number, e in self._entries.items() if e is entry))
        number, self._next = self._next, self._next + 1
        self._entries[number] = Prefix(tokens, read())
        for digest in self._digests(tokens):
            self._index[digest] = number
        self.tokens += len(tokens)
        self.changes += 1
        while self.tokens > self.max_tokens:
            self._drop(next(iter(self._entries)))

    def _drop(self, number: int) -> None:
        """Forget an entry. Blocks that others share with it stay findable, by the newest of those."""
        gone = self._entries.pop(number)
        self.tokens -= len(gone.tokens)
        self.changes += 1
        orphans = {digest for digest in self._digests(gone.tokens) if self._index[digest] == number}
        for digest in orphans:
            del self._index[digest]
        if not orphans:
            return
        for other, entry in self._entries.items():
            if np.array_equal(entry.tokens[:_BLOCK], gone.tokens[:_BLOCK]):
                for digest in self._digests(entry.tokens):
                    if digest in orphans:
                        self._index[digest] = other

    def clear(self) -> None:
        self._entries.clear()
        self._index.clear()
        self.tokens, self.changes = 0, self.changes + 1

    @staticmethod
    def _digests(tokens: np.ndarray) -> Iterator[bytes]:
        """One per beginning of whole blocks, shortest first."""
        running = hashlib.blake2b(digest_size=16)
        for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
            running.update(tokens[end - _BLOCK : end].tobytes())
            yield running.digest()
