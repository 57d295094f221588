#!/usr/bin/env python
"""A short GRPO run of the quickstart's model on a real SGLang server and on the embedded one, from the same start and seeds.

    python scripts/sglang/compare_grpo.py --python ENV/bin/python --root FOLDER

Both runs make the same weights, warm up alike and see the same prompts in the same order. Prints reward and mean |difference of
log-probabilities| to the trainer of every step of both. Exit code 1 where they disagree by more than sampling explains.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
# Without sgl_kernel a CPU server computes with plain torch; the pool would otherwise take most of the memory.
SERVER_ARGS = [
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--skip-server-warmup",
    "--sleep-on-idle",
    "--max-total-tokens=16384",
]
SETTINGS: dict[str, Any] = {
    "run.overlap": False,
    "warmup.steps": 400,
    "train.strategy": "megatron:d1",
    "train.batch_size": 32,
    "train.microbatch_tokens": 4096,
    "staleness.max_staleness": 0,
    "data.valid.limit": 100,
    "eval.temperature": 0.0,
    "eval.samples": 1,
    "checkpoint.export_at_end": False,
    "observe.console": "plain",
    "observe.mlflow": False,
    "observe.report": False,
    "launch.device": "cpu",
    "launch.shutdown_timeout_s": 10.0,
}
# Log-probabilities of the fp32 quickstart differ between engines by rounding alone.
MOST_MISMATCH = 1e-4
SIGMAS = 4.0


def run(name: str, root: Path, settings: dict[str, Any], timeout_s: float) -> list[dict[str, float]]:
    """Train in a process of its own; the metrics of each step, first the evaluation before step 1."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    argv = [sys.executable, "-P", "-c", "from areal_mega.cli.main import main; main()", "train", str(REPO / "recipes/quickstart.yaml")]
    print(f"== {name}", flush=True)
    subprocess.run([*argv, f"run.root={root}", f"run.name={name}", *overrides], check=True, timeout=timeout_s, cwd=REPO)
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def compare(runs: dict[str, list[dict[str, float]]]) -> list[str]:
    """Print both side by side; what is wrong."""
    names = list(runs)
    steps = list(zip(*runs.values(), strict=True))
    print(f"{'':28}" + "".join(f"{name:>14}" for name in names))
    print(f"{'held-out accuracy, greedy':28}" + "".join(f"{metrics['eval/accuracy']:14.3f}" for metrics in steps[0]))
    rewards: list[list[float]] = [[], []]
    wrong, count = [], 0
    for number, metrics in enumerate(steps[1:], 1):
        print(f"step {number}: reward{'':14}" + "".join(f"{m['reward/mean']:14.3f}" for m in metrics))
        print(f"        mean |dlogprob|{'':5}" + "".join(f"{m['mismatch/abs_mean']:14.2e}" for m in metrics))
        print(f"        max |dlogprob|{'':6}" + "".join(f"{m['mismatch/abs_max']:14.2e}" for m in metrics))
        print(f"        tokens/s{'':12}" + "".join(f"{m['rollout/tokens_per_s']:14.0f}" for m in metrics))
        count += int(metrics[0]["batch/samples"])
        for side, m in enumerate(metrics):
            rewards[side].append(m["reward/mean"])
            if m["mismatch/abs_mean"] > MOST_MISMATCH:
                wrong.append(f"{names[side]}, step {number}: mean |dlogprob| {m['mismatch/abs_mean']:.2e} is above {MOST_MISMATCH:g}")
    print(f"{'held-out accuracy, end':28}" + "".join(f"{metrics['eval/accuracy']:14.3f}" for metrics in steps[-1]))
    means = [sum(side) / len(side) for side in rewards]
    p = sum(means) / 2
    sigma = math.sqrt(2 * p * (1 - p) / count)
    print(f"mean reward {means[0]:.3f} and {means[1]:.3f}: {abs(means[0] - means[1]) / sigma:.1f} standard errors ({sigma:.3f}) apart")
    if abs(means[0] - means[1]) > SIGMAS * sigma:
        wrong.append(f"mean rewards differ by {abs(means[0] - means[1]):.3f}, more than {SIGMAS:g} standard errors of {sigma:.3f}")
    first = [metrics["eval/accuracy"] for metrics in steps[0]]
    if abs(first[0] - first[1]) > 0.02:
        wrong.append(f"the same weights answer differently before the first step: {first[0]:.3f} and {first[1]:.3f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment that holds SGLang")
    parser.add_argument("--root", type=Path, required=True, help="where the runs go")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=1500.0, help="of each run")
    options = parser.parse_args()
    common = SETTINGS | {"run.steps": options.steps}
    sglang = {"rollout.strategy": "sglang:d1", "rollout.python": options.python, "rollout.server_args": SERVER_ARGS}
    runs = {
        "sglang": run("sglang", options.root, common | sglang, options.timeout_s),
        "embedded": run("embedded", options.root, common, options.timeout_s),
    }
    if wrong := compare(runs):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
