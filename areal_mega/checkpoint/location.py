"""Where a checkpoint lies: a folder, or the URL of an object store. Small files go through here as well as the arrays' key-value store."""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from areal_mega.core.errors import UserError
from areal_mega.models.rows import fsync_folder

SCHEMES = ("file", "memory", "s3", "gs")
CONTEXT = ts.Context({"file_io_sync": False})
"""Shared by all: the memory driver keeps its keys in the context, so another one would not see them. Files are made durable together, by
``Location.sync``: thousands of single waits for the disk cost more than the writing."""


@dataclass(frozen=True)
class Location:
    """A folder (``path`` is set) or an object store's prefix (``path`` is None). ``url`` ends with a slash."""

    url: str
    path: Path | None

    @classmethod
    def parse(cls, text: str | Path) -> Location:
        """A path, or a URL with one of ``SCHEMES``.

        Raises:
            UserError: for another scheme, or a ``file`` URL of another host.
        """
        scheme, separator, _ = str(text).partition("://")
        if isinstance(text, Path) or not separator:
            return cls.of_folder(Path(text))
        if scheme not in SCHEMES:
            raise UserError(f"{text}: scheme '{scheme}' is not supported; give a folder or a URL of {', '.join(SCHEMES)}")
        if scheme == "file":
            parts = urlsplit(str(text))
            if parts.netloc not in ("", "localhost"):
                raise UserError(f"{text} names host '{parts.netloc}'; a file URL has three slashes: file:///folder")
            return cls.of_folder(Path(unquote(parts.path)))
        return cls(str(text).rstrip("/") + "/", None)

    @classmethod
    def of_folder(cls, path: Path) -> Location:
        return cls(f"{path.absolute().as_uri()}/", path)

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.url

    @property
    def aside(self) -> Location:
        """Where it is written before it is complete: a hidden neighbour of a folder; in an object store the place itself."""
        if self.path is None:
            return self
        whole = self.path.absolute()
        return Location.of_folder(whole.with_name(f".{whole.name}.partial")) if whole.name else self

    @cached_property
    def _store(self) -> Any:
        with storage(f"cannot open {self}"):
            return ts.KvStore.open(self.url, context=CONTEXT).result()

    def read(self, key: str) -> bytes | None:
        """The content of a key; None where there is none."""
        return self.read_stamped(key)[0]

    def read_stamped(self, key: str) -> tuple[bytes | None, str]:
        """Content, and a stamp that is another one whenever the key was written anew."""
        with storage(f"cannot read {key} in {self}"):
            found = self._store.read(key).result()
        return (bytes(found.value) if found.state == "value" else None), bytes(found.stamp.generation).hex()

    def write(self, key: str, content: bytes) -> None:
        with storage(f"cannot write {key} in {self}"):
            self._store.write(key, content).result()

    def remove(self, key: str) -> None:
        with storage(f"cannot remove {key} in {self}"):
            self._store.write(key, None).result()

    def listing(self) -> frozenset[str]:
        with storage(f"cannot list {self}"):
            return frozenset(key.decode() for key in self._store.list().result())

    def clear(self) -> None:
        """Remove everything below, not a folder itself."""
        if self.path is not None:
            for child in self.path.iterdir() if self.path.exists() else ():
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child)
                else:
                    child.unlink()
            return
        with storage(f"cannot clear {self}"):
            self._store.delete_range(ts.KvStore.KeyRange()).result()

    def sync(self) -> None:
        """What this machine wrote here survives its crash from now on. An object store answers only then anyway."""
        if self.path is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "syncfs"):  # not Linux
            os.sync()
            return
        with storage(f"cannot write {self}"):
            folder = os.open(self.path, os.O_RDONLY)
            try:
                if libc.syncfs(folder):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                os.close(folder)

    def occupied(self) -> bool:
        """Whether anything is there."""
        return self.path.exists() if self.path is not None else bool(self.listing())


def refuse_unfinished(place: Location) -> None:
    """Say of a folder that is not there yet that it is unfinished, rather than look for its name on the hub.

    Raises:
        UserError: what is to become the folder lies aside.
    """
    aside = place.aside.path
    if place.path is not None and aside is not None and not place.path.exists() and aside.exists():
        raise UserError(f"{place} was never completed; run what writes it again")


def publish(aside: Location, target: Location, journal: str | None = None) -> None:
    """Give a complete folder its name, for good (in an object store the manifest commits).

    Args:
        journal: key that is removed on the way: not before everything is stored for good, which takes long, so that a process which is
            killed while it waits can still go on.
    """
    if aside.path is None or target.path is None:
        if journal is not None:
            aside.remove(journal)
        return
    for left in aside.path.rglob("*.__lock"):
        left.unlink()  # of a writer that was killed
    aside.sync()
    if journal is not None:
        aside.remove(journal)
    with storage(f"cannot name {target}"):
        aside.path.rename(target.path)
        fsync_folder(target.path.absolute().parent)


_REMEDIES = (
    ("No space left", "free space, then run the same again"),
    ("RESOURCE_EXHAUSTED", "free space, then run the same again"),
    ("File too large", "raise the limit on file sizes (ulimit -f)"),
    ("Permission denied", "choose a place that may be written"),
    ("PERMISSION_DENIED", "check the credentials and the bucket's permissions"),
    ("UNAUTHENTICATED", "check the credentials"),
    ("Not enough data", "the chunk is truncated: take another copy of the checkpoint"),
    ("is missing", "take another copy of the checkpoint"),
)


class storage:
    """Turns what the storage refuses (a full disk, missing rights, a truncated chunk) into one line: ``what: why; remedy``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UserError) or not isinstance(error, OSError | ValueError):
            return
        why = str(error).strip().splitlines()[0].partition(" [")[0]
        remedy = next((text for sign, text in _REMEDIES if sign in why), "see that the place exists and may be used")
        raise UserError(f"{self._what}: {why}; {remedy}") from error
