"""How fast do weights reach the servers? A whole weight sync against a raw broadcast of the same bytes, in one run.

    python benchmarks/sync.py [--mb 300] [--servers 1] [--bucket-mb 64] [--rounds 5] [--layout dense|moe|tensor|data|mixed ...]

Real train ranks (gloo) of a random model and real embedded servers, each a process of its own, driven by the controller's own
``WeightSync``. Every round is one raw broadcast and three syncs of all weights: overlapped, plain, and overlapped without
digests. The raw broadcast takes the same bytes, in buckets of the same sizes, through the same groups, from the same ranks to the same
servers, which throw them away; both ends take memory that they have used before. Prints medians: bytes/s of all of them, the ratio to the
raw broadcast (goal: 0.8), the senders' digests in per cent of the raw broadcast (goal: 2), and where a sync's time goes. What is done
before the pause, while servers still generate, is not in the ratios ("prepare": the digests of what a rank has whole, and the first two
buckets of every sender; the first line says how many of the bytes those are, fewer of a larger model: ``--mb 1200``). A server's layouts
for products are made by the first product after a sync and are in no figure here.

On a machine with fewer cores than processes everything shares them: gathering, digests and loading then slow the broadcast down, however
well they overlap with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOST, TOKEN = "127.0.0.1", "benchmark"
GOAL = 0.8
LAYOUTS = {
    "dense": ("qwen3", "megatron:t2p2"),
    "moe": ("qwen3_moe", "megatron:d2e2"),
    "tensor": ("qwen3", "megatron:t2"),
    "data": ("qwen3", "megatron:d2"),
    "mixed": ("qwen3_moe", "megatron:t2p2e2d2"),
}


def config_of(family: str, mb: float) -> dict[str, Any]:
    """A model of about ``mb`` megabytes in bf16, shaped like a small model of its family."""
    hidden, vocab, heads, head_dim = 768, 16000, 12, 64
    config: dict[str, Any] = {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    attention = hidden * head_dim * heads * 2 + 2 * hidden * head_dim * heads // 3
    if family == "qwen3":
        config |= {"intermediate_size": 4 * hidden}
        layer = attention + 3 * hidden * 4 * hidden
    else:
        experts, width = 16, hidden // 2
        config |= {
            "intermediate_size": 4 * hidden,
            "moe_intermediate_size": width,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        layer = attention + experts * 3 * hidden * width
    layers = max(2, round((mb * 1e6 / 2 - 2 * vocab * hidden) / layer / 2) * 2)
    return config | {"num_hidden_layers": layers}


def make_model(folder: Path, family: str, mb: float) -> None:
    import torch

    from areal_mega.models.hf_io import HFTensorSpec, HFWriter
    from areal_mega.models.registry import family_for

    config = config_of(family, mb)
    plan = [HFTensorSpec(t.name, t.shape, torch.bfloat16) for t in family_for(config).table(config).hf_tensors]
    generator = torch.Generator().manual_seed(0)
    with HFWriter(folder, plan, source={"config.json": json.dumps(config).encode()}) as writer:
        for spec in plan:
            writer.write(spec.name, (0.02 * torch.randn(spec.shape, generator=generator)).bfloat16())


# --- processes


def train_rank(rank: int, world_size: int, folder: str, recipe: Any, store_port: int, out: Any) -> None:
    import torch.distributed as dist

    from areal_mega.algorithms.registry import algorithm_of
    from areal_mega.megatron.engine import MegatronEngine
    from areal_mega.megatron.platform import detect
    from areal_mega.megatron.worker import METHODS, TrainWorker
    from areal_mega.rpc.rank_server import RankServer

    log_to(Path(folder) / f"train-{rank}.log")
    platform = detect("cpu")
    store = dist.TCPStore(HOST, store_port, world_size, is_master=False)
    platform.init_process_group(store=store, rank=rank, world_size=world_size, timeout_s=120)
    engine = MegatronEngine(
        model=recipe.model, train=recipe.train, router=recipe.router, total_steps=1, seed=0, rank=rank,
        model_path=recipe.model.path, platform=platform,
    )  # fmt: skip
    server = RankServer(TOKEN, f"train rank {rank}")
    worker = TrainWorker(engine, recipe, algorithm_of(recipe), server, TOKEN)
    for method in METHODS:
        server.register(method, getattr(worker, method))
    server.register("raw", lambda: raw_send(worker._sending))
    server.register("nudge", lambda: nudge(engine))
    server.register("loop", lambda overlap: set_loop(worker._sending, overlap))
    out.put((rank, server.start(HOST)))
    server.serve_forever()


def nudge(engine: Any) -> None:
    """Change every tensor a little, as a training step does."""
    for tensor in engine.named_shards().values():
        tensor.detach().mul_(1.01)


def set_loop(sending: Any, overlap: bool) -> None:
    sending._loop = sending._overlapped if overlap else sending._plain


def raw_send(sender: Any) -> float:
    """Broadcast buffers of the buckets' sizes; seconds, 0 on ranks that send nothing."""
    import torch.distributed as dist

    if sender.group is None:
        return 0.0
    from areal_mega.sync.plan import plan_buckets

    filling = sender._filling
    plan = plan_buckets(sender.specs, filling._bucket_bytes)
    # The sender's own two buckets in turn: memory that it has had for long, and the same on both sides of the comparison.
    assert all(len(buffer) >= bucket.nbytes for buffer in filling.buffers for bucket in plan)
    start = time.perf_counter()
    for number, bucket in enumerate(plan):
        dist.broadcast(filling.buffers[number % 2][: bucket.nbytes], src=0, group=sender.group)
    return time.perf_counter() - start


def inference_server(number: int, folder: str, model: str, out: Any) -> None:
    """The embedded server, with one route more: receive and throw away."""
    import torch
    from aiohttp import web

    from areal_mega.serving import admin, app

    log_to(Path(folder) / f"server-{number}.log")
    routes = admin.Admin.routes
    kept = torch.zeros(0, dtype=torch.uint8)

    async def raw(self: Any, request: web.Request) -> web.Response:
        nonlocal kept
        body = await request.json()
        largest = max(size for _, size in body["buckets"])
        if len(kept) < largest:
            kept = torch.ones(largest, dtype=torch.uint8)  # written once: fresh memory would cost as much as receiving

        def receive() -> None:
            for group, size in body["buckets"]:
                self._updater._broadcast(kept[:size], group)

        await asyncio.to_thread(receive)
        return web.json_response({"success": True})

    def with_raw(self: Any) -> list[web.RouteDef]:
        return [*routes(self), web.post("/raw", lambda request: raw(self, request))]

    admin.Admin.routes = with_raw  # type: ignore[method-assign]
    port = free_port()
    out.put((number, f"http://{HOST}:{port}"))
    sys.exit(app.serve([model, "--port", str(port), "--skip-tokenizer-init", "--dist-timeout", "120", "--max-total-tokens", "2048"]))


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def log_to(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


class Processes:
    """Forked after the imports, so that they start at once; killed by id at the end."""

    def __init__(self, folder: str) -> None:
        self._folder, self._context = folder, multiprocessing.get_context("fork")
        self._started: list[Any] = []

    def start(self, target: Any, count: int, *args: Any) -> list[str]:
        """Addresses by rank."""
        queue = self._context.SimpleQueue()
        for rank in range(count):
            process = self._context.Process(target=target, args=(rank, *args, queue), daemon=True)
            process.start()
            self._started.append(process)
        found = dict(queue.get() for _ in range(count))
        return [found[rank] for rank in range(count)]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._started:
            process.kill()
            process.join()
        if exc[0] is not None:
            for log in sorted(Path(self._folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)


# --- the measurement


async def measure(args: argparse.Namespace, layout: str, folder: str) -> None:
    from areal_mega import load_recipe
    from areal_mega.algorithms.registry import algorithm_of
    from areal_mega.controller.sync import WeightSync
    from areal_mega.controller.train import TrainController
    from areal_mega.parallel.layout import RankLayout
    from areal_mega.parallel.strategy import parse
    from areal_mega.rollout.client import InferenceClient
    from areal_mega.rpc.client import RpcClient

    family, strategy = LAYOUTS[layout]
    model = Path(folder) / "model"
    make_model(model, family, args.mb)
    recipe = load_recipe(
        ROOT / "recipes" / "quickstart.yaml",
        [
            f"model.path={model}", "model.weights=pretrained", "model.dtype=bf16", "rollout.dtype=bf16", f"train.strategy={strategy}",
            f"rollout.strategy=embedded:d{args.servers}", f"sync.bucket_mb={args.bucket_mb}", "sync.timeout_s=120",
        ],
    )  # fmt: skip
    ranks = RankLayout(parse(strategy))
    import torch.distributed as dist

    store = dist.TCPStore(HOST, 0, ranks.world_size, is_master=True, wait_for_workers=False)
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(Processes(folder))
        urls = processes.start(inference_server, args.servers, folder, str(model))
        addresses = processes.start(train_rank, ranks.world_size, ranks.world_size, folder, recipe, store.port)
        servers = [InferenceClient(url, timeout_s=120, retries=0) for url in urls]
        clients = [RpcClient(address, TOKEN, peer=f"train rank {rank}") for rank, address in enumerate(addresses)]
        for client in (*servers, *clients):
            stack.push_async_callback(client.close)
        for server in servers:
            await server.wait_healthy(120)
        train = TrainController(clients, ranks, recipe, algorithm_of(recipe))
        able = {rank: await server.probe() for rank, server in enumerate(servers)}
        sync = WeightSync(
            train, dict(enumerate(servers)), able, recipe, replica_size=1, backend="gloo", folder=Path(folder) / "weights"
        )  # fmt: skip
        await sync.connect()
        await rounds(args, layout, strategy, sync, train, servers)


MODES = {"overlapped": (True, True), "plain": (False, True), "no digests": (True, False)}


async def rounds(args: argparse.Namespace, layout: str, strategy: str, sync: Any, train: Any, servers: Sequence[Any]) -> None:
    from areal_mega.core.metrics import results
    from areal_mega.sync.filling import AHEAD

    measured: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    raws: list[float] = []
    able, version = sync._capabilities, 0
    for turn in range(args.rounds + 1):
        for name, (overlap, digests) in MODES.items():
            await train.call("nudge")
            await train.call("loop", overlap=overlap)
            # A server without digests is asked for its version alone, and senders compute none.
            without = {rank: replace(each, hf_digests=None, partial_updates=False) for rank, each in able.items()}
            sync._capabilities = able if digests else without
            one = dict(results(await sync.push(version)))
            assert one["sync/saved_bytes"] == 0
            version += 1
            if turn:  # the first round pays for buffers and connections
                measured[name].append(one)
        raw = await raw_round(sync, train, servers)
        raws += [raw] * (turn > 0)
    order = order_of(sync)
    ahead = sum(bucket.nbytes for _, bucket in order[: AHEAD * len(sync._groups)]) / sum(bucket.nbytes for _, bucket in order)
    title = (
        f"{layout}: {strategy}, {len(sync._groups)} sender(s), {len(servers)} server(s), {len(order)} buckets ({ahead:.0%} filled ahead)"
    )
    show(title, measured, raws)


def show(title: str, measured: dict[str, list[dict[str, float]]], raws: list[float]) -> None:
    size, raw = measured["overlapped"][0]["sync/bytes"], statistics.median(raws)

    def median(mode: str, metric: str) -> float:
        return statistics.median(each[metric] for each in measured[mode])

    print(f"{title}, {size / 1e6:.0f} MB, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"  raw broadcast      {size / raw / 1e9:5.2f} GB/s  {raw * 1e3:5.0f} ms")
    for mode in MODES:
        send, paused = median(mode, "sync/send_s"), median(mode, "sync/paused_s")
        print(
            f"  {mode:17}  {size / send / 1e9:5.2f} GB/s  {send * 1e3:5.0f} ms  ratio {raw / send:.2f}"
            f"{'' if raw / send >= GOAL else ' (misses the goal)'}; pause to resume {paused * 1e3:.0f} ms, ratio {raw / paused:.2f}"
        )
    digest, exposed = median("overlapped", "sync/digest_s"), median("overlapped", "sync/send_s") - median("no digests", "sync/send_s")
    print(f"  senders' digests: {digest / raw:.0%} of the raw broadcast, {exposed / raw:.0%} seen in the sync's length")
    names = ("prepare", "pause", "gather", "digest", "transfer", "load", "verify", "resume")
    print("  overlapped: " + ", ".join(f"{name} {median('overlapped', f'sync/{name}_s') * 1e3:.0f}" for name in names) + " ms", flush=True)


def order_of(sync: Any) -> list[tuple[str, Any]]:
    """Every bucket of a whole sync, with its group."""
    from areal_mega.sync.plan import bucket_bytes, plan_buckets, total_order

    names = list(sync._groups.values())
    plans = [plan_buckets(specs, bucket_bytes(sync._section.bucket_mb)) for specs in sync._plans.values()]
    return [(names[sender], bucket) for sender, bucket in total_order(plans)]


async def raw_round(sync: Any, train: Any, servers: Sequence[Any]) -> float:
    buckets = [(group, bucket.nbytes) for group, bucket in order_of(sync)]
    receivers = [server._transport.request("POST", "/raw", {"buckets": buckets}) for server in servers]
    answers = await asyncio.gather(train.call("raw"), *receivers)
    return max(answers[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=300, help="size of the model in bf16")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--bucket-mb", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", nargs="+", choices=sorted(LAYOUTS), default=["dense", "moe"])
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from areal_mega.megatron.platform import detect

    torch.set_num_threads(1)
    with detect("cpu").importing():
        pass
    for layout in args.layout:
        with tempfile.TemporaryDirectory(prefix="sync-") as folder:
            asyncio.run(measure(args, layout, folder))


if __name__ == "__main__":
    main()
