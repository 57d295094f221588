"""Any JSONL or Parquet file (or hub dataset) whose records are rows, or become rows by renaming columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from areal_mega.core.errors import UserError
from areal_mega.data.files import Located, read_records


def jsonl_rows(*, path: str | None, split: str, columns: Mapping[str, str] | None = None, config: str | None = None) -> Iterator[Located]:
    """Rows in normal form as the file has them.

    Args:
        path: JSONL or Parquet file, folder, or hub name.
        split: see `read_records`.
        columns: normal name → column of the file, e.g. ``{prompt: question, answer: solution}``; other columns stay as they are.
        config: configuration of a hub dataset that has several.

    Raises:
        UserError: no path, or a record that lacks a named column.
    """
    if path is None:
        raise UserError("data loader 'jsonl' needs a path: set data.*.path to a JSONL or Parquet file, a folder or a hub name")
    names = dict(columns or {})
    for where, record in read_records(path, split, config):
        for name, column in names.items():
            if column not in record:
                raise UserError(f"{where}: no column '{column}' (wanted for `{name}`); it has {', '.join(map(str, record))}")
        renamed = {name: record[column] for name, column in names.items()}
        yield where, {**{k: v for k, v in record.items() if k not in names.values()}, **renamed}
