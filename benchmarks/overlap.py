"""Does training overlap generation? The same work synchronously (plain loop) and asynchronously (overlapped loop), in one run.

Train rank and rollout side are pinned to one core each, so that neither can borrow the other's. Prints samples/s of both, the ratio,
and the time split of the synchronous run: with generation and training of equal length the ideal ratio is 2.

    python benchmarks/overlap.py [--steps 16] [--staleness 2] [--new-tokens 56]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from two_cores import measured, two_cores

ROOT = Path(__file__).resolve().parent.parent
SKIP = 2
"""First steps left out: buffers are allocated, and the overlapped loop's first batch has nothing to overlap with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--staleness", type=int, default=2, help="max_staleness of the asynchronous run")
    parser.add_argument("--new-tokens", type=int, default=56, help="length of answers; more makes generation the longer part")
    parser.add_argument(
        "--concurrent", type=int, default=8, help="prompts (of 16 samples) generated at once; more makes generation the shorter part"
    )
    parser.add_argument("--microbatch-tokens", type=int, default=2048, help="small ones stay in cache, and leave the other role its own")
    parser.add_argument("--pause", default="in_place", choices=["in_place", "retract", "abort"])
    args = parser.parse_args()
    two_cores()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="overlap-") as root:
        plain = run(root, "synchronous", args, ["run.overlap=false", "staleness.max_staleness=0"])
        overlapped = run(root, "asynchronous", args, ["run.overlap=true", f"staleness.max_staleness={args.staleness}"])
    show("synchronous", plain)
    show("asynchronous", overlapped)
    print(f"ratio {overlapped['samples_per_s'] / plain['samples_per_s']:.2f}")


def run(root: str, name: str, args: argparse.Namespace, overrides: list[str]) -> dict[str, float]:
    settings = [
        f"run.steps={args.steps}",
        f"rollout.max_new_tokens={args.new_tokens}",
        f"rollout.max_concurrent_prompts={args.concurrent}",
        f"sync.pause={args.pause}",
        "train.batch_size=32",
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
