"""Does training overlap generation? The same work synchronously (plain loop) and asynchronously (overlapped loop), in one run.

Train rank and rollout side (the controller with it) are pinned to one core each, so that neither can borrow the other's. Prints samples/s
of both, the ratio, and the time split of the synchronous run: with generation and training of equal length the ideal ratio is 2. The two
take turns, for a machine that others use too is not equally fast all the time.

    python benchmarks/overlap.py [--steps 24] [--rounds 2] [--staleness 2] [--new-tokens 128]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import fmean

from two_cores import ROOT, endless_model, measured, two_cores

SKIP = 2
"""First steps left out: buffers are allocated, and the overlapped loop's first batch has nothing to overlap with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each")
    parser.add_argument("--staleness", type=int, default=2, help="max_staleness of the asynchronous run")
    parser.add_argument("--new-tokens", type=int, default=128, help="length of every answer")
    parser.add_argument("--batch", type=int, default=8, help="groups (of 16 samples) in a step")
    parser.add_argument("--concurrent", type=int, default=3, help="groups generated at once; more makes generation the shorter part")
    parser.add_argument("--microbatch-tokens", type=int, default=2048, help="small ones stay in cache, and leave the other role its own")
    parser.add_argument("--pause", default="in_place", choices=["in_place", "retract", "abort"])
    args = parser.parse_args()
    two_cores()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="overlap-") as root:
        endless_model(Path(root) / "model", args.new_tokens + 16)
        plain, overlapped = [], []
        for turn in range(args.rounds):
            plain.append(run(root, f"synchronous-{turn}", args, ["run.overlap=false", "staleness.max_staleness=0"]))
            settings = ["run.overlap=true", f"staleness.max_staleness={args.staleness}"]
            overlapped.append(run(root, f"asynchronous-{turn}", args, settings))
            show("synchronous", plain[-1])
            show("asynchronous", overlapped[-1])
    print(f"ratio {fmean(p['seconds'] for p in plain) / fmean(o['seconds'] for o in overlapped):.2f}")


def run(root: str, name: str, args: argparse.Namespace, overrides: list[str]) -> dict[str, float]:
    settings = [
        f"run.steps={args.steps}",
        f"model.path={root}/model",
        f"rollout.max_new_tokens={args.new_tokens}",
        f"rollout.max_concurrent_prompts={args.concurrent}",
        f"sync.pause={args.pause}",
        f"train.batch_size={args.batch}",
        f"train.microbatch_tokens={args.microbatch_tokens}",
    ]
    return measured(root, name, [*settings, *overrides], skip=SKIP)


def show(name: str, figures: dict[str, float]) -> None:
    print(
        f"{name:>12}: {figures['samples_per_s']:7.1f} samples/s, {figures['seconds']:.2f} s a step "
        f"(waiting for rollouts {figures['wait']:.2f}, training {figures['train']:.2f}, sync {figures['sync']:.2f}), "
        f"mean staleness {figures['staleness']:.2f}"
    )


if __name__ == "__main__":
    main()
