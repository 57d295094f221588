"""Where an interrupted conversion goes on: the units that are stored for good, beside what they belong to."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from areal_mega.checkpoint.location import Location, storage
from areal_mega.checkpoint.manifest import JOURNAL
from areal_mega.core.errors import UserError

FLUSH_BYTES = 1024**3
"""At most so much is done twice after an interruption."""


class Journal:
    """Progress of one conversion, in the unfinished output itself.

    Args:
        place: the unfinished output; it is cleared where no journal of a conversion is in it.
        plan: everything that determines the output's bytes. A journal of another plan is refused.

    Raises:
        UserError: the output was begun by a conversion of another plan.
    """

    def __init__(self, place: Location, plan: Mapping[str, Any]) -> None:
        self._place = place
        self._plan = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        self._unsaved = 0
        self.done: list[str] = []
        content = place.read(JOURNAL) if place.path is None or place.path.is_dir() else None
        if content is None:
            place.clear()
            self._save()
            return
        try:
            saved = json.loads(content)
        except json.JSONDecodeError:
            raise UserError(f"{place}: {JOURNAL} is damaged; remove the folder to begin anew") from None
        if saved["plan"] != self._plan:
            raise UserError(f"{place} was begun from other input or with other options; remove it to begin anew")
        self.done = saved["done"]

    def add(self, unit: str, nbytes: int) -> None:
        """A unit is written; it is recorded with the next batch."""
        self.done.append(unit)
        self._unsaved += nbytes
        if self._unsaved >= FLUSH_BYTES:
            self.save()

    def save(self) -> None:
        self._place.sync()
        self._save()
        self._unsaved = 0

    def _save(self) -> None:
        self._place.write(JOURNAL, json.dumps({"plan": self._plan, "done": self.done}).encode())

    def remove(self) -> None:
        """The output is complete, and stored for good."""
        self._place.remove(JOURNAL)


@contextmanager
def exclusive(place: Location) -> Iterator[None]:
    """Refuse a second conversion into the same folder while one runs; the kernel frees the lock however that one ends.

    Raises:
        UserError: another process holds it.
    """
    if place.path is None:
        yield
        return
    with storage(f"cannot make {place}"):
        place.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(place.path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"another conversion is writing {place}; wait for it, or choose another output") from None
    finally:
        os.close(handle)
