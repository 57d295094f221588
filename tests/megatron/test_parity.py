"""Logits equal transformers', and gradients do not depend on how the batch or the model was split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_cases as cases
import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import FAMILIES, tiny_model

from areal_mega.parallel.strategy import parse

# Besides the layouts of the matrix (test_matrix.py).
DENSE = ("megatron:d2", "megatron:d2p2")
MOE = (*DENSE, "megatron:d2p2e2", "megatron:d1t2p2e2")
SPLITS = [("llama", DENSE[0]), ("qwen2", DENSE[1])] + [("qwen3_moe", s) for s in MOE]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: str(tiny_model(Path(root), family)) for family in FAMILIES}


@pytest.fixture(scope="session")
def references(folders: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """transformers' answers, and one process's gradients."""
    out = {}
    for family, folder in folders.items():
        for loss in ("weighted", "sequence"):
            (hf,) = run_ranks(1, cases.hf_logits, folder=folder, loss=loss)
            out[family, loss] = hf
    return out


def check(results: list[dict[str, Any]], reference: dict[str, Any], tolerance: float = 1e-5) -> None:
    seen: set[int] = set()
    for result in results:
        for index, logprobs in result["logprobs"].items():
            np.testing.assert_allclose(logprobs, reference["logprobs"][index], atol=1e-4)
            seen.add(index)
        for index, logits in result["logits"].items():
            np.testing.assert_allclose(logits, reference["logits"][index], atol=1e-4)
    assert seen == set(range(len(cases.LENGTHS)))
    check_gradients(results[0]["gradients"], reference["gradients"], tolerance)


def check_gradients(gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Every tensor's error, relative to the larger of its own norm and a thousandth of the whole gradient's."""
    assert gradients.keys() == expected.keys()
    whole = np.sqrt(sum(float(np.square(g).sum()) for g in expected.values()))
    errors = {n: np.linalg.norm(g - expected[n]) / max(np.linalg.norm(expected[n]), 1e-3 * whole) for n, g in gradients.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] < tolerance, f"{worst}: relative error {errors[worst]:.2e}"


@pytest.mark.parametrize(("family", "strategy"), SPLITS)
def test_layouts_equal_transformers(folders: dict[str, str], references: Any, family: str, strategy: str) -> None:
    results = run_ranks(parse(strategy).world_size, cases.parity, folder=folders[family], strategy=strategy)
    check(results, references[family, "weighted"])


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("strategy", ["megatron:d1", "megatron:d2e2", "megatron:d1p2"])
def test_micro_batches(folders: dict[str, str], references: Any, strategy: str, split: int) -> None:
    results = run_ranks(parse(strategy).world_size, cases.parity, folder=folders["qwen3_moe"], strategy=strategy, split=split)
    check(results, references["qwen3_moe", "weighted"])


@pytest.mark.parametrize(
    ("family", "strategy"), [("qwen3_moe", "megatron:d2e2"), ("qwen2", "megatron:d2"), ("qwen3_moe", "megatron:d2p2e2")]
)
def test_a_rank_without_micro_batches(folders: dict[str, str], references: Any, family: str, strategy: str) -> None:
    split = [[0, 1, 2], [3], [4, 5, 6, 7]]
    results = run_ranks(parse(strategy).world_size, cases.parity, folder=folders[family], strategy=strategy, split=split)
    check(results, references[family, "weighted"])


@pytest.mark.parametrize("loss", ["weighted", "sequence"])
@pytest.mark.parametrize(
    ("family", "strategy"), [("llama", "megatron:d1c2"), ("qwen3_moe", "megatron:d1t2c2e2"), ("qwen2", "megatron:d1p2c2")]
)
def test_context_parallelism(folders: dict[str, str], references: Any, family: str, strategy: str, loss: str) -> None:
    results = run_ranks(
        parse(strategy).world_size, cases.parity, folder=folders[family], strategy=strategy, split=2, loss=loss, with_logits=False
    )
    check(results, references[family, loss])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("strategy", ["megatron:d1", "megatron:d1t2p2e2"])
def test_recomputation(folders: dict[str, str], references: Any, strategy: str, recompute: str) -> None:
    results = run_ranks(
        parse(strategy).world_size, cases.parity, folder=folders["qwen3_moe"], strategy=strategy, train={"recompute": recompute}
    )
    check(results, references["qwen3_moe", "weighted"])
