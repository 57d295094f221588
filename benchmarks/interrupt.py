"""What interrupting generation is worth: asynchronous runs on heavy-tailed lengths that differ in `sync.pause` alone, in one run.

``drain`` lets running answers end before new weights come; ``retract`` and ``in_place`` take them over in mid-answer. Lengths are
lognormal per sample, fixed by its seed, so that all runs generate as many tokens for a prompt. Train rank and rollout side are pinned to
one core each. Prints samples/s of each, and their ratios to draining.

    python benchmarks/interrupt.py [--steps 40] [--median 32] [--sigma 1.2] [--longest 1024]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from two_cores import ROOT, endless_model, measured, two_cores

from areal_mega.core.types import Prompt
from areal_mega.rollout.inference import GenerateRequest
from areal_mega.rollout.rlvr import RLVRWorkflow
from areal_mega.rollout.workflow import WorkflowContext

SKIP = 6
"""First steps left out: the loop fills up, and begins with what was generated before the first of them."""


@dataclass(frozen=True, kw_only=True)
class TailContext(WorkflowContext):
    """Every sample ends at a length of its own: lognormal, cut at ``longest``."""

    median: float
    sigma: float
    longest: int

    def requests(self, input_ids: Sequence[int], prompt: Prompt, members: Sequence[int] | None = None) -> list[GenerateRequest]:
        return [replace(request, max_new_tokens=self._length(request.seed)) for request in super().requests(input_ids, prompt, members)]

    def _length(self, seed: int | None) -> int:
        return min(self.longest, 1 + round(random.Random(seed).lognormvariate(math.log(self.median), self.sigma)))


class TailWorkflow(RLVRWorkflow):
    """One turn, with answers of such lengths."""

    def __init__(self, context: WorkflowContext, **tail: Any) -> None:
        super().__init__(TailContext(**{field.name: getattr(context, field.name) for field in fields(context)}, **tail))


def reward(prompt: str, completion: str, answer: str, **row: Any) -> float:
    """Something that differs within a group."""
    return float(sum(map(ord, completion)) % 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--median", type=float, default=32.0, help="tokens")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of the length")
    parser.add_argument("--longest", type=int, default=1024, help="tokens")
    parser.add_argument("--staleness", type=int, default=4, help="max_staleness")
    parser.add_argument("--concurrent", type=int, default=12, help="prompts (of 8 samples) generated at once")
    parser.add_argument("--modes", default="retract,in_place", help="compared with drain")
    args = parser.parse_args()
    modes = ["drain", *(mode for mode in args.modes.split(",") if mode != "drain")]
    two_cores()
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT / "benchmarks"))
    found = {}
    with tempfile.TemporaryDirectory(prefix="interrupt-") as root:
        endless_model(Path(root) / "model", args.longest)
        for mode in modes:
            found[mode] = run(root, mode, args)
            show(mode, found[mode])
    for mode in modes[1:]:
        print(f"ratio {mode}/drain {found[mode]['samples_per_s'] / found['drain']['samples_per_s']:.2f}")


def run(root: str, mode: str, args: argparse.Namespace) -> dict[str, float]:
    settings = [
        f"run.steps={args.steps}",
        f"model.path={root}/model",
        "reward.path=interrupt.reward",
        "rollout.group_size=8",
        f"rollout.max_new_tokens={args.longest}",
        f"rollout.max_concurrent_prompts={args.concurrent}",
        f"sync.pause={mode}",
        f"staleness.max_staleness={args.staleness}",
        "train.batch_size=8",
        "train.microbatch_tokens=2048",
    ]
    tail = {"median": args.median, "sigma": args.sigma, "longest": args.longest}
    return measured(root, mode, settings, skip=SKIP, workflow="interrupt.TailWorkflow", workflow_kwargs=tail)


def show(mode: str, figures: dict[str, float]) -> None:
    print(
        f"{mode:>8}: {figures['samples_per_s']:7.1f} samples/s, {figures['tokens_per_s']:7.0f} tokens/s, {figures['seconds']:.2f} s a step "
        f"(waiting for rollouts {figures['wait']:.2f}, training {figures['train']:.2f}, draining {figures['drain']:.2f}), "
        f"mean staleness {figures['staleness']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
