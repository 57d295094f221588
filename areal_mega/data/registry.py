"""From the recipe's dataset section to rows in normal form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from areal_mega.config.schema import DatasetSection
from areal_mega.core.errors import UserError
from areal_mega.core.imports import import_object
from areal_mega.data.arithmetic import arithmetic_rows
from areal_mega.data.files import Located
from areal_mega.data.gsm8k import gsm8k_rows
from areal_mega.data.jsonl import jsonl_rows
from areal_mega.data.rows import Row, normalise, with_ids

Loader = Callable[..., Iterable[Any]]
"""Called as ``loader(path=…, split=…, **kwargs)``; yields rows, or ``(where, row)`` pairs that say where a row comes from."""

LOADERS: dict[str, Loader] = {"gsm8k": gsm8k_rows, "arithmetic": arithmetic_rows, "jsonl": jsonl_rows}


def load_rows(section: DatasetSection) -> list[Row]:
    """Load, check and number the rows of one dataset.

    Raises:
        UserError: unknown loader, wrong kwargs, missing file, or a row that is not in normal form (with file and line).
    """
    loader = _loader(section.loader)
    try:
        inspect.signature(loader).bind(path=section.path, split=section.split, **section.kwargs)
    except TypeError as error:
        raise UserError(f"data loader '{section.loader}': {error}; it takes {inspect.signature(loader)}") from None
    produced = loader(path=section.path, split=section.split, **section.kwargs)
    rows = with_ids(
        (where, normalise(row, where))
        for where, row in (_locate(item, i, section) for i, item in enumerate(islice(produced, section.limit)))
    )
    if not rows:
        raise UserError(f"data loader '{section.loader}' gave no rows (path {section.path}, split '{section.split}')")
    return rows


def _loader(name: str) -> Loader:
    if name in LOADERS:
        return LOADERS[name]
    if ":" not in name and "." not in name:
        raise UserError(f"data loader '{name}' is unknown; choose {', '.join(sorted(LOADERS))}, or give an import path module:function")
    loader = import_object(name, "data loader")
    if not callable(loader):
        raise UserError(f"data loader '{name}' is not a function")
    return loader


def _locate(item: Any, index: int, section: DatasetSection) -> Located:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Mapping):
        return item
    where = f"data loader '{section.loader}', row {index}"
    if not isinstance(item, Mapping):
        raise UserError(f"{where}: a row must be a mapping, not {type(item).__name__}")
    return where, item
