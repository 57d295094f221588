"""Whole runs: every process real, everything small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import Finished, train
from tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def check(run: Finished, *, steps: int, eta: int, bytes_per_sync: int | None = None) -> None:
    """What every run must show."""
    assert run.code == 0, run.explain()
    assert run.err == ""
    start, *trained = run.metrics
    assert len(trained) == steps
    assert list(run.synced) == list(range(steps + 1))  # one version per step, each acknowledged by version and digest
    assert len(set(run.synced.values())) == steps + 1  # and each other weights than the one before
    for step, m in enumerate(trained, 1):
        assert m["sync/version"] == step
        assert m["train/skipped_updates"] == 0
        assert m["train/grad_norm"] > 0
        assert m["staleness/trained_max"] <= eta
        assert m["batch/trained_tokens"] == m["train/tokens"] > 0
        if "mismatch/fresh_abs_mean" in m:
            assert m["mismatch/fresh_abs_mean"] < 1e-3
    assert any("mismatch/fresh_abs_mean" in m for m in trained)
    assert trained[0]["staleness/max"] == 0  # the first batch is made by the first weights
    assert start["eval/accuracy"] >= 0


def digest_of_folder(folder: Path) -> str:
    from areal_mega.models.hf_io import HFSource
    from areal_mega.sync.digest import combine, tensor_digest

    with HFSource(folder) as source:
        return combine({name: tensor_digest(source.read(name), "xxh3") for name in source.names()})


def test_overlapped_experts_over_two_ranks_two_replicas_filtered_groups(tmp_path: Path) -> None:
    """Two data-parallel ranks with half of the experts each; two servers; weights over the group, requests frozen in place; dynamic
    sampling; two updates to a step; MLflow, report and export."""
    changes: dict[str, Any] = {
        "run": {"steps": 3},
        "rollout": {"strategy": "embedded:d2"},
        "train": {"strategy": "megatron:d2e2", "minibatches": 2},
        "algorithm": {"name": "dapo", "mask_truncated": False},
        "sync": {"pause": "in_place", "bucket_mb": 0.25},
        "observe": {"mlflow": True, "report": True},
        "checkpoint": {"export_at_end": True},
    }
    run = train(tmp_path, changes)
    check(run, steps=3, eta=1)
    assert "6 processes ready" in run.out
    for m in run.metrics[1:]:
        assert m["batch/groups"] == 4 and m["batch/uniform_groups"] == 0.0
        assert m["reward/length"] > 0
    assert digest_of_folder(run.run_dir / "export/final") == run.synced[3]  # what was exported is what the servers hold
    assert (run.run_dir / "report.html").stat().st_size > 10_000
    assert (tmp_path / "runs/mlflow.db").exists() or any((tmp_path / "runs").glob("ml*"))
    assert f"report: {run.run_dir / 'report.html'}" in run.out and f"model: {run.run_dir / 'export/final'}" in run.out


def test_plain_tensor_parallel_over_disk_with_kl_in_the_loss(tmp_path: Path) -> None:
    """A pretrained dense model on two tensor-parallel ranks; weights through a folder; a frozen reference; requests aborted at a sync."""
    model = str(tiny_model(tmp_path, "qwen3"))
    changes: dict[str, Any] = {
        "run": {"overlap": False},
        "model": {"path": model, "weights": "pretrained", "reference_path": model},
        "train": {"strategy": "megatron:d1t2"},
        "staleness": {"max_staleness": 0},
        "algorithm": {"kl": {"coef": 0.1, "where": "loss"}, "aggregation": "fixed_length"},
        "sync": {"transport": "disk", "pause": "abort"},
        "eval": {"every_steps": 1},
        "checkpoint": {"export_every_steps": 1},
    }
    run = train(tmp_path, changes)
    check(run, steps=2, eta=0)
    first, second = run.metrics[1:]
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-6)  # the policy still is the reference
    assert second["kl/reference"] > 0
    assert run.synced[0] == digest_of_folder(Path(model))  # the servers began with the weights of the folder
    assert digest_of_folder(run.run_dir / "export/step-1") == run.synced[1]
    assert all("eval/accuracy" in m for m in run.metrics)
    assert not any((run.run_dir / "weights").iterdir())


def test_pipeline_with_kl_in_the_reward_and_samples_dropped_beyond_the_bound(tmp_path: Path) -> None:
    """Two pipeline stages; long answers that updates wait for; the reference's KL taken from the reward; many small buckets."""
    model = str(tiny_model(tmp_path, "llama"))
    changes: dict[str, Any] = {
        "run": {"steps": 3},
        "model": {"path": model, "weights": "pretrained", "reference_path": model},
        "rollout": {"max_new_tokens": 48, "group_size": 3, "temperature": 0.8},
        "train": {"strategy": "megatron:d1p2", "microbatch_tokens": 128},
        "staleness": {"max_staleness": 2, "action": "drop_sample"},
        "algorithm": {"kl": {"coef": 0.05, "where": "reward", "estimator": "k1"}, "aggregation": "sequence_mean"},
        "sync": {"pause": "drain", "bucket_mb": 0.05},
        "checkpoint": {"export_at_end": True},
    }
    run = train(tmp_path, changes)
    check(run, steps=3, eta=2)
    assert all(m["sync/drain_s"] > 0 for m in run.metrics[1:])
    assert digest_of_folder(run.run_dir / "export/final") == run.synced[3]
    assert run.metrics[1]["kl/reward"] == pytest.approx(0.0, abs=1e-4)
    assert run.metrics[3]["kl/reward"] != 0
