"""A run that never was: metrics as a trainer logs them, for tests of what reads them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from areal_mega.core.metrics import Metrics, last, maximum, mean, total

RECIPE = {
    "run": {"name": "demo", "root": "runs", "seed": 1, "steps": 40},
    "model": {"path": "models/tiny-moe", "dtype": "fp32"},
    "train": {"strategy": "megatron:d2e2", "optimizer": {"lr": 1e-3}},
    "rollout": {"strategy": "embedded:d1", "stop": [], "max_new_tokens": 16},
    "algorithm": {"name": "grpo", "correction": "decoupled"},
    "reward": {"path": "my.module:reward", "kwargs": {"scale": 1.0}},
}
PROVENANCE = {
    "run.name": "quickstart.yaml:2",
    "algorithm.correction": "override",
    "train.optimizer.lr": "base.yaml:9",
    "run.seed": "default",
}


def steps(count: int, seed: int = 0) -> Iterator[tuple[int, Metrics, dict[str, dict[int, int]]]]:
    """Step, metrics, histograms: step 0 has an evaluation alone, later ones everything."""
    rng = random.Random(seed)
    yield 0, {"eval/accuracy": mean(21, 64), "time/total": last(1.5), "time/eval": last(1.5)}, {}
    for step in range(1, count + 1):
        progress = step / count
        fresh = rng.randint(300, 500)
        age = {0: fresh, 1: rng.randint(150, 400), 2: rng.randint(0, 80)}
        tokens = sum(age.values())
        wait, update = rng.uniform(0.2, 1.0), rng.uniform(0.8, 1.2)
        metrics: Metrics = {
            "reward/mean": mean((0.3 + 0.6 * progress + rng.gauss(0, 0.05)) * 64, 64),
            "reward/std": last(0.45 - 0.3 * progress),
            "reward/correct": mean(40 * progress, 64),
            "train/loss": mean(rng.gauss(0.0, 0.02), 1),
            "train/grad_norm": maximum(rng.uniform(0.2, 1.4)),
            "train/lr": last(1e-3),
            "train/tokens": total(tokens),
            "rollout/tokens": total(tokens * 1.1),
            "rollout/tokens_per_s": last(rng.uniform(800, 1000)),
            "train/tokens_per_s": last(rng.uniform(1500, 1800)),
            "staleness/mean": mean(sum(a * n for a, n in age.items()), tokens),
            "staleness/max": maximum(2),
            "staleness/fresh_tokens": mean(64 * 12, 64),
            "staleness/fresh_reward": mean(32, 64),
            "mismatch/abs_mean": mean(1e-2 * rng.uniform(0.5, 1.5) * tokens, tokens),
            "mismatch/abs_max": maximum(0.3 * rng.uniform(0.5, 1.5)),
            "mismatch/kl": mean(1e-3 * rng.uniform(0.5, 1.5) * tokens, tokens),
            "mismatch/fresh_abs_mean": mean(1e-6 * rng.uniform(0.5, 1.5) * fresh, fresh),
            "time/wait_rollout": last(wait),
            "time/logprobs": last(0.2),
            "time/update": last(update),
            "time/sync": last(0.15),
            "time/total": last(wait + update + 0.45),
            "sync/gather_s": last(0.05),
            "sync/transfer_s": last(0.07),
            "sync/verify_s": last(0.08),
        }
        if step % 10 == 0:
            metrics["eval/accuracy"] = mean(round(64 * (0.33 + 0.6 * progress)), 64)
            metrics["time/eval"] = last(1.2)
        yield step, metrics, {"staleness/age": age, "staleness/fresh_length": {8: 20, 12: 30, 16: 14}}
