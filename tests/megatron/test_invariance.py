"""Loss and gradient of a batch do not depend on micro-batch count, packing order, data, context, tensor, pipeline or expert
parallelism: with ragged lengths, answers of one token, and a sample that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import invariance_cases as cases
import numpy as np
import pytest
from ranks import run_ranks
from test_parity import check_gradients
from tiny_models import tiny_model

from areal_mega.parallel.strategy import parse

EVERY = list(range(len(cases.LENGTHS)))
SHUFFLED = [7, 2, 9, 4, 0, 8, 5, 1, 6, 3]
WHOLE = [[EVERY]]
# What is varied, alone and then together.
ALONE: dict[str, tuple[str, list[list[list[int]]]]] = {
    "two micro-batches": ("megatron:d1", [[EVERY[::2], EVERY[1::2]]]),
    "a micro-batch for every sample": ("megatron:d1", [[[i] for i in EVERY]]),
    "packing order": ("megatron:d1", [[EVERY[::-1]]]),
    "packing order and micro-batches": ("megatron:d1", [[SHUFFLED[:3], SHUFFLED[3:4], SHUFFLED[4:]]]),
}
TWO: dict[str, tuple[str, list[list[list[int]]]]] = {
    "data parallelism, unequal shares": ("megatron:d2", [[SHUFFLED[:7]], [SHUFFLED[7:8], SHUFFLED[8:]]]),
    "data parallelism, one-token answers on one rank": ("megatron:d2", [[[0, 3, 4, 7, 8]], [[1, 2, 5, 6, 9]]]),
    "expert parallelism": ("megatron:d2e2", [[EVERY[:2]], [EVERY[2:]]]),
    "expert and tensor parallelism": ("megatron:d1t2e2", WHOLE),
    "context parallelism": ("megatron:d1c2", WHOLE),
    "context parallelism, a micro-batch for every sample": ("megatron:d1c2e2", [[[i] for i in SHUFFLED]]),
    "pipeline parallelism": ("megatron:d1p2", [[EVERY[::2], EVERY[1::2]]]),
}
FOUR: dict[str, tuple[str, list[list[list[int]]]]] = {
    "data, context and expert parallelism": ("megatron:d2c2e4", [[SHUFFLED[:6], SHUFFLED[6:7]], [SHUFFLED[7:]]]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(Path(tmp_path_factory.mktemp("invariance")), "qwen3_moe"))


def check(found: list[dict[str, Any]], reference: dict[str, Any], what: str, reporters: int) -> None:
    losses = [rank["loss"] for rank in found]
    assert sum(loss != 0.0 for loss in losses) <= reporters
    np.testing.assert_allclose(sum(losses), reference["loss"], rtol=1e-5, atol=1e-7, err_msg=what)
    check_gradients(found[0]["gradients"], reference["gradients"], 1e-5)


# A loss over tokens, one over whole sequences, and one with a loss of the router's own.
@pytest.mark.parametrize(("algorithm", "router"), [("dapo", {}), ("gspo", {}), ("dapo", {"z_loss_coef": 0.1})])
def test_loss_and_gradient_are_those_of_one_micro_batch(folder: str, algorithm: str, router: dict[str, float]) -> None:
    common = {"algorithm": algorithm, "router": router}
    reference: dict[str, Any] = {}
    for size, variants in ((1, {"one micro-batch": ("megatron:d1", WHOLE)} | ALONE), (2, TWO), (4, FOUR)):
        jobs = [{"strategy": strategy, "plan": plan, **common} for strategy, plan in variants.values()]
        results = run_ranks(size, cases.losses, folder=folder, jobs=jobs, timeout_s=280)
        for number, (what, (strategy, _)) in enumerate(variants.items()):
            found = [rank[number] for rank in results]
            reference = reference or found[0]
            check(found, reference, f"{algorithm}, {router}: {what}", parse(strategy).dp)
    assert reference["loss"] != 0.0
