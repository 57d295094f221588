"""Records of a JSONL file, a Parquet file or a hub dataset, each with where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_mega.core.errors import UserError

Located = tuple[str, Mapping[str, Any]]
"""Where a record stands (``train.jsonl, line 7``), and the record."""

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_records(path: str, split: str, hub_config: str | None = None) -> Iterator[Located]:
    """Records of ``path``: a ``.jsonl`` or ``.parquet`` file, a folder with ``<split>.jsonl`` or ``<split>.parquet``, or a hub name.

    Args:
        path: a path is local when it exists, ends in a file suffix, or starts with ``.``, ``~`` or ``/``; else it is a hub name.
        split: file stem within a folder; split of a hub dataset. A file given by name has no splits.
        hub_config: configuration of a hub dataset that has several.

    Raises:
        UserError: nothing there, or a line that is not a JSON object.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        local = _file_of_split(local, split)
    elif not local.exists():
        if local.suffix in SUFFIXES or path.startswith((".", "~", "/")):
            raise UserError(f"data file {local} does not exist; check data.*.path")
        yield from _read_hub(path, split, hub_config)
        return
    yield from _read_parquet(local) if local.suffix == ".parquet" else _read_jsonl(local)


def _file_of_split(folder: Path, split: str) -> Path:
    candidates = [folder / f"{split}{suffix}" for suffix in SUFFIXES]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise UserError(f"data folder {folder} has none of {', '.join(c.name for c in candidates)}; check data.*.path and data.*.split")


def _read_jsonl(file: Path) -> Iterator[Located]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue  # an empty line holds no record: editors leave one at the end
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}); a JSONL file has one object per line") from None
            if not isinstance(record, dict):
                raise UserError(f"{where}: must be a JSON object, not {type(record).__name__}")
            yield where, record


def _read_parquet(file: Path) -> Iterator[Located]:
    import pyarrow
    from pyarrow import parquet

    try:
        reader = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"data file {file} is not Parquet: {str(error).splitlines()[0]}") from None
    number = 0
    with reader:
        for batch in reader.iter_batches():
            for record in batch.to_pylist():
                yield f"{file}, row {number}", record
                number += 1


def _read_hub(name: str, split: str, config: str | None) -> Iterator[Located]:
    import datasets

    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub client raises many kinds, all of which mean that the named data is not to be had
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"dataset '{name}' (split '{split}') is neither a local file nor loadable from the hub: {reason}") from error
    for number, record in enumerate(dataset):
        yield f"{name} [{split}], row {number}", record
