"""``checkpoint.json``: what a checkpoint consists of. It is written last, so that its presence is the commit.

Place of everything below the checkpoint's folder or URL::

    checkpoint.json              this manifest
    files/config.json, ...       the HuggingFace config, tokenizer and chat template, byte for byte
    arrays/NAME/zarr.json, c/... one zarr3 array per parameter
    objects/NAME                 plain data beside the arrays (checkpoints of kind ``state``)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_mega.checkpoint.arrays import PREFIX, ArraySpec
from areal_mega.checkpoint.location import Location
from areal_mega.core.errors import UserError

FORMAT, VERSION = "areal-mega checkpoint", 2
"""Version 2: the values beside the arrays are written as `rpc.codec` has them since data classes are marked lists."""
MANIFEST, JOURNAL, FILES = "checkpoint.json", "journal.json", "files/"
OBJECTS = "objects/"


@dataclass(frozen=True)
class Manifest:
    """The completeness list: every array and every file.

    ``kind`` is ``model`` (weights by logical name) or ``state`` (Megatron-Core sharded tensors by key). ``about`` is for people and for
    checks: a model's family and the strategy that wrote it; a state's plain part.
    """

    kind: str
    arrays: Mapping[str, ArraySpec]
    files: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.arrays.values())

    def to_json(self) -> bytes:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            **self.about,
            "files": dict(self.files),
            "bytes": self.nbytes,
        }
        # One line per array: a person can read it, and two of them can be compared line by line.
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        arrays = [f"{json.dumps(name)}: {json.dumps(spec.to_json())}" for name, spec in self.arrays.items()]
        return ("{\n" + ",\n".join([*lines, '"arrays": {\n' + ",\n".join(arrays) + "\n}"]) + "\n}\n").encode()

    @classmethod
    def from_json(cls, content: bytes, where: str) -> Manifest:
        """Raises UserError where it is damaged or of another version."""
        try:
            value = json.loads(content)
            if value["format"] != FORMAT:
                raise UserError(f"{where}: {MANIFEST} is of format '{value['format']}', not of a checkpoint of ours")
            if value["version"] > VERSION:
                raise UserError(f"{where} has format version {value['version']}, newer than {VERSION}: use a newer areal-mega")
            if value["version"] < VERSION:
                raise UserError(f"{where} has format version {value['version']}, older than {VERSION}: use the areal-mega that wrote it")

            arrays = {name: ArraySpec.from_json(name, entry) for name, entry in value["arrays"].items()}
            known = ("format", "version", "kind", "files", "bytes", "arrays")
            about = {key: entry for key, entry in value.items() if key not in known}
            return cls(value["kind"], arrays, value["files"], about)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where}: {MANIFEST} is damaged ({type(error).__name__}: {error}); take another copy") from None


def read_manifest(place: Location, kind: str) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        UserError: there is no checkpoint, or one that was never completed, or one of another kind.
    """
    return read_stamped_manifest(place, kind)[0]


def read_stamped_manifest(place: Location, kind: str) -> tuple[Manifest, str]:
    """As ``read_manifest``, and a stamp that tells this checkpoint from any other that was or will be at the same place."""
    content, stamp = place.read_stamped(MANIFEST) if place.path is None or place.path.is_dir() else (None, "")
    if content is None:
        unfinished = place.path is None and any(key.startswith(PREFIX) for key in place.listing())
        if unfinished or (place.path is not None and place.aside.path is not None and place.aside.path.exists()):
            raise UserError(f"{place}: the checkpoint was never completed; run what writes it again")
        raise UserError(f"{place} is no checkpoint: it has no {MANIFEST}")
    manifest = Manifest.from_json(content, str(place))
    if manifest.kind != kind:
        raise UserError(f"{place} is a checkpoint of kind '{manifest.kind}'; one of kind '{kind}' is wanted")
    return manifest, stamp


def check_present(place: Location, manifest: Manifest) -> None:
    """One listing: every chunk, file and object of the manifest is there.

    Raises:
        UserError: naming what is missing.
    """
    wanted = {key for spec in manifest.arrays.values() for key in spec.chunk_keys()}
    wanted |= {FILES + name for name in manifest.files} | {OBJECTS + name for name in manifest.about.get("objects", ())}
    missing = sorted(wanted - place.listing())
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{place} lacks {missing[0]}{more}; take another copy of the checkpoint")


def begin(target: Location, *, go_on: bool = False) -> Location:
    """Make room for a checkpoint, on one rank: the place to write to, empty unless ``go_on``.

    Raises:
        UserError: something is there already.
    """
    aside = target.aside
    if target.path is not None:
        taken = target.path.exists()
    else:
        # In an object store the unfinished checkpoint lies at the place itself: what else is there is not ours to remove.
        keys = target.listing()
        taken = any(not key.startswith((PREFIX, FILES, OBJECTS)) and key != JOURNAL for key in keys)
    if taken:
        raise UserError(f"{target} exists; remove it or choose another place")
    if not go_on:
        aside.clear()
    return aside


def write_files(aside: Location, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        aside.write(FILES + name, content)
