"""Write docs/parity.md: every family at every kind of layout against transformers, on CPU processes. Takes minutes.

python scripts/make_parity.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "megatron")]

import family_cases as families  # noqa: E402
from ranks import run_ranks  # noqa: E402
from tiny_models import FAMILIES, SPARSE, tiny_model  # noqa: E402

from areal_mega.parallel.strategy import parse  # noqa: E402

PATH = ROOT / "docs" / "parity.md"
ANY = ("megatron:d1", "megatron:d1t2", "megatron:d1p2", "megatron:d1c2", "megatron:d1p2v2")
MOE = (
    "megatron:d2e2",
    "megatron:d1t2e2",
    "megatron:(attn:d1t2|ffn:e1t2)",
    "megatron:d2t2p2e2",
    "megatron:(attn:d1t2c2p2|ffn:e2t2)",
    "megatron:d2t2c2e4",
)
HEAD = """# Parity

Made by `scripts/make_parity.py`; do not edit. Tiny random models of every family (four layers), fp32, ragged packed samples, on CPU
processes, against transformers' own models on one process. A cell has three entries:

- the largest difference of a logit (under context parallelism, of a log-probability): at most 1e-4;
- the largest relative difference of a gradient tensor, relative to the larger of its norm and a thousandth of the whole gradient's: at most
  1e-5;
- `=` where every exported tensor is bit-equal to the source.

A part of it runs with every test run: [`tests/megatron/test_families.py`](../tests/megatron/test_families.py) and
[`tests/megatron/test_parity.py`](../tests/megatron/test_parity.py). `deepseek_v2-groups` and `deepseek_v3` route within groups and have
YaRN; `moonlight` and `deepseek_v2` project queries at full rank.
"""


def measure(names: list[str], root: Path) -> dict[tuple[str, str], dict[str, Any]]:
    folders = {name: str(tiny_model(root / name, name, num_hidden_layers=4)) for name in names}
    (references,) = run_ranks(1, families.references, folders=folders, timeout_s=300)
    cases = [(n, s) for n in names for s in (ANY + MOE if n in SPARSE or n == "qwen3_moe" else ANY)]
    found = {}
    for size in sorted({parse(s).world_size for _, s in cases}):
        mine = [case for case in cases if parse(case[1]).world_size == size]
        jobs = [{"folder": folders[n], "strategy": s, "split": 2 if "v2" in s else 1} for n, s in mine]
        for start in range(0, len(jobs), 10):
            results = run_ranks(size, families.parities, jobs=jobs[start : start + 10], timeout_s=600)
            for number, (name, strategy) in enumerate(mine[start : start + 10]):
                found[name, strategy] = families.summary([rank[number] for rank in results], references[name])
                families.check(found[name, strategy], f"{name} at {strategy}")
    return found


def table(names: list[str], strategies: tuple[str, ...], found: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = ["| layout | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for strategy in strategies:
        cells = []
        for name in names:
            one = found[name, strategy]
            cells.append(f"{one['logits']:.0e} {one['gradients']:.0e} {'=' if one['export'] else 'differs'}")
        shown = strategy.replace("|", "\\|")
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    names = [*FAMILIES, *SPARSE]
    with tempfile.TemporaryDirectory() as root:
        found = measure(names, Path(root))
    sparse = [n for n in names if n in SPARSE or n == "qwen3_moe"]
    parts = [HEAD, "## All families\n", table(names, ANY, found), "\n## Families with experts\n", table(sparse, MOE, found), ""]
    PATH.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
