"""What ``scripts/gpu_check.sh`` runs: the engine on a GPU against the same engine in fp32 on the CPU, and a training step timed.

transformers is not needed. The CPU's fp32 engine is the reference, and it is the one that the test suite holds against transformers
(docs/parity.md). The reference is computed in a process of its own; the device's splits the samples into other micro-batches.
Both work from folders with random weights that are made from the parameter table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "megatron.core", "pydantic", "yaml", "safetensors", "packaging")
COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 8192, "decoder_sparse_step": 1, "mlp_only_layers": []}
EXPERTS = {"norm_topk_prob": True, "num_experts_per_tok": 8}


def shape(kind: str, hidden: int, ffn: int, layers: int, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return COMMON | {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 128 if hidden >= 512 else 32,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        **more,
    }


PARITY = {
    "dense": shape("qwen3", 256, 512, 4, 8, 1024),
    "moe": shape("qwen3_moe", 256, 512, 4, 8, 1024, num_experts=16, moe_intermediate_size=128, **EXPERTS),
}
SPEED = {
    "cuda": {
        # Qwen3-1.7B's own shape; and a mixture of 2 billion parameters with Qwen3-30B-A3B's layer sizes.
        "dense": (shape("qwen3", 2048, 6144, 28, 16, 151936), 8, 2048),
        "moe": (shape("qwen3_moe", 2048, 6144, 6, 16, 32000, num_experts=64, moe_intermediate_size=768, **EXPERTS), 8, 2048),
    },
    "cpu": {
        "dense": (shape("qwen3", 128, 256, 2, 4, 512), 4, 64),
        "moe": (shape("qwen3_moe", 128, 256, 2, 4, 512, num_experts=16, moe_intermediate_size=64, **EXPERTS), 4, 64),
    },
}
"""Per device and model: config, samples of a step, tokens of each. A micro-batch has four samples."""
# Of log-probabilities the largest difference in fp32 and the mean one in bf16; of gradients the relative one, over the whole model.
LIMITS = {"fp32": (1e-3, 1e-3), "bf16": (0.05, 0.1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", choices=list(PARITY), help="none: all of them")
    parser.add_argument("--peak-tflops", type=float, help="of the device in bf16, for utilisation; none: a large matrix product is timed")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--inject", type=float, default=0.0, help="error put into the device's weights (to see the check fail)")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs:
        jobs: dict[str, Any] = {"parity": parity_job, "speed": speed_job}
        answers = [jobs[what](**job) for what, job in json.loads(args.jobs.read_text())]
        args.jobs.write_text(json.dumps(answers))
        return
    require(args.device)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        folder = Path(work)
        failed = parity(args, folder)
        speed(args, folder)
    if failed:
        print(f"parity failed: {', '.join(failed)}")
        raise SystemExit(1)


def require(device: str) -> None:
    missing = [name for name in NEEDED if not found(name)]
    if missing:
        print(f"missing here: {', '.join(missing)}; put their wheels into a folder and name it with --wheels", file=sys.stderr)
        raise SystemExit(2)
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here; --device cpu runs small shapes on the CPU", file=sys.stderr)
        raise SystemExit(2)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    fused = [package for package in ("transformer_engine", "amp_C", "fused_weight_gradient_mlp_cuda") if found(package)]
    print(f"{name}, torch {torch.__version__}, fused kernels: {', '.join(fused) or 'none installed'}")


def chosen(args: argparse.Namespace) -> list[str]:
    return [args.model] if args.model else list(PARITY)


def found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def run(jobs: list[tuple[str, dict[str, Any]]], work: Path) -> Any:
    """Jobs one after the other in a process of their own; their answers."""
    file = work / "jobs.json"
    file.write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, __file__, "--jobs", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        print(done.stdout.decode(errors="replace")[-3000:])
        raise SystemExit(f"the engine on {jobs[0][1]['device']} ended with exit code {done.returncode}")
    return json.loads(file.read_text())


# --- parity


def parity(args: argparse.Namespace, work: Path) -> list[str]:
    """Print differences; names of the comparisons that are beyond their limits."""
    failed = []
    jobs: dict[str, list[tuple[str, dict[str, Any]]]] = {"reference": [], "device": []}
    cases = [(name, dtype) for name in chosen(args) for dtype in LIMITS]
    for name in chosen(args):
        folder = str(make_model(work / f"parity-{name}", PARITY[name], "float32"))
        shared = {"folder": folder, "device": "cpu", "dtype": "fp32", "split": 1, "inject": 0.0}
        jobs["reference"].append(("parity", shared | {"save": str(work / f"{name}.npz")}))
    for name, dtype in cases:
        given = {"device": args.device, "dtype": dtype, "split": 3, "inject": args.inject, "save": str(work / f"{name}-{dtype}.npz")}
        jobs["device"].append(("parity", {"folder": str(work / f"parity-{name}"), **given}))
    for batch in jobs.values():
        run(batch, work)
    print(f"\n{'parity with the CPU in fp32':<30}{'log-prob max':>14}{'mean':>10}{'gradient':>10}{'limits':>16}")
    for name, dtype in cases:
        largest, mean, gradient = differences(work / f"{name}.npz", work / f"{name}-{dtype}.npz")
        limits = LIMITS[dtype]
        good = (largest if dtype == "fp32" else mean) <= limits[0] and gradient <= limits[1]
        line = f"{name} {args.device} {dtype}"
        print(f"{line:<30}{largest:>14.1e}{mean:>10.1e}{gradient:>10.1e}{limits[0]:>9.0e}{limits[1]:>7.0e}  {'ok' if good else 'FAILED'}")
        if not good:
            failed.append(line)
    return failed


def differences(reference: Path, device: Path) -> tuple[float, float, float]:
    """Of log-probabilities the largest and the mean difference; of all gradients together the relative one. NaN if either is NaN."""
    import numpy as np

    with np.load(reference, allow_pickle=False) as a, np.load(device, allow_pickle=False) as b:
        assert set(a.files) == set(b.files), "the two have different tensors"
        gaps = np.concatenate([np.abs(a[k] - b[k]) for k in a.files if k.startswith("logprobs/")])
        gradients = [k for k in a.files if k.startswith("gradient/")]
        square = sum(float(np.square(a[k] - b[k]).sum()) for k in gradients)
        whole = sum(float(np.square(a[k]).sum()) for k in gradients)
    return float(gaps.max()), float(gaps.mean()), (square / whole) ** 0.5


def parity_job(folder: str, device: str, dtype: str, split: int, save: str, inject: float) -> None:
    engine = make_engine(folder, device, dtype)
    import numpy as np
    import torch

    from areal_mega.models.gather import HFGatherer

    if inject:
        with torch.no_grad():
            next(t for name, t in engine.named_shards().items() if name.endswith("linear_proj.weight")).mul_(1 + inject)
    rows = make_samples([65, 130, 17, 256, 2, 90, 33, 64], engine.hf_config["vocab_size"])
    batches = [engine.pack([rows[i] for i in group], group) for group in (list(range(len(rows)))[i::split] for i in range(split))]
    arrays: dict[str, Any] = {}
    for values, batch in zip(engine.logprobs([without_mask(b) for b in batches], 1.0), batches, strict=True):
        for i, start, n in zip(batch.sample_index, batch.cu_seqlens.tolist(), batch.lengths, strict=False):
            arrays[f"logprobs/{i}"] = values[start : start + n].numpy()
    engine.compute_gradients(batches, weighted, 1.0)
    named = {name: torch.zeros_like(tensor) for name, tensor in engine.named_shards().items()} | engine.named_gradients()
    gatherer = HFGatherer(named, engine.family, engine.hf_config, engine.layout, 0, naming=engine.naming)
    for item in gatherer.stream():
        assert item is not None
        arrays[f"gradient/{item[0]}"] = item[1].float().cpu().numpy()
    np.savez(save, **arrays)
    engine.close()


def weighted(logprobs_t: Any, fields: Any, sequence_t: Any, num_sequences: int) -> tuple[Any, dict[str, Any]]:
    return -(logprobs_t * fields["weights"]).sum(), {}


def without_mask(batch: Any) -> Any:
    from dataclasses import replace

    return replace(batch, fields={})


# --- speed


def speed(args: argparse.Namespace, work: Path) -> None:
    peak = args.peak_tflops
    print(f"\n{'training step, bf16':<22}{'parameters':>12}{'tokens/s':>10}{'TFLOP/s':>9}{'utilisation':>13}{'peak memory':>13}")
    for name in chosen(args):
        config, samples, length = SPEED[args.device][name]
        folder = str(make_model(work / f"speed-{name}", config, "bfloat16"))
        job = {"folder": folder, "device": args.device, "samples": samples, "length": length, "steps": args.steps}
        (result,) = run([("speed", job)], work)
        flops = model_flops(config, length) * result["tokens_per_s"] / 1e12
        against = peak or result["matmul_tflops"]
        print(
            f"{name:<22}{result['parameters'] / 1e6:>10.1f} M{result['tokens_per_s']:>10.0f}{flops:>9.2f}"
            f"{flops / against:>12.0%} {result['peak_gb']:>10.2f} GB"
        )
    of = f"{peak:.0f} TFLOP/s as given" if peak else f"the {result['matmul_tflops']:.2f} TFLOP/s of a large bf16 matrix product here"
    print(f"utilisation: floating-point operations of the model (forward and backward, without recomputation) of {of}")


def model_flops(config: dict[str, Any], length: int) -> float:
    """Per token, forward and backward: 6 per weight of a matrix product, and causal attention's two products (as arXiv:2204.02311,
    appendix B, which counts attention without its causal half)."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    attention = hidden * dim * (2 * heads + 2 * groups)
    ffn = 3 * hidden * config["intermediate_size"]
    if "num_experts" in config:
        ffn = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"] + hidden * config["num_experts"]
    weights = layers * (attention + ffn) + hidden * config["vocab_size"]
    return 6.0 * weights + 6.0 * layers * heads * dim * length


def speed_job(folder: str, device: str, samples: int, length: int, steps: int) -> dict[str, float]:
    engine = make_engine(folder, device, "bf16")
    import resource

    import torch

    rows = make_samples([length] * samples, engine.hf_config["vocab_size"])
    groups = [list(range(samples))[i : i + 4] for i in range(0, samples, 4)]
    batches = [engine.pack([rows[i] for i in group], group) for group in groups]
    times = []
    for _ in range(2 + steps):
        start = time.perf_counter()
        engine.train_minibatch(batches, weighted, 1.0)  # ends with the gradient norm on the host
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    used = torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "tokens_per_s": samples * length / sorted(times[2:])[steps // 2],
        "parameters": sum(t.numel() for t in engine.named_gradients().values()),
        "peak_gb": used / 2**30,
        "matmul_tflops": matmul_tflops(device),
    }


def matmul_tflops(device: str) -> float:
    import torch

    n, rounds = (8192, 20) if device == "cuda" else (512, 5)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        a @ b
    if device == "cuda":
        torch.cuda.synchronize()
    return 2 * n**3 * rounds / (time.perf_counter() - start) / 1e12


# --- shared by the jobs


def make_engine(folder: str, device: str, dtype: str) -> Any:
    from areal_mega.megatron.platform import detect

    platform = detect(device)  # type: ignore[arg-type]
    with platform.importing():
        from areal_mega.megatron.engine import MegatronEngine
    import torch.distributed as dist

    from areal_mega.config.schema import ModelSection, OptimizerSection, RouterSection, TrainSection

    if not dist.is_initialized():
        platform.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout_s=120)
    return MegatronEngine(
        model=ModelSection(path=folder, dtype=dtype),  # type: ignore[arg-type]
        train=TrainSection(strategy="megatron:d1", optimizer=OptimizerSection(lr=1e-5)),
        router=RouterSection(),
        total_steps=100,
        seed=1,
        rank=0,
        model_path=folder,
        platform=platform,
    )


def make_model(folder: Path, config: dict[str, Any], dtype: str) -> Path:
    """Random weights from the parameter table: norms around 1, matrices of standard deviation 0.02."""
    import torch

    from areal_mega.models.hf_io import HFTensorSpec, HFWriter
    from areal_mega.models.registry import family_for

    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    plan = [HFTensorSpec(t.name, t.shape, kind) for t in family_for(config).table(config).hf_tensors]
    with HFWriter(folder, plan, source={"config.json": json.dumps(config).encode()}) as writer:
        for spec in plan:
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
            writer.write(spec.name, (1 + 0.1 * values if len(spec.shape) == 1 else 0.02 * values).to(kind))
    return folder


def make_samples(lengths: list[int], vocab_size: int) -> list[dict[str, Any]]:
    """A prompt of a third, and weights of both signs on the answer that add up to about one in size."""
    import numpy as np

    rng = np.random.default_rng(0)
    rows = []
    for n in lengths:
        mask = np.arange(n) > n // 3
        weights = np.where(mask, rng.normal(size=n), 0).astype(np.float32) / sum(lengths)
        rows.append({"input_ids": rng.integers(1, vocab_size, n), "loss_mask": mask, "weights": weights})
    return rows


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main()
