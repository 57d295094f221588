"""The controller's sync with a real sender and a real embedded server: what becomes of a run when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from served import served
from tiny_models import tiny_model

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.schema import Recipe
from areal_mega.controller.sync import SyncMismatch, WeightSync
from areal_mega.controller.train import TrainController
from areal_mega.core.errors import RunFailed
from areal_mega.core.metrics import results
from areal_mega.models.gather import HFGatherer
from areal_mega.models.registry import family_for
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse
from areal_mega.rollout.client import InferenceClient
from areal_mega.sync.sender import WeightSender

TIMEOUT_S = 60.0
LAYOUT = RankLayout(parse("megatron:d1"))


class Rank:
    """A train rank in this process: everything of it that a sync needs."""

    peer, address = "train rank 0", "127.0.0.1:80"

    def __init__(self, folder: Path) -> None:
        from sender_cases import shards

        hf = json.loads((folder / "config.json").read_text())
        self.named = shards(0, LAYOUT, family_for(hf), hf, str(folder))
        self.before: dict[int, Any] = {}
        """What to do when so many buckets have been filled."""
        self.wrong: dict[str, str] = {}
        gatherer = HFGatherer(self.named, family_for(hf), hf, LAYOUT, 0)
        lay, numbers = gatherer.lay, count()

        def disturbed(*args: Any) -> Iterator[Any]:
            yield from lay(*args)
            self.before.get(next(numbers), lambda: None)()

        gatherer.lay = disturbed  # type: ignore[assignment, method-assign]
        self.sender = WeightSender(gatherer, dtype="bfloat16", bucket_bytes=20_000, device=torch.device("cpu"))

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self, method), **kwargs)

    def health(self) -> None:
        return None

    def sync_plan(self, several: bool) -> Any:
        return [asdict(spec) for spec in self.sender.specs]

    def sync_leave(self) -> None:
        self.sender.leave()

    def sync_host(self, rank: int, address: str) -> int:
        return self.sender.host(address, TIMEOUT_S)

    def sync_join(self, rank: int, **how: Any) -> None:
        self.sender.join(**how, backend="gloo", timeout_s=TIMEOUT_S)

    def sync_changed(self, version: int, base: int | None) -> Any:
        return self.sender.changed(version, base)

    def sync_fill(self, version: int, only: Any, digests: Any) -> None:
        self.sender.fill(version, only, digests=digests)

    def sync_broadcast(self, version: int, only: Any, digests: Any) -> Any:
        report = self.sender.broadcast(version, TIMEOUT_S, only, digests=digests)
        assert report is not None
        return asdict(report) | {"digests": report.digests | self.wrong}


@asynccontextmanager
async def syncing(folder: Path, url: str) -> AsyncIterator[tuple[Rank, WeightSync, InferenceClient]]:
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": str(folder)},
            "staleness": {"max_staleness": 0},
            "sync": {"bucket_mb": 20_000 / 1024**2, "timeout_s": TIMEOUT_S},
        }
    )
    rank, server = Rank(folder), InferenceClient(url, timeout_s=TIMEOUT_S + 15, retries=0)
    try:
        await server.wait_healthy(TIMEOUT_S)
        train = TrainController([rank], LAYOUT, recipe, algorithm_of(recipe))  # type: ignore[list-item]
        sync = WeightSync(train, {0: server}, {0: await server.probe()}, recipe, replica_size=1, backend="gloo", folder=folder / "sync")
        await sync.connect()
        yield rank, sync, server
    finally:
        rank.sender.leave()
        await server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), "qwen3_moe")


async def test_only_what_changed_travels_and_a_wrong_tensor_is_named(model: Path) -> None:
    with served(model, "--dtype", "bfloat16", "--skip-tokenizer-init") as url:
        async with syncing(model, url) as (rank, sync, server):
            first = results(await sync.push(0))
            assert first["sync/saved_bytes"] == 0
            nothing = results(await sync.push(1))
            assert nothing["sync/bytes"] + nothing["sync/saved_bytes"] == first["sync/bytes"]
            assert nothing["sync/bytes"] < 0.2 * first["sync/bytes"] and await server.weight_version() == 1
            rank.named["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"].add_(1)
            one = results(await sync.push(2))
            assert one["sync/bytes"] == 64 * 64 * 2
            rank.wrong = {"model.norm.weight": "0" * 16}
            with pytest.raises(SyncMismatch, match=r"server rank 0 holds other weights .* 1 of \d+ tensors differ: model.norm.weight$"):
                await sync.push(3)


async def test_a_server_that_dies_in_the_middle_is_named_at_once(model: Path) -> None:
    with process(model) as (url, pid):
        async with syncing(model, url) as (rank, sync, _):
            rank.before = {3: lambda: os.kill(pid, signal.SIGKILL)}
            start = time.monotonic()
            with pytest.raises(RunFailed, match="weight sync: server rank 0 did not answer a health check after sending weights failed"):
                await sync.push(0)
            assert time.monotonic() - start < TIMEOUT_S


@contextmanager
def process(model: Path) -> Iterator[tuple[str, int]]:
    """A server whose process may be killed; its URL and id."""
    command = [sys.executable, "-m", "areal_mega.serving", str(model), "--port", "0", "--dtype", "bfloat16", "--skip-tokenizer-init"]
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=root) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1], server.pid
        finally:
            server.kill()
