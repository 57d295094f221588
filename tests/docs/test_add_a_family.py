"""The page on families: its table is the registry, and the names that it gives are in the code."""

from __future__ import annotations

import re
from pathlib import Path

import tiny_models

from areal_mega.models import blocks, family, hf_config, registry, table
from areal_mega.serving.arch import SERVED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add-a-family.md").read_text(encoding="utf-8")


def test_the_table_of_families_is_the_registry() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| \[`(\w+)\.py`\]\([^)]+\) \| (yes|no) \|$", PAGE, re.MULTILINE)
    wanted = {
        (name, type(f).__module__.rpartition(".")[2], "yes" if name in SERVED else "no")
        for f in registry.FAMILIES
        for name in f.model_types
    }
    assert set(rows) == wanted
    assert len(rows) == len(wanted)


def test_names_exist() -> None:
    members = {"Family", "UserError", "FAMILIES", "SERVED", "read_arch", "TransformerConfig", "MLATransformerConfig"}
    for owner in (family.Family, table.Param, table, blocks, hf_config, tiny_models):
        members |= set(dir(owner)) | set(getattr(owner, "__annotations__", {}))
    prose = re.sub(r"^\|.*\|$", "", PAGE, flags=re.MULTILINE)
    for name in re.findall(r"`([A-Za-z_]\w*)`", prose):
        assert name in members | {"multi_latent_attention", "num_nextn_predict_layers"}, name
