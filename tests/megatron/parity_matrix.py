"""Families × layouts: which cases the parity matrix has, and how one family's are measured. The test and ``docs/parity.md`` share it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import family_cases as families
from ranks import run_ranks
from tiny_models import FAMILIES, SPARSE, tiny_model

from areal_mega.parallel.strategy import parse

NAMES = (*FAMILIES, *SPARSE)
WITH_EXPERTS = ("qwen3_moe", *SPARSE)
ANY = ("megatron:d1", "megatron:d1t2", "megatron:d1p2", "megatron:d1c2", "megatron:d1p2v2", "megatron:d1p2[1,3]")
"""Four layers each."""
MOE = (
    "megatron:d2e2",
    "megatron:d1t2e2",
    "megatron:(attn:d1t2|ffn:e1t2)",
    "megatron:d2t2p2e2",
    "megatron:(attn:d1t2c2p2|ffn:e2t2)",
    "megatron:d2t2c2e4",
)
UNEVEN = ("megatron:d1p2[1,4]", "megatron:d1p2[1,2,1,1]v2")
"""Five layers."""
GATHERED = ("megatron:d2e2", "megatron:d1t2e2", "megatron:d2p2e2", "megatron:d2p2v2e2")
"""Four layers, with ``router.dispatcher: allgather``."""
BATCH = 10
"""Engines that one set of processes makes, one after the other."""


def layouts(name: str) -> tuple[str, ...]:
    """What the matrix has for a family."""
    return ANY + MOE if name in WITH_EXPERTS else ANY


def model(root: Path, name: str, layers: int = 4) -> tuple[str, dict[str, Any]]:
    """A folder, and transformers' answers."""
    folder = str(tiny_model(root / f"{name}-{layers}", name, num_hidden_layers=layers))
    (references,) = run_ranks(1, families.references, folders={name: folder}, timeout_s=280)
    return folder, references[name]


def measure(folder: str, reference: dict[str, Any], strategies: Sequence[str], **job: Any) -> dict[str, dict[str, Any]]:
    """Differences of one family by strategy. Raises AssertionError where a bound is exceeded."""
    found = {}
    for size in sorted({parse(s).world_size for s in strategies}):
        mine = [s for s in strategies if parse(s).world_size == size]
        for start in range(0, len(mine), BATCH):
            part = mine[start : start + BATCH]
            jobs = [{"folder": folder, "strategy": s, "split": 2 if "v2" in s else 1, **job} for s in part]
            results = run_ranks(size, families.parities, jobs=jobs, timeout_s=280)
            for number, strategy in enumerate(part):
                found[strategy] = families.summary([rank[number] for rank in results], reference)
                families.check(found[strategy], f"{folder} at {strategy}")
    return found
