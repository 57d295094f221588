"""Runs of the quickstart's model with a core for training and one for generation, and what a step of them takes."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def endless_model(folder: Path, longest: int) -> None:
    """The quickstart's model with room for long answers, and no token that ends one."""
    shutil.copytree(ROOT / "recipes/quickstart_model", folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {key: None for key in ("eos_token_id", "eos_token") if key in content}
        if name == "config.json":
            content["max_position_embeddings"] = longest + 16
        (folder / name).write_text(json.dumps(content))


def two_cores() -> list[int]:
    """The cores of this process; ends the benchmark where there are fewer than two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark pins the two roles to a core each and needs two")
    return cores


@contextmanager
def on_core(core: int, metrics: Path) -> Iterator[None]:
    """Keep this process, the controller, to a core once the first step is done: otherwise it slows down now one role, now the other.

    Not before: the roles' processes may have no other cores than this one.
    """
    before, done = os.sched_getaffinity(0), threading.Event()

    def pin() -> None:
        while not done.wait(0.05):
            if metrics.exists() and "batch/samples" in metrics.read_text():
                _all_threads({core})
                return

    watch = threading.Thread(target=pin)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()
        _all_threads(before)


def _all_threads(cores: set[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


def measured(
    root: str,
    name: str,
    settings: Sequence[str],
    *,
    skip: int,
    workflow: str | None = None,
    workflow_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Means over the steps of one run but the first ``skip``: seconds of a step and of its parts, samples and tokens per second.

    Args:
        settings: of the recipe, over those of every such run.
    """
    from areal_mega import Trainer, load_recipe

    train, rollout = two_cores()[:2]
    common = [
        f"run.root={root}",
        f"run.name={name}",
        "warmup.steps=0",
        "train.strategy=megatron:d1",
        "data.valid=null",
        "eval.every_steps=0",
        "checkpoint.export_at_end=false",
        "observe.mlflow=false",
        "observe.report=false",
        "observe.console=off",
        f"launch.train_cpus=[{train}]",
        f"launch.rollout_cpus=[{rollout}]",
    ]
    with (
        Trainer(load_recipe("recipes/quickstart.yaml", [*common, *settings])) as trainer,
        on_core(rollout, Path(root, name, "metrics.jsonl")),
    ):
        result = trainer.train(workflow=workflow, workflow_kwargs=workflow_kwargs)
    lines = [json.loads(line)["metrics"] for line in Path(result.run_dir, "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "batch/samples" in line][skip:]

    def total(*keys: str) -> float:
        return sum(step.get(key, 0.0) for step in steps for key in keys)

    seconds = total("time/total")
    return {
        "samples_per_s": total("batch/samples") / seconds,
        "tokens_per_s": total("rollout/tokens") / seconds,
        "seconds": seconds / len(steps),
        "wait": total("time/wait_rollout") / len(steps),
        "train": total("time/fetch", "time/logprobs", "time/update") / len(steps),
        "sync": total("time/sync") / len(steps),
        "drain": total("sync/drain_s") / len(steps),
        "staleness": total("staleness/mean") / len(steps),
    }
