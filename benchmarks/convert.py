"""Speed and memory of ``areal-mega convert`` against ``cp`` of the same bytes, in one run.

    python benchmarks/convert.py [--gb 4] [--rounds 5] [--folder DIR] [--workers N]

Makes a synthetic Qwen3-MoE folder, converts it to a checkpoint (from-hf), compares the two (verify), and converts back (to-hf), each in a
child process whose peak resident memory is measured against what it had after its imports.

Both begin alike (the input in the page cache, nothing waiting to be written) and take turns; medians over the rounds are compared. A
conversion ends with its output stored for good, so ``cp`` with a ``sync`` after it is its like; for verify, which writes nothing, it is
``cp`` alone. The other one is printed too. Goals: half the speed, and 1 GB of memory.

By default everything lies in /dev/shm, where ``cp`` is as fast as the memory: that is the harder goal, and it repeats. A disk hides the
work, and one that is itself a file of a host writes blocks it has had before six times as fast as new ones, whoever gets them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HIDDEN, FFN, EXPERTS, VOCAB = 2048, 768, 128, 32000
GOAL_RATIO, GOAL_BYTES = 0.5, 10**9
MEMORY = Path("/dev/shm")


def config_of(gigabytes: float) -> dict[str, Any]:
    """Qwen3-30B-A3B's layer sizes, as many layers as fit (at least one) and experts to fill up."""
    rest = gigabytes * 1e9 - 2 * VOCAB * HIDDEN * 2
    expert = 3 * HIDDEN * FFN * 2
    layers = max(1, round(rest / (EXPERTS * expert)))
    return {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": max(8, int(rest / layers / expert) // 8 * 8),
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }


def make_model(folder: Path, gigabytes: float) -> int:
    """Write the synthetic model; its bytes of weights."""
    import torch

    from areal_mega.models.hf_io import HFTensorSpec, HFWriter
    from areal_mega.models.registry import family_for

    config = config_of(gigabytes)
    table = family_for(config).table(config)
    block = torch.randn(1 << 27, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = [HFTensorSpec(t.name, t.shape, torch.bfloat16) for t in table.hf_tensors]
    with HFWriter(folder, plan, source={"config.json": json.dumps(config, indent=2).encode()}) as writer:
        for number, spec in enumerate(plan):
            count = spec.nbytes // 2
            start = number * 7919 % (len(block) - count)
            writer.write(spec.name, block[start : start + count].view(spec.shape))
    return sum(spec.nbytes for spec in plan)


def resident(kind: str) -> int:
    """Bytes resident now (VmRSS) or at most so far (VmHWM). Not ``ru_maxrss``: that begins with the parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


def child(verb: str, a: str, b: str, workers: int | None) -> dict[str, float]:
    """One conversion in this process."""
    from areal_mega.checkpoint import convert, verify
    from areal_mega.core.memory import keep_freed_memory

    keep_freed_memory(arenas=1)
    base = resident("VmRSS")
    begun = time.perf_counter()
    if verb == "from-hf":
        convert.from_hf(a, b, strategy="megatron:(attn:d4t2|ffn:e8)", workers=workers)
    elif verb == "to-hf":
        convert.to_hf(a, b, workers=workers)
    else:
        differences = verify.verify(a, b, workers=workers)
        assert not differences, differences[:3]
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "above": resident("VmHWM") - base}


def measure(verb: str, a: Path, b: Path, workers: int | None) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", verb, str(a), str(b), *(["--workers", str(workers)] if workers else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def settle(source: Path) -> None:
    """The same beginning for both: the input read, the disk idle."""
    subprocess.run(["sync", "-f", source], check=True)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def copy(source: Path, out: Path) -> tuple[float, float]:
    """Seconds of ``cp``, and of ``cp`` and ``sync`` together."""
    settle(source)
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    plain = time.perf_counter() - begun
    subprocess.run(["sync", "-f", out], check=True)
    durable = time.perf_counter() - begun
    shutil.rmtree(out)
    return plain, durable


def compare(verb: str, a: Path, b: Path, *, scratch: Path, rounds: int, workers: int | None) -> dict[str, float]:
    """Medians of the seconds of both, in turns, and the most memory; ``b`` is there afterwards."""
    copies, own = [], []
    for _ in range(rounds):
        if verb != "verify" and b.exists():
            shutil.rmtree(b)
        copies.append(copy(a, scratch))
        settle(a)
        own.append(measure(verb, a, b, workers))
    plain, durable = (median(seconds) for seconds in zip(*copies, strict=True))
    return {
        "seconds": median(result["seconds"] for result in own),
        "plain": plain,
        "durable": durable,
        "above": max(result["above"] for result in own),
    }


def main(gigabytes: float, folder: Path, workers: int | None, rounds: int) -> None:
    root = Path(tempfile.mkdtemp(prefix="convert-", dir=folder))
    try:
        size = make_model(root / "hf", gigabytes)
        print(f"{size / 1e9:.2f} GB of weights, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, medians of {rounds}")
        print(f"{'':8} {'MB/s':>7} {'cp MB/s':>8} {'ratio':>6} {'cp+sync':>8} {'ratio':>6} {'memory':>8}")
        free = shutil.disk_usage(root).free
        if free < 3 * size:
            sys.exit(f"{folder}: {free / 1e9:.1f} GB are free, {3 * size / 1e9:.1f} GB are needed; give another --folder")
        steps = (("from-hf", root / "hf", root / "ck"), ("verify", root / "hf", root / "ck"), ("to-hf", root / "ck", root / "back"))
        for verb, a, b in steps:
            if verb == "to-hf":
                shutil.rmtree(root / "hf")  # room: where memory runs short everything is measured but the work
            took = compare(verb, a, b, scratch=root / "copy", rounds=rounds, workers=workers)
            seconds, plain, durable = took["seconds"], took["plain"], took["durable"]
            ratio = (plain if verb == "verify" else durable) / seconds
            good = "reached" if ratio >= GOAL_RATIO and took["above"] <= GOAL_BYTES else "missed"
            print(
                f"{verb:8} {size / 1e6 / seconds:7.0f} {size / 1e6 / plain:8.0f} {plain / seconds:6.2f} {size / 1e6 / durable:8.0f} "
                f"{durable / seconds:6.2f} {took['above'] / 1e6:5.0f} MB  goal {good}",
                flush=True,
            )
        measure("verify", root / "ck", root / "back", workers)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument(
        "--folder", type=Path, default=MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()), help="where; needs four times the size"
    )
    parser.add_argument("--workers", type=int, default=None, help="threads of the conversion")
    parser.add_argument("--child", nargs=3, metavar=("VERB", "A", "B"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child, arguments.workers)))
    else:
        main(arguments.gb, arguments.folder, arguments.workers, arguments.rounds)
