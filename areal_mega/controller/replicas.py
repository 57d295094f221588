"""One inference replica: its server and its rollout worker, where they are, and the clients of both. It can be built again elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from areal_mega.config.schema import Recipe
from areal_mega.launch.commands import server_spec, worker_spec
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.machines import Launcher, Machines
from areal_mega.launch.rundir import Key, RunDir
from areal_mega.parallel.strategy import parse
from areal_mega.rollout.engines import client_for
from areal_mega.rollout.inference import Capabilities, InferenceServer
from areal_mega.rpc.client import RpcClient
from areal_mega.rpc.wire import format_address
from areal_mega.sync import GRACE_S

Part = Literal["server", "rollout"]


class Replica:
    """The two processes of one replica, on one machine. They are started together at first, and each alone where it alone has died.

    Args:
        recipe: the run's, with the device decided.
        launcher: of the attempt.
    """

    def __init__(self, rank: int, recipe: Recipe, machines: Machines, launcher: Launcher, run_dir: RunDir) -> None:
        assert recipe.launch.device != "auto", "the device is decided before anything is placed"
        self.rank = rank
        self.server_key: Key = ("server", rank)
        self.worker_key: Key = ("rollout", rank)
        self._recipe, self._device, self._strategy = recipe, recipe.launch.device, parse(recipe.rollout.strategy)
        self._machines, self._launcher, self._run_dir = machines, launcher, run_dir
        self._url = ""
        self._specs: dict[Part, ProcessSpec] = {}
        self._server: InferenceServer | None = None
        self._worker: RpcClient | None = None
        self._capabilities: Capabilities | None = None
        self._started: set[Part] = set()
        self._met: dict[str, Any] | None = None
        """What the worker announced that has met its server."""

    @property
    def server(self) -> InferenceServer:
        """The server's client: of weights and health checks, and no generation, so that a sync's own deadline comes first."""
        assert self._server is not None, f"replica {self.rank} has no place yet"
        return self._server

    @property
    def worker(self) -> RpcClient:
        assert self._worker is not None, f"the worker of replica {self.rank} is not met yet"
        return self._worker

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, f"the server of replica {self.rank} is not met yet"
        return self._capabilities

    @property
    def started(self) -> bool:
        """Something of it was started, and has not ended."""
        return bool(self._started)

    def lost(self, part: Part) -> None:
        """A process has ended: ``start`` starts it again."""
        self._started.discard(part)

    async def place(self, port: int) -> None:
        """Find out where its machine is now; the server will listen on ``port`` there."""
        recipe, machines = self._recipe, self._machines
        host = machines.host(self.server_key)
        self._url = f"http://{format_address(host, port)}"
        server = server_spec(
            self.rank,
            recipe=recipe,
            strategy=self._strategy,
            model_path=self._run_dir.model_path(recipe),
            host=host,
            port=port,
            device=self._device,
            env={"CUDA_VISIBLE_DEVICES": machines.devices(self.server_key)},
        )
        worker = worker_spec("rollout", self.rank, run_dir=self._run_dir, recipe=recipe, device=self._device)
        self._specs = {"server": server, "rollout": worker}
        before, self._capabilities = self._server, None
        self._server = client_for(self._strategy.engine, self._url, timeout_s=recipe.sync.timeout_s + GRACE_S, retries=0)
        if before is not None:
            await before.close()

    def begin(self) -> list[ProcessSpec]:
        """The processes that do not run, for the caller to start at once; they count as started from now on."""
        specs = [spec for part, spec in self._specs.items() if part not in self._started]
        if "rollout" not in self._started:
            self._run_dir.forget(*self.worker_key)
        self._started = set(self._specs)
        return specs

    async def start(self) -> None:
        """Start what does not run. Where nothing of it runs its machine may be another one now: it gets a new place."""
        if not self._started:
            ports = await self._machines.ports([self.server_key])
            await self.place(ports[self.server_key])
        launching = asyncio.ensure_future(self._launcher.launch(self.begin()))
        try:
            await asyncio.shield(launching)
        except asyncio.CancelledError:
            # One part has died while the other was being started, which goes on to its end: it is started once.
            await asyncio.wait({launching})
            raise

    async def meet_server(self, deadline_s: float) -> None:
        """Wait until the server is healthy, and know what it can do.

        Raises:
            DeadlineExceeded: it is not healthy in time.
        """
        await self.server.wait_healthy(deadline_s)
        if self._capabilities is None:
            self._capabilities = await self.server.probe()

    async def meet_worker(self, deadline_s: float) -> None:
        """Wait until the worker is ready and has met its server; nothing where it is the one that was met before.

        Raises:
            DeadlineExceeded: it, or the server, is not ready in time.
        """
        found = await self._launcher.wait_ready([self.worker_key])
        address = found[self.worker_key]["address"]
        if self._met == found[self.worker_key]:
            return
        before, self._worker = self._worker, RpcClient(address, self._run_dir.token, peer=f"rollout rank {self.rank}")
        if before is not None:
            await before.close()
        await self._worker.call("connect", base_url=self._url, deadline_s=deadline_s, timeout_s=deadline_s)
        self._met = found[self.worker_key]

    async def close(self) -> None:
        """Close the clients; processes are the launcher's."""
        for client in (self._server, self._worker):
            if client is not None:
                await client.close()
