"""The parity page covers every registered family (Kimi-K2 has DeepSeek-V3's code) and holds what it claims."""

from __future__ import annotations

import re
from pathlib import Path

from tiny_models import FAMILIES, SPARSE

from areal_mega.models.registry import FAMILIES as REGISTERED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")


def test_every_family_is_measured_and_within_bounds() -> None:
    heads = re.findall(r"^\| layout \| (.+) \|$", PAGE, re.MULTILINE)
    measured = set(heads[0].split(" | "))
    assert measured == {*FAMILIES, *SPARSE}
    types = {SPARSE[name][0] if name in SPARSE else name for name in measured}
    assert types == {name for family in REGISTERED for name in family.model_types} - {"kimi_k2"}
    assert [len(head.split(" | ")) for head in heads[1:]] == [len(measured) - 3, len(measured), len(measured) - 3]
    width = 0
    for row in PAGE.splitlines():
        if row.startswith("| layout |"):
            width = len(row.split(" | ")) - 1
        if row.startswith("| megatron:"):
            cells = re.findall(r"(\de-\d\d) (\de-\d\d) (=|differs)", row)
            assert len(cells) == width, row
            assert all(float(logits) <= 1e-4 and float(gradients) <= 1e-5 and export == "=" for logits, gradients, export in cells)
