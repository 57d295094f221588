"""Write docs/parity.md: every family at every kind of layout against transformers, on CPU processes. Takes minutes.

python scripts/make_parity.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "megatron")]

import parity_matrix as matrix  # noqa: E402

PATH = ROOT / "docs" / "parity.md"
HEAD = """# Parity

Made by `scripts/make_parity.py`; do not edit. Tiny random models of every family, fp32, ragged packed samples, on CPU
processes, against transformers' own models on one process. A cell has three entries:

- the largest difference of a logit (under context parallelism, of a log-probability): at most 1e-4;
- the largest relative difference of a gradient tensor, relative to the larger of its norm and a thousandth of the whole gradient's: at most
  1e-5;
- `=` where every exported tensor is bit-equal to the source.

The first two tables run with every test run: [`tests/megatron/test_matrix.py`](../tests/megatron/test_matrix.py). `deepseek_v2-groups`
and `deepseek_v3` route within groups and have YaRN; `moonlight` and `deepseek_v2` project queries at full
rank.
"""


Found = dict[tuple[str, str], dict[str, Any]]


def table(names: Sequence[str], strategies: Sequence[str], found: Found) -> str:
    lines = ["| layout | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for strategy in strategies:
        cells = []
        for name in names:
            one = found[name, strategy]
            cells.append(f"{one['logits']:.0e} {one['gradients']:.0e} {'=' if one['export'] else 'differs'}")
        shown = strategy.replace("|", "\\|")
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure(name: str, root: Path) -> dict[str, Found]:
    """One family's part of every table."""
    folder, reference = matrix.model(root, name)
    found = {"plain": matrix.measure(folder, reference, matrix.layouts(name))}
    if name in matrix.WITH_EXPERTS:
        found["gathered"] = matrix.measure(folder, reference, matrix.GATHERED, router={"dispatcher": "allgather"})
    folder, reference = matrix.model(root, name, layers=5)
    found["uneven"] = matrix.measure(folder, reference, matrix.UNEVEN)
    return {kind: {(name, strategy): one for strategy, one in part.items()} for kind, part in found.items()}


def page(families: Sequence[dict[str, Found]]) -> str:
    plain, uneven, gathered = (
        {case: one for found in families for case, one in found.get(kind, {}).items()} for kind in ("plain", "uneven", "gathered")
    )
    parts = [
        HEAD,
        "## All families\n\nFour layers.\n",
        table(matrix.NAMES, matrix.ANY, plain),
        "\n## Families with experts\n",
        table(matrix.WITH_EXPERTS, matrix.MOE, plain),
        "\n## Uneven stages\n\nFive layers.\n",
        table(matrix.NAMES, matrix.UNEVEN, uneven),
        "\n## The all-gather dispatcher\n\n`router.dispatcher: allgather`.\n",
        table(matrix.WITH_EXPERTS, matrix.GATHERED, gathered),
        "",
    ]
    return "\n".join(parts)


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        families = [measure(name, Path(root)) for name in matrix.NAMES]
    PATH.write_text(page(families), encoding="utf-8")


if __name__ == "__main__":
    main()
