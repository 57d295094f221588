"""Prompts in a seeded order, epoch after epoch, from a cursor that can be saved and restored.

The order of an epoch sorts rows by a hash of (seed, epoch, id). It depends on no library's generator and not on the order of the
rows in their file, so a resumed run sees what the uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_mega.core.errors import UserError
from areal_mega.core.types import Prompt


class PromptStream:
    """Endless stream of prompts. Batches run over the end of an epoch: the last partial batch is filled, never dropped.

    Args:
        rows: rows in normal form with unique ids.
        seed: seeds the order.
        shuffle: False keeps the order of ``rows`` in every epoch.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, seed: int, shuffle: bool) -> None:
        assert rows, "an empty dataset is refused when it is loaded"
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._index_of = {row["id"]: i for i, row in enumerate(rows)}
        assert len(self._index_of) == len(rows), "ids are made unique when the data is loaded"
        self._fingerprint = self._fingerprint_of_rows()
        self._returned: deque[Prompt] = deque()
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """Epoch of the next fresh prompt."""
        return self._epoch

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts: those put back first, then fresh ones."""
        return [self._returned.popleft() if self._returned else self._fresh() for _ in range(n)]

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Give prompts again before any fresh one: in-flight prompts of an interrupted run, stale groups to refill."""
        self._returned.extend(prompts)

    def state(self) -> dict[str, Any]:
        """The cursor as plain JSON types."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "returned": [[p.id, p.epoch] for p in self._returned],
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._rows),
            "dataset": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved cursor.

        Raises:
            UserError: the data, its seed or its shuffling changed since: the cursor would point at other prompts.
        """
        mine = self.state()
        for key in ("rows", "seed", "shuffle", "dataset"):
            if mine[key] != state[key]:
                raise UserError(
                    f"the training data changed since the checkpoint ({key}: {state[key]} then, {mine[key]} now); "
                    "resume with the same data, run.seed and data.shuffle, or start a new run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)
        self._returned = deque(self._prompt(self._index_of[id_], int(epoch)) for id_, epoch in state["returned"])

    def _fresh(self) -> Prompt:
        prompt = self._prompt(self._order[self._position], self._epoch)
        self._position += 1
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return prompt

    def _prompt(self, index: int, epoch: int) -> Prompt:
        row = self._rows[index]
        return Prompt(id=row["id"], epoch=epoch, row=row)

    def _order_of(self, epoch: int) -> list[int]:
        indices = range(len(self._rows))
        if not self._shuffle:
            return list(indices)
        return sorted(
            indices, key=lambda i: hashlib.blake2b(f"{self._seed}/{epoch}/{self._rows[i]['id']}".encode(), digest_size=16).digest()
        )

    def _fingerprint_of_rows(self) -> str:
        """Over the ids in the order that matters: as given when that is the order of the prompts, else sorted."""
        ids = sorted(self._index_of) if self._shuffle else list(self._index_of)
        digest = hashlib.blake2b(digest_size=8)
        for id_ in ids:
            digest.update(id_.encode() + b"\0")
        return digest.hexdigest()
