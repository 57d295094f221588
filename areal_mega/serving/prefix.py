"""Keys and values of finished sequences, kept for requests that begin with the same tokens: the next turn of a conversation.

An entry belongs to the weights that made it: a change of weights empties the store. Bounded in tokens; the entry that was used longest
ago goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from areal_mega.serving.kv import Stored

_BLOCK = 16
"""Prefixes are looked up by whole blocks of so many tokens; what an entry shares beyond is found by comparing."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """``tokens`` int64 [n] and their keys and values; ``digests`` of its beginnings of whole blocks, shortest first."""

    number: int
    tokens: np.ndarray
    digests: tuple[bytes, ...]
    kept: Stored


class PrefixStore:
    """At most ``max_tokens`` cached positions; 0 keeps nothing."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.tokens, self.changes = max_tokens, 0, 0
        self._entries: OrderedDict[int, Prefix] = OrderedDict()
        self._index: dict[bytes, dict[int, None]] = {}
        """By beginning, the numbers of all entries that have it, the newest last."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, context: np.ndarray) -> tuple[Prefix | None, int]:
        """The entry that shares most of the context's beginning, and how many tokens; (None, 0) below one block."""
        return self._find(context, self._digests(context))

    def entry(self, number: int) -> Prefix:
        """An entry that ``find`` gave, while ``changes`` is what it was then."""
        return self._entries[number]

    def _find(self, context: np.ndarray, digests: Iterable[bytes]) -> tuple[Prefix | None, int]:
        found: dict[int, None] = {}
        for digest in digests:
            if digest not in self._index:
                break
            found = self._index[digest]
        if not found:
            return None, 0
        entry = self._entries[next(reversed(found))]
        self._entries.move_to_end(entry.number)
        n = min(len(entry.tokens), len(context))
        differs = np.flatnonzero(entry.tokens[:n] != context[:n])
        return entry, int(differs[0]) if len(differs) else n

    def add(self, tokens: np.ndarray, read: Callable[[], Stored]) -> None:
        """Keep a sequence unless an entry holds all of it; entries that are the beginning of it go."""
        if not _BLOCK <= len(tokens) <= self.max_tokens:
            return
        digests = tuple(self._digests(tokens))
        entry, shared = self._find(tokens, digests)
        if entry is not None and shared == len(tokens):
            return
        if entry is not None and shared == len(entry.tokens):
            self._drop(entry)
        added, self._next = Prefix(self._next, tokens, digests, read()), self._next + 1
        self._entries[added.number] = added
        for digest in digests:
            self._index.setdefault(digest, {})[added.number] = None
        self.tokens += len(tokens)
        self.changes += 1
        while self.tokens > self.max_tokens:
            self._drop(next(iter(self._entries.values())))

    def _drop(self, gone: Prefix) -> None:
        """Forget an entry. Blocks that others share with it stay findable, by the newest of those."""
        del self._entries[gone.number]
        self.tokens -= len(gone.tokens)
        self.changes += 1
        for digest in gone.digests:
            holders = self._index[digest]
            del holders[gone.number]
            if not holders:
                del self._index[digest]

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
