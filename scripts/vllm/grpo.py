#!/usr/bin/env python
"""Short GRPO runs with vLLM as the inference server, two train ranks each: of the quickstart's sparse model, and of a dense, tied one.

    python scripts/vllm/grpo.py --python ENV/bin/python --root FOLDER

Prints reward and mean |difference of log-probabilities| to the trainer of every step. Exit code 1 where the latter is more than rounding.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "recipes" / "quickstart_model"
SETTINGS: dict[str, Any] = {
    "warmup.steps": 60,
    "train.batch_size": 16,
    "data.valid.limit": 20,
    "eval.samples": 1,
    "checkpoint.export_at_end": False,
    "observe.console": "plain",
    "observe.mlflow": False,
    "observe.report": False,
    "launch.device": "cpu",
    "launch.startup_timeout_s": 900.0,
    "launch.shutdown_timeout_s": 30.0,
    "rollout.strategy": "vllm:d1",
    "rollout.server_args": ["--enforce-eager", "--gpu-memory-utilization=0.1"],
}
RUNS: dict[str, dict[str, Any]] = {
    "sparse": {"train.strategy": "megatron:d2e2"},
    # Not the distribution that is trained: what is sampled is cut, what is recorded is not.
    "tied": {"train.strategy": "megatron:t2", "rollout.temperature": 0.8, "rollout.top_p": 0.95, "rollout.top_k": 20},
}
# Log-probabilities in fp32 differ between engines by rounding alone; tokens of an older version differ by what was learnt since.
MOST_MISMATCH = 1e-4


def dense(folder: Path) -> Path:
    """The quickstart's model without experts and with tied embeddings."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    sparse = ("moe_intermediate_size", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step")
    sparse += ("mlp_only_layers", "router_aux_loss_coef", "output_router_logits")
    kept = {key: value for key, value in config.items() if key not in sparse}
    kept |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(kept, indent=2))
    return folder


def run(name: str, root: Path, settings: dict[str, Any], timeout_s: float) -> list[dict[str, float]]:
    """Train in a process of its own; the metrics of each step."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    argv = [sys.executable, "-P", "-c", "from areal_mega.cli.main import main; main()", "train", str(REPO / "recipes/quickstart.yaml")]
    print(f"== {name}: {settings['train.strategy']}", flush=True)
    subprocess.run([*argv, f"run.root={root}", f"run.name={name}", *overrides], check=True, timeout=timeout_s, cwd=REPO)
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [m for m in (json.loads(line)["metrics"] for line in lines) if "mismatch/abs_mean" in m]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment that holds vLLM")
    parser.add_argument("--root", type=Path, required=True, help="where the runs go")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=1400.0, help="of each run")
    options = parser.parse_args()
    models = {"sparse": MODEL, "tied": dense(options.root / "tied-model")}
    wrong = []
    for name, settings in RUNS.items():
        own = {"run.steps": options.steps, "run.overlap": False, "staleness.max_staleness": 0, "model.path": str(models[name])}
        steps = run(name, options.root, SETTINGS | own | settings | {"rollout.python": options.python}, options.timeout_s)
        if len(steps) != options.steps:
            wrong.append(f"{name}: {len(steps)} of {options.steps} steps were trained")
        for number, m in enumerate(steps, 1):
            mean, most = m["mismatch/abs_mean"], m["mismatch/abs_max"]
            print(f"{name} step {number}: reward {m['reward/mean']:.3f}, mean |dlogprob| {mean:.2e}, max |dlogprob| {most:.2e}, ", end="")
            print(f"sync {m.get('time/sync', float('nan')):.2f} s", flush=True)
            if mean > MOST_MISMATCH:
                wrong.append(f"{name}, step {number}: mean |dlogprob| {mean:.2e} is above {MOST_MISMATCH:g}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
