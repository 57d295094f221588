"""How much does everything between a model and a train step cost? Ten thousand groups with a model that takes no time.

One process is a rollout worker (workflow, executor, trajectory store, RPC server); this one is the controller and the train rank's side:
dispatch under a staleness bound, batches, fetch of every array over several connections, release. Prints samples/s, and for every
thousand groups the bytes in the store and the resident memory of both processes.

    python benchmarks/dataplane.py [--groups 10000] [--members 8] [--tokens 200] [--batch 64] [--store-mb 4096]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.schema import Recipe
from areal_mega.controller.rollout import RolloutController
from areal_mega.core.types import Prompt, Trajectory
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.staleness import StalenessControl
from areal_mega.rollout.worker import RolloutWorker
from areal_mega.rollout.workflow import GenerationEngine, Workflow, WorkflowContext
from areal_mega.rpc.client import RpcClient
from areal_mega.rpc.fetch import Fetcher
from areal_mega.rpc.server import RpcServer

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "benchmark"
TIMEOUT_S = 120.0


class NullWorkflow(Workflow):
    """Makes trajectories of the asked size out of nothing, under the version that the run has told it."""

    def __init__(self, context: WorkflowContext, members: int = 8, tokens: int = 200) -> None:
        super().__init__(context)
        self._members = members
        self._ids = np.arange(tokens, dtype=np.int32)
        self._mask = self._ids >= tokens // 4
        self._logprobs = np.where(self._mask, -1.0, 0.0).astype(np.float32)

    async def arun_episode(self, engine: GenerationEngine, data: Prompt) -> list[Trajectory] | None:
        versions = np.where(self._mask, int(data.row["version"]), -1).astype(np.int32)
        return [
            Trajectory(
                input_ids=self._ids.copy(),
                loss_mask=self._mask.copy(),
                logprobs=self._logprobs.copy(),
                versions=versions.copy(),
                reward=float(i % 2),
                finish_reason="stop",
                member=i,
            )
            for i in range(self._members)
        ]


class NoEngine:
    async def generate(self, requests: Any) -> Any:
        raise AssertionError("the null workflow asks no model")


def recipe_of(args: argparse.Namespace) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "dataplane", "steps": args.groups // args.batch},
            "model": {"path": str(ROOT / "recipes/quickstart_model")},
            "workflow": {"path": "dataplane.NullWorkflow", "kwargs": {"members": args.members, "tokens": args.tokens}},
            "reward": {"path": "areal_mega.rewards.arithmetic.arithmetic_reward"},
            "rollout": {"group_size": args.members, "store_mb": args.store_mb},
            "train": {"batch_size": args.batch},
            "staleness": {"max_staleness": 2},
            "algorithm": {"correction": "decoupled"},
        }
    )


async def serve(args: argparse.Namespace) -> None:
    """The rollout worker's process: prints its address, and ends with its standard input."""
    sys.modules.setdefault("dataplane", sys.modules["__main__"])
    server = RpcServer(TOKEN, "rollout rank 0")
    address = await server.start("127.0.0.1")
    worker = RolloutWorker(recipe_of(args), address=address, spill=Path(args.spill))
    try:
        await worker.start()
        worker.use(NoEngine())
        worker.register(server)
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await worker.close()
        await server.stop()


async def drive(args: argparse.Namespace, address: str, worker_pid: int) -> list[dict[str, float]]:
    """The controller's and the train rank's side; what was measured at every thousand groups."""
    recipe = recipe_of(args)
    client, fetcher = RpcClient(address, TOKEN, "rollout rank 0"), Fetcher(TOKEN)
    steps = args.groups // args.batch
    rows = [{"id": f"p{i}", "prompt": "x", "answer": "", "version": 10**6} for i in range(1000)]
    staleness = StalenessControl(args.batch, 2, total=steps * args.batch)
    control = RolloutController({0: client}, PromptStream(rows, seed=1, shuffle=True), staleness, recipe, algorithm_of(recipe))
    listening = asyncio.create_task(control.listen())
    me, worker = psutil.Process(), psutil.Process(worker_pid)
    measured: list[dict[str, float]] = []
    tokens, clock = 0, time.perf_counter()
    await control.generate_always()
    for step in range(steps):
        ready = await control.next_batch(args.batch)
        handles = {(s.id.group_id, s.id.member, n): h for g in ready.groups for s in g.samples for n, h in s.tensors.items()}
        arrays = await fetcher.fetch(handles, timeout_s=TIMEOUT_S)
        tokens += sum(len(array) for (_, _, name), array in arrays.items() if name == "input_ids")
        del arrays
        await control.release(ready.taken)
        await control.set_version(step + 1, step=step + 1)
        done = (step + 1) * args.batch
        if done // 1000 > (done - args.batch) // 1000 or step == steps - 1:
            store = (await client.call("status", timeout_s=TIMEOUT_S))["store"]
            seconds = time.perf_counter() - clock
            measured.append(
                {
                    "groups": done,
                    "samples_per_s": done * args.members / seconds,
                    "mb_per_s": 13 * tokens / seconds / 1e6,
                    "store_mb": store["nbytes"] / 2**20,
                    "spilled_mb": store["spilled"] / 2**20,
                    "rss_mb": me.memory_info().rss / 2**20,
                    "worker_rss_mb": worker.memory_info().rss / 2**20,
                }
            )
            print("  ".join(f"{name} {value:,.1f}" for name, value in measured[-1].items()), flush=True)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    left = (await client.call("status", timeout_s=TIMEOUT_S))["store"]
    assert left["arrays"] == 0 and left["nbytes"] == 0, f"left in the store: {left}"
    await fetcher.close()
    await client.close()
    return measured


async def run(args: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="dataplane-") as folder:
        flags = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("groups", "members", "tokens", "batch", "store-mb")]
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, *flags, f"--spill={folder}/spill", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                address = (await child.stdout.readline()).decode().strip()
            assert address, "the rollout worker did not start"
            return await drive(args, address, child.pid)
        finally:
            child.stdin.close()
            await child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of a sample, prompt included")
    parser.add_argument("--batch", type=int, default=64, help="groups per step")
    parser.add_argument("--store-mb", type=float, default=4096.0, help="memory of the store; 0.1 sends almost everything through files")
    parser.add_argument("--spill", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.spill:
        asyncio.run(serve(args))
        return
    measured = asyncio.run(run(args))
    last, later = measured[-1], [m for m in measured if m["groups"] >= args.groups / 5]
    print(f"{last['samples_per_s']:,.0f} samples/s, {last['mb_per_s']:.0f} MB/s of arrays")
    for name, who in (("rss_mb", "controller"), ("worker_rss_mb", "rollout worker")):
        values = [m[name] for m in later]
        over = f"over the last {args.groups * 4 // 5} groups"
        print(f"resident memory of the {who} {over}: {values[0]:.0f} MiB at first, {values[-1]:.0f} at last")


if __name__ == "__main__":
    main()
