"""Weights arrive bit for bit, from every layout, from one sender and from several, in both loops, with memory in common and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sender_cases
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import tiny_model

from areal_mega.parallel.strategy import parse
from areal_mega.sync.digest import tensor_digests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model(folder, family, num_hidden_layers=4) for family in ("qwen3", "qwen3_moe", "deepseek_v3")}


CASES = [  # family, strategy, senders per stage (0: rank 0 alone), how many send, overlapped, receivers, a rank on another machine
    ("qwen3", "megatron:t2p2", 8, 2, True, 2, -1),
    ("qwen3", "megatron:t2p2", 8, 2, True, 1, 3),
    ("qwen3", "megatron:t2p2", 0, 1, False, 1, -1),
    ("qwen3", "megatron:t2p2", 0, 1, False, 1, 2),
    ("qwen3", "megatron:p2v2", 8, 2, False, 2, -1),
    ("qwen3_moe", "megatron:p2v2", 8, 2, True, 1, -1),
    ("qwen3_moe", "megatron:(attn:d4|ffn:e2t2)", 8, 2, True, 1, -1),
    ("deepseek_v3", "megatron:d2e2p2", 8, 4, True, 1, -1),
    ("deepseek_v3", "megatron:d2e2p2", 1, 2, True, 1, 1),
    ("qwen3_moe", "megatron:t2p2e2d2", 8, 2, True, 2, -1),
    ("qwen3_moe", "megatron:t2p2e4d2", 8, 4, True, 2, 5),
]


@pytest.mark.parametrize(("family", "strategy", "most", "senders", "overlap", "receivers", "elsewhere"), CASES)
@pytest.mark.parametrize("bucket_bytes", [30_001])  # no multiple of any item: as 0.1 MB is
def test_every_receiver_holds_every_bit(
    models: dict[str, Path],
    family: str,
    strategy: str,
    most: int,
    senders: int,
    overlap: bool,
    receivers: int,
    elsewhere: int,
    bucket_bytes: int,
) -> None:
    size = parse(strategy).world_size
    results = run_ranks(
        size + receivers,
        sender_cases.sync,
        folder=str(models[family]),
        strategy=strategy,
        receivers=receivers,
        bucket_bytes=bucket_bytes,
        most=most,
        overlap=overlap,
        elsewhere=elsewhere,
    )
    # The ranks of a share have memory in common, all or none.
    assert all(result["common"] for result in results if result["common"] is not None) == (elsewhere < 0)
    expected = on_the_wire(models[family])
    digests = [tensor_digests(each, "xxh3") for each in (expected, doubled(expected), doubled(expected))]
    whole = sum(t.numel() * t.element_size() for t in expected.values())
    changed = sum(t.numel() * t.element_size() for name, t in expected.items() if ".layers.1." in name)
    reports = [[r for r in (rank["syncs"][turn] for rank in results[:size]) if r] for turn in range(3)]
    assert len(reports[0]) == senders
    assert results[0]["buckets"] > 5
    for turn, nbytes in enumerate((whole, changed, whole)):
        assert sum(report["nbytes"] for report in reports[turn]) == nbytes
        assert sum(report["saved"] for report in reports[turn]) == whole - nbytes
        assert merged(reports[turn]) == digests[turn]
        for receiver in results[size:]:
            assert receiver["syncs"][turn] == {"digests": digests[turn], "nbytes": nbytes}
    for receiver in results[size:]:
        for name, tensor in doubled(expected).items():
            assert np.array_equal(receiver["weights"][name], tensor.float().numpy())


def merged(reports: list[dict[str, Any]]) -> dict[str, str]:
    return {name: digest for report in reports for name, digest in report["digests"].items()}


def on_the_wire(folder: Path) -> dict[str, torch.Tensor]:
    """The files' tensors as servers get them: bf16, islands in fp32."""
    return {name: t if name.endswith("correction_bias") else t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()}


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t * 2 if ".layers.1." in name else t for name, t in tensors.items()}
