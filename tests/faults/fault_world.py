"""A run without a trainer: two embedded servers as processes, one of them behind a proxy, and everything of the controller that meets them.

Real are the servers, the launcher, rollout workers with their clients, dispatch, the keeper of servers, and the weight sync over a folder.
The train rank is a folder of weights.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_proxy import FaultProxy

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.schema import Recipe
from areal_mega.controller.calls import gather_all
from areal_mega.controller.keeper import ReplicaKeeper
from areal_mega.controller.rollout import ReadyBatch, RolloutController
from areal_mega.controller.sync import WeightSync
from areal_mega.controller.train import TrainController
from areal_mega.data.stream import PromptStream
from areal_mega.launch.commands import server_spec
from areal_mega.launch.local import LocalLauncher, ProcessSpec
from areal_mega.launch.machines import free_ports
from areal_mega.launch.rundir import RunDir
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse
from areal_mega.rollout.client import InferenceClient
from areal_mega.rollout.inference import Capabilities
from areal_mega.rollout.staleness import StalenessControl
from areal_mega.rollout.worker import RolloutWorker
from areal_mega.serving.weights import DIGESTS
from areal_mega.sync.digest import tensor_digests

BATCH, GROUP, TOKENS = 4, 2, 100
START_S, SYNC_S = 120.0, 4.0
KEYS = [("server", 0), ("server", 1)]


def recipe(model: Path, root: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "faults", "steps": 10, "root": str(root)},
            "model": {"path": str(model), "dtype": "fp32"},
            "reward": {"path": "areal_mega.rewards.arithmetic.arithmetic_reward", "timeout_s": 60.0},
            "rollout": {
                "strategy": "embedded:d2",
                "group_size": GROUP,
                "max_new_tokens": TOKENS,
                "dtype": "fp32",
                "request_timeout_s": 60.0,
                "request_retries": 1,
            },
            "train": {"batch_size": BATCH},
            "algorithm": {"correction": "decoupled"},
            "sync": {"transport": "disk", "timeout_s": SYNC_S},
            "launch": {"device": "cpu", "rpc_timeout_s": 60.0},
        }
    )


class Direct:
    """A worker that is called as over the wire, by whoever is in its process."""

    def __init__(self, target: Any, address: str, peer: str) -> None:
        self._target, self.address, self.peer = target, address, peer

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        async with asyncio.timeout(timeout_s):
            return await getattr(self._target, method)(**kwargs)


class FolderOfWeights:
    """A train rank whose weights are those of a folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self._folder, self._digests = folder, tensor_digests(load_file(folder / "model.safetensors"), DIGESTS)

    async def sync_plan(self, several: bool) -> list[dict[str, Any]]:
        return []

    async def health(self) -> None:
        pass

    async def sync_write(self, version: int, folder: str, digests: Any) -> dict[str, Any]:
        await asyncio.to_thread(shutil.copytree, self._folder, folder)
        times = {"gather_s": 0.0, "digest_s": 0.0, "transfer_s": 0.0}
        return {"version": version, "digests": self._digests, "nbytes": 1, "saved_bytes": 0, **times}


class Replica:
    """A server in its process, and a worker in this one, which does not die: a replica as its keeper sees it."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self._world = rank, world
        self.server_key, self.worker_key = ("server", rank), ("rollout", rank)
        self.server, self.capabilities, self.started = world.servers[rank], world._able[rank], True

    def lost(self, part: str) -> None:
        assert part == "server"

    async def start(self) -> None:
        await self._world.launcher.launch([self._world.specs[self.rank]])

    async def meet_server(self, deadline_s: float) -> None:
        await self.server.wait_healthy(deadline_s)


@dataclass
class Run:
    """The controller's objects of one run."""

    rollout: RolloutController
    keeper: ReplicaKeeper
    sync: WeightSync
    launcher: LocalLauncher
    version: int
    said: list[str]
    trained: list[str] = field(default_factory=list)
    """Ids of the prompts of all batches."""

    @property
    def counts(self) -> Counter[str]:
        return self.rollout.counts

    async def push(self) -> None:
        """As a run does it between two steps."""
        while True:
            await self.keeper.settled()
            with self.keeper.steady():
                new = self.keeper.admit()
                if self.sync.members:
                    await self.sync.push(self.version)
                    break
            await self.keeper.revived()
        await self.keeper.resume(new, self.version)
        await self.rollout.set_version(self.version, step=0)

    async def batch(self) -> ReadyBatch:
        ready = await self.beside(self.rollout.next_batch(BATCH))
        self.trained += [group.prompt.id for group in ready.groups]
        return ready

    async def beside[T](self, work: Coroutine[Any, Any, T]) -> T:
        """``work`` as a run does it: the death of a server, or the end of the keeper, ends it."""
        return await self.launcher.supervise(self._beside_listener(work))

    async def _beside_listener[T](self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.listener}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self.listener
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def listen(self) -> None:
        async def both() -> None:
            await gather_all([self.rollout.listen(), self.keeper.watch()])

        self.listener = asyncio.create_task(both())


class World:
    """Processes and workers that all cells of the matrix share. Use: ``start``, ``run`` per cell, ``close``."""

    def __init__(self, model: Path, root: Path) -> None:
        self.recipe = recipe(model, root)
        self._model = model
        self.run_dir = RunDir.create(self.recipe)
        self.launcher = LocalLauncher(self.run_dir, startup_timeout_s=START_S, shutdown_timeout_s=5.0)
        self._version = 0

    async def start(self) -> None:
        ports = free_ports("127.0.0.1", 2)
        self.backends = [f"http://127.0.0.1:{port}" for port in ports]
        self.specs: list[ProcessSpec] = [
            server_spec(
                rank,
                recipe=self.recipe,
                strategy=parse("embedded:d2"),
                model_path=str(self._model),
                host="127.0.0.1",
                port=port,
                device="cpu",
            )
            for rank, port in enumerate(ports)
        ]
        await self.launcher.launch(self.specs)
        self.proxy = FaultProxy(self.backends[0], lambda: self.launcher.kill(KEYS[0]))
        await self.proxy.start()
        urls = [self.proxy.url, self.backends[1]]
        # The controller's clients go through the proxy; these two see how the servers are in truth.
        self.servers = [InferenceClient(url, timeout_s=60.0, retries=0) for url in urls]
        self.truth = [InferenceClient(url, timeout_s=60.0, retries=0) for url in self.backends]
        spill = self.run_dir.path / "spill"
        self.workers = [RolloutWorker(self.recipe, address=f"127.0.0.1:{rank + 1}", spill=spill / str(rank)) for rank in range(2)]
        await asyncio.gather(*(worker.start() for worker in self.workers))
        await asyncio.gather(*(worker.connect(url, START_S) for worker, url in zip(self.workers, urls, strict=True)))
        self.clients: Any = [Direct(worker, f"127.0.0.1:{rank + 1}", f"rollout rank {rank}") for rank, worker in enumerate(self.workers)]
        trainer: Any = Direct(FolderOfWeights(self._model), "127.0.0.1:9", "train rank 0")
        self._algorithm = algorithm_of(self.recipe)
        self._train = TrainController([trainer], RankLayout(parse("megatron:d1")), self.recipe, self._algorithm)
        self._able: dict[int, Capabilities] = {rank: await server.probe() for rank, server in enumerate(self.servers)}

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        for client in (*self.servers, *self.truth):
            await client.close()
        await self.proxy.close()
        await self.launcher.close()
        self.run_dir.close()

    @asynccontextmanager
    async def run(self, *, health_s: float = 60.0, restarts: int = 1) -> AsyncIterator[Run]:
        """A run of its own, with both servers well; whatever became of it, they are well again afterwards."""
        await self._repair()
        self._version += 1
        rows = [{"id": f"v{self._version}-{i}", "prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(100)]
        rollout = RolloutController(
            dict(enumerate(self.clients)),
            PromptStream(rows, seed=1, shuffle=False),
            StalenessControl(BATCH, 1),
            self.recipe,
            self._algorithm,
        )
        folder = self.run_dir.path / "weights"
        sync = WeightSync(
            self._train, dict(enumerate(self.servers)), self._able, self.recipe, replica_size=1, backend="gloo", folder=folder
        )
        said: list[str] = []
        replicas: Any = [Replica(self, rank) for rank in range(2)]
        keeper = ReplicaKeeper(
            self.launcher,
            replicas,
            rollout,
            sync,
            restarts=restarts,
            deadline_s=START_S,
            health_s=health_s,
            queue_s=60.0,
            say=said.append,
            show=lambda states: None,
        )
        run = Run(rollout, keeper, sync, self.launcher, self._version, said)
        run.listen()
        try:
            await sync.connect()
            await run.push()
            yield run
        finally:
            self.proxy.clear()
            run.listener.cancel()
            await asyncio.gather(run.listener, return_exceptions=True)
            for worker in self.workers:
                await worker.cancel(range(1000))
            self._version = run.version

    async def _repair(self) -> None:
        self.launcher.survive(KEYS)
        self.launcher.losses()
        dead = [rank for rank in range(2) if self.launcher.exit_code("server", rank) is not None]
        await self.launcher.launch([self.specs[rank] for rank in dead])
        for rank, server in enumerate(self.truth):
            await server.wait_healthy(START_S)
            await server.resume()
            await self.workers[rank].resume(START_S)
