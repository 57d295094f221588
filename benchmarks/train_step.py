"""A training step of our engine against a plain transformers + torch step: the same weights, samples, loss, dtype and cores, in one run.

Each side is a process of its own and both hold their model all the time; steps alternate between them. A step is forward, backward,
clipping and AdamW over micro-batches of ragged samples, of which only the answers are trained. Printed: tokens/s (median over steps, real
tokens alone), their ratio, peak resident memory, and the losses and gradient norms of both, which must agree or the run fails.

The other side is written as one would write it well without a framework: ``AutoModelForCausalLM`` with SDPA, logits of trained tokens only,
``AdamW(fused=True)``. It tries right-padded micro-batches (sorted by length, no mask: causal attention never looks at padding behind a
token) and packed ones (position ids), for experts grouped_mm and the eager loop, looks twice where it is close, and keeps the fastest.
bf16: ours keeps bf16 weights and an fp32 master copy, the other side fp32 weights under autocast.

    python benchmarks/train_step.py [--model dense|moe] [--dtype fp32|bf16] [--steps 5] [--threads 2] [--profile FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # SmolLM2-135M's own.
    "dense": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    # 123 M parameters, 36 M of them active.
    "moe": (
        "qwen3_moe",
        {
            "vocab_size": 32000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": True,
        },
    ),
}
ADAM: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip_grad": 1.0}
Step = Callable[[], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, help="none: both, one after the other")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=12, help="samples per step, of 32 to 384 tokens")
    parser.add_argument("--microbatch-tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="instead of the shape's own (for a quick look)")
    parser.add_argument("--profile", type=Path, help="write a table of where our step's time goes, and compare nothing")
    parser.add_argument("--side", choices=["ours", "transformers"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args)
        return
    for name in [args.model] if args.model else SHAPES:
        with tempfile.TemporaryDirectory(prefix="train-step-") as folder:
            compare(name, make_model(name, Path(folder), args.layers), args)


def make_model(name: str, folder: Path, layers: int | None) -> Path:
    """Random weights of the shape as a HuggingFace folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = SHAPES[name]
    fields = fields | {"max_position_embeddings": 2048, "initializer_range": 0.02} | ({"num_hidden_layers": layers} if layers else {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    model.save_pretrained(folder)
    print(f"\n{name}: {kind}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters", flush=True)
    return folder


def make_samples(args: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    """Ragged samples: a prompt, and an answer that is trained."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.0, 0.6, args.samples)), 32, 384).astype(int)
    trained = sum(int(n) - int(n) // 3 for n in lengths)
    rows = []
    for n in lengths:
        mask = np.arange(n) >= n // 3
        weights = (mask / trained).astype(np.float32)
        rows.append({"input_ids": rng.integers(3, vocab_size, n), "loss_mask": mask, "weights": weights})
    return rows


# --- the two sides


def serve(args: argparse.Namespace) -> None:
    """One side: a JSON line per line read."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    step, tokens, about = {"ours": ours, "transformers": transformers_side}[args.side](args)
    out.write(json.dumps({"tokens": tokens, "about": about}) + "\n")
    for line in sys.stdin:
        if line.strip() == "profile":
            profile(step, args.profile)
        start = time.perf_counter()
        result = step()
        result["seconds"] = time.perf_counter() - start
        result["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        out.write(json.dumps(result) + "\n")


def make_engine(args: argparse.Namespace) -> Any:
    """Our engine, alone in its process group."""
    from areal_mega.megatron.platform import detect

    platform = detect("cpu")
    with platform.importing():
        from areal_mega.megatron.engine import MegatronEngine
    import torch
    import torch.distributed as dist

    from areal_mega.config.schema import ModelSection, OptimizerSection, RouterSection, TrainSection

    torch.set_num_threads(args.threads)
    platform.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout_s=60)
    return MegatronEngine(
        model=ModelSection(path=str(args.folder), dtype=args.dtype),
        train=TrainSection(strategy="megatron:d1", microbatch_tokens=args.microbatch_tokens, optimizer=OptimizerSection(**ADAM)),
        router=RouterSection(),
        total_steps=100,
        seed=1,
        rank=0,
        model_path=str(args.folder),
        platform=platform,
    )


def ours(args: argparse.Namespace) -> tuple[Step, int, str]:
    return engine_step(make_engine(args), args)


def engine_step(engine: Any, args: argparse.Namespace) -> tuple[Step, int, str]:
    """One supervised step of ``engine`` on the samples."""
    from areal_mega.algorithms.supervised import sft_loss
    from areal_mega.parallel.balance import plan_microbatches

    rows = make_samples(args, engine.hf_config["vocab_size"])
    (plan,) = plan_microbatches([len(row["input_ids"]) for row in rows], ranks=1, max_tokens=args.microbatch_tokens)

    def step() -> dict[str, float]:
        batches = [engine.pack([rows[i] for i in micro], micro) for micro in plan]
        result = engine.train_minibatch(batches, sft_loss, 1.0)
        loss = result.metrics["sft/nll"]
        return {"loss": loss.value / loss.weight, "grad_norm": result.grad_norm}

    return step, sum(len(row["input_ids"]) for row in rows), f"{len(plan)} packed micro-batches"


def transformers_side(args: argparse.Namespace) -> tuple[Step, int, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    config = AutoConfig.from_pretrained(args.folder)
    rows = make_samples(args, config.vocab_size)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="sdpa").train()
    forms = {"padded": padded(rows, args.microbatch_tokens), "packed": packed(rows, args.microbatch_tokens)}
    # Its third one, batched_mm, is for decoding: it copies the weights once per token.
    experts = ["grouped_mm", "eager"] if hasattr(config, "num_experts") else [""]
    times: dict[tuple[str, str], float] = {}
    for form, batches in forms.items():
        for kind in experts:
            if kind:
                model.set_experts_implementation(kind)
            if not times:
                gradients(model, batches, args.dtype)  # the first pass of a process is slower
            start = time.perf_counter()
            gradients(model, batches, args.dtype)
            times[form, kind] = time.perf_counter() - start
    for form, kind in [key for key, value in times.items() if value < 2 * min(times.values())]:
        # A second look where it was close: other work on the machine must not choose.
        if kind:
            model.set_experts_implementation(kind)
        start = time.perf_counter()
        gradients(model, forms[form], args.dtype)
        times[form, kind] = min(times[form, kind], time.perf_counter() - start)
    form, kind = min(times, key=lambda key: times[key])
    if kind:
        model.set_experts_implementation(kind)
    adam = torch.optim.AdamW(
        model.parameters(), lr=ADAM["lr"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"], weight_decay=0.0, fused=True
    )
    tried = ", ".join(f"{' '.join(filter(None, key))} {value:.2f} s" for key, value in times.items())

    def step() -> dict[str, float]:
        loss = gradients(model, forms[form], args.dtype)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["clip_grad"], foreach=True)
        adam.step()
        return {"loss": loss, "grad_norm": float(norm)}

    return step, sum(len(row["input_ids"]) for row in rows), f"{' '.join(filter(None, (form, kind)))} (gradients alone: {tried})"


def gradients(model: Any, batches: list[dict[str, Any]], dtype: str) -> float:
    import torch

    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            hidden = model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden.flatten(0, 1)[batch["scored"]])
        loss = (torch.nn.functional.cross_entropy(logits.float(), batch["targets"], reduction="none") * batch["weights"]).sum()
        loss.backward()
        total += loss.detach()
    return float(total)


def padded(rows: list[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
    """Rows of similar length together, rows times the longest within the budget."""
    groups: list[list[dict[str, Any]]] = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        if groups and len(groups[-1][0]["input_ids"]) * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [assemble(group, [(i, 0) for i in range(len(group))], len(group), len(group[0]["input_ids"])) for group in groups]


def packed(rows: list[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
    """Rows end to end within the budget."""
    from areal_mega.parallel.balance import plan_microbatches

    (plan,) = plan_microbatches([len(row["input_ids"]) for row in rows], ranks=1, max_tokens=budget)
    out = []
    for micro in plan:
        group, places, used = [rows[i] for i in micro], [], 0
        for row in group:
            places.append((0, used))
            used += len(row["input_ids"])
        out.append(assemble(group, places, 1, used))
    return out


def assemble(group: list[dict[str, Any]], places: list[tuple[int, int]], height: int, width: int) -> dict[str, Any]:
    import torch

    ids, positions = torch.zeros(height, width, dtype=torch.int64), torch.arange(width).repeat(height, 1)
    scored, targets, weights = [], [], []
    for row, (y, x) in zip(group, places, strict=True):
        n = len(row["input_ids"])
        ids[y, x : x + n] = torch.from_numpy(row["input_ids"])
        positions[y, x : x + n] = torch.arange(n)
        trained = torch.from_numpy(row["loss_mask"]).nonzero()[:, 0]
        scored.append(y * width + x + trained - 1)
        targets.append(torch.from_numpy(row["input_ids"])[trained])
        weights.append(torch.from_numpy(row["weights"])[trained])
    batch = {"scored": torch.cat(scored), "targets": torch.cat(targets), "weights": torch.cat(weights)}
    # Plain positions need not be said; said, transformers would look for packed sequences in them.
    return batch | {"input_ids": ids, "position_ids": positions if height == 1 and len(group) > 1 else None}


def profile(step: Step, file: Path) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU], with_stack=False) as record:
        step()
    file.write_text(record.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=60))


# --- the comparison


class Side:
    """One side's process."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace) -> None:
        passed = ["dtype", "threads", "samples", "microbatch_tokens", "profile"]
        given = {f"--{key.replace('_', '-')}": getattr(args, key) for key in passed}
        words = [word for key, value in given.items() if value is not None for word in (key, str(value))]
        env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--side", name, "--folder", str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.name, self.results = name, list[dict[str, float]]()
        ready = self._read()
        self.tokens, self.about = ready["tokens"], ready["about"]

    def step(self, command: str = "step") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        self.results.append(self._read())

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    @property
    def seconds(self) -> float:
        return statistics.median(result["seconds"] for result in self.results[1:])

    @property
    def fastest(self) -> float:
        return min(result["seconds"] for result in self.results[1:])


def compare(name: str, folder: Path, args: argparse.Namespace) -> None:
    names = ["ours"] if args.profile else ["ours", "transformers"]
    sides = [Side(side, folder, args) for side in names]
    if args.profile:
        sides[0].step()
        sides[0].step("profile")
    else:
        for _ in range(1 + args.steps):
            for side in sides:
                side.step()
    for side in sides:
        side.close()
    if args.profile:
        print(f"{args.profile} written")
        return
    for side in sides:
        print(
            f"  {side.name:>12}: {side.tokens / side.seconds:7.0f} tokens/s, {side.seconds:.2f} s a step of {side.tokens} tokens, "
            f"peak memory {side.results[-1]['peak_gb']:.2f} GB; {side.about}"
        )
    ratio, fastest = sides[1].seconds / sides[0].seconds, sides[1].fastest / sides[0].fastest
    print(f"  {name}, {args.dtype}, {args.threads} threads: ratio {ratio:.2f}, of the fastest steps {fastest:.2f}")
    check([side.results for side in sides], 1e-4 if args.dtype == "fp32" else 2e-2)


def check(results: list[list[dict[str, float]]], tolerance: float) -> None:
    """Both sides have computed the same thing at every step."""
    worst = {key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(*results, strict=True)) for key in ("loss", "grad_norm")}
    first, last = results[0][0], results[0][-1]
    print(
        f"  loss {first['loss']:.4f} -> {last['loss']:.4f}; the two differ by at most {worst['loss']:.0e} (loss) and "
        f"{worst['grad_norm']:.0e} (gradient norm), relative"
    )
    if max(worst["loss"], worst["grad_norm"] / 10) > tolerance:
        raise SystemExit(f"the sides do not compute the same: more than {tolerance:.0e}")


if __name__ == "__main__":
    main()
