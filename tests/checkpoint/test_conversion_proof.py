"""Neither direction of a conversion starts before its table is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_models import write_model

from areal_mega.checkpoint import convert
from areal_mega.models.table import TableMismatch


def test_both_directions_prove_the_table_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "source", "qwen3")
    convert.from_hf(source, tmp_path / "ck", strategy="megatron:d1")

    def refuse(*_: Any) -> None:
        raise TableMismatch("t is consumed twice")

    monkeypatch.setattr(convert, "prove_table", refuse)
    with pytest.raises(TableMismatch, match="consumed twice"):
        convert.from_hf(source, tmp_path / "again", strategy="megatron:d1")
    with pytest.raises(TableMismatch, match="consumed twice"):
        convert.to_hf(tmp_path / "ck", tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "source"]
