"""The processes of one run on this machine: placed, started, connected, watched, and ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.schema import Recipe
from areal_mega.controller.calls import gather_all
from areal_mega.controller.capabilities import check_context, describe, warnings
from areal_mega.controller.keeper import ReplicaKeeper
from areal_mega.controller.recover import RecoverPoint
from areal_mega.controller.replicas import Replica
from areal_mega.controller.rollout import RolloutController
from areal_mega.controller.run import Run
from areal_mega.controller.sync import WeightSync
from areal_mega.controller.train import TrainController
from areal_mega.core.errors import UserError
from areal_mega.core.types import Prompt
from areal_mega.data.stream import PromptStream
from areal_mega.launch.commands import worker_spec
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.machines import Launcher, Machines, ThisMachine
from areal_mega.launch.rundir import Key, RunDir
from areal_mega.models.hf_config import load_hf_config
from areal_mega.models.ownership import Ownership
from areal_mega.models.registry import family_for
from areal_mega.observe.observer import Observer
from areal_mega.parallel.balance import CostModel
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import ParallelStrategy, parse
from areal_mega.rollout.staleness import StalenessControl
from areal_mega.rpc.client import RpcClient

log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]


class Cluster:
    """Every process of a run but this one. ``recipe`` is the run's, with the device decided.

    Args:
        machines: where they live; none: on this machine.

    Raises:
        UserError: model, strategies and machine do not fit together.
    """

    def __init__(self, recipe: Recipe, machines: Machines | None = None) -> None:
        self._device = find_device(recipe.launch.device)
        # Decided once, here: a train rank that found another device would wait for a communicator of another kind.
        decided = recipe.launch.model_copy(update={"device": self._device})
        self._recipe: Recipe = recipe.model_copy(update={"launch": decided})
        self._algorithm = algorithm_of(recipe)
        self._hf_config = load_hf_config(recipe.model.path)
        if recipe.model.reference_path is not None:
            load_hf_config(recipe.model.reference_path)
        self._train, self._rollout = parse(recipe.train.strategy), parse(recipe.rollout.strategy)
        check_layout(self._hf_config, self._train)
        self.machines: Machines = machines if machines is not None else ThisMachine(recipe, self._device)
        self._launcher: Launcher | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @asynccontextmanager
    async def running(
        self, run_dir: RunDir, stream: PromptStream, valid: Sequence[Prompt], observer: Observer, resumed: RecoverPoint | None = None
    ) -> AsyncIterator[Run]:
        """Start everything, connect it, and end it at the exit. The run goes on from ``resumed``, where there is one."""
        async with AsyncExitStack() as stack:
            if self._recipe.model.weights == "random":
                await asyncio.to_thread(_make_model, self._recipe, run_dir)
            self._launcher = launcher = await self.machines.launcher(run_dir, observer.note)
            clock = time.perf_counter()
            stack.push_async_callback(launcher.close)
            replicas = [Replica(rank, self._recipe, self.machines, launcher, run_dir) for rank in range(self._rollout.dp)]
            for replica in replicas:
                stack.push_async_callback(replica.close)
            specs = await self._specs(run_dir, replicas)
            await launcher.launch(specs)
            run = await launcher.supervise(self._connect(stack, run_dir, replicas, stream, valid, observer, resumed))
            observer.note(f"{len(specs)} processes ready after {time.perf_counter() - clock:.0f} s; logs: {run_dir.path / 'logs'}")
            last_words = _save_before(launcher.leaving, run, observer.note)
            self._listener = asyncio.create_task(_for_ever(run.rollout.listen(), run.replicas.watch(), last_words))
            stack.push_async_callback(_end, self._listener)
            stack.push_async_callback(run.recovery.close)
            yield run

    async def supervise[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; the death of any process, or the end of rollout collection, ends it."""
        assert self._launcher is not None
        return await self._launcher.supervise(self._beside_listener(work))

    async def _beside_listener[T](self, work: Coroutine[Any, Any, T]) -> T:
        assert self._listener is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._listener}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._listener  # it never returns: this raises why
            return await task
        finally:
            await _end(task)

    async def _specs(self, run_dir: RunDir, replicas: Sequence[Replica]) -> list[ProcessSpec]:
        """Every process to start now: those of all train ranks, and of the replicas whose machines are there."""
        recipe, device, machines = self._recipe, self._device, self.machines
        specs = []
        for key in self._train_keys:
            env = {"CUDA_VISIBLE_DEVICES": machines.devices(key)}
            specs.append(worker_spec("train", key[1], run_dir=run_dir, recipe=recipe, device=device, env=env))
        here = [replica for replica in replicas if machines.is_here(replica.server_key)]
        ports = await machines.ports([replica.server_key for replica in here])
        for replica in here:
            await replica.place(ports[replica.server_key])
            specs += replica.begin()
        return specs

    @property
    def _train_keys(self) -> list[Key]:
        return [("train", rank) for rank in range(self._train.world_size)]

    async def _meet(self, stack: AsyncExitStack, run_dir: RunDir, replicas: Sequence[Replica]) -> list[RpcClient]:
        """Wait until everybody is there, introduce rollout workers to their servers, and return clients of the train ranks."""
        deadline_s = self._recipe.launch.startup_timeout_s
        assert self._launcher is not None
        # Servers first: a rollout worker connects to a healthy one.
        waits: list[Coroutine[Any, Any, Any]] = [replica.meet_server(deadline_s) for replica in replicas]
        ready = self._launcher.wait_ready([*self._train_keys, *(replica.worker_key for replica in replicas)])
        found, *_ = await gather_all([ready, *waits])
        clients = [RpcClient(found[key]["address"], run_dir.token, peer=f"{key[0]} rank {key[1]}") for key in self._train_keys]
        for client in clients:
            stack.push_async_callback(client.close)
        await gather_all(replica.meet_worker(deadline_s) for replica in replicas)
        return clients

    async def _connect(
        self,
        stack: AsyncExitStack,
        run_dir: RunDir,
        replicas: Sequence[Replica],
        stream: PromptStream,
        valid: Sequence[Prompt],
        observer: Observer,
        resumed: RecoverPoint | None,
    ) -> Run:
        recipe = self._recipe
        assert self._launcher is not None
        there = [replica for replica in replicas if replica.started]
        ranks = await self._meet(stack, run_dir, there)
        capabilities = [replica.capabilities for replica in there]
        check_context(capabilities, recipe)
        for line in (describe(capabilities, recipe), *warnings(capabilities)):
            observer.note(line)
        train = TrainController(ranks, RankLayout(self._train), recipe, self._algorithm)
        staleness = StalenessControl(
            recipe.train.batch_size,
            recipe.staleness.max_staleness,
            every=recipe.sync.every_steps,
            total=recipe.train.batch_size * recipe.run.steps,
        )
        rollout = RolloutController({replica.rank: replica.worker for replica in there}, stream, staleness, recipe, self._algorithm)
        sync = WeightSync(
            train,
            {replica.rank: replica.server for replica in there},
            {replica.rank: replica.capabilities for replica in there},
            recipe,
            replica_size=self._rollout.replica_size,
            backend="nccl" if self._device == "cuda" else "gloo",
            folder=run_dir.path / "weights",
        )
        keeper = ReplicaKeeper(
            self._launcher,
            replicas,
            rollout,
            sync,
            restarts=recipe.launch.server_restarts,
            deadline_s=recipe.launch.startup_timeout_s,
            health_s=recipe.launch.server_health_timeout_s,
            queue_s=recipe.launch.slurm.queue_timeout_s,
            say=observer.note,
            show=run_dir.show_replicas,
        )
        return Run(
            recipe,
            self._algorithm,
            train=train,
            rollout=rollout,
            sync=sync,
            replicas=keeper,
            observer=observer,
            valid=valid,
            cost=cost_model(self._hf_config),
            run_dir=run_dir.path,
            resumed=resumed,
        )


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """``auto``: cuda where NVIDIA's driver shows a GPU. Looks at the driver's folder, since importing torch takes seconds."""
    if wanted != "auto":
        return wanted
    gpus = Path("/proc/driver/nvidia/gpus")
    return "cuda" if gpus.is_dir() and any(gpus.iterdir()) else "cpu"


def check_layout(hf_config: dict[str, Any], strategy: ParallelStrategy) -> None:
    """Refuse a strategy that does not divide the model, before any process starts.

    Raises:
        UserError: an unknown model type, or layers, experts, heads or rows that do not divide.
    """
    family = family_for(hf_config)
    try:
        ownership = Ownership(family.table(hf_config), RankLayout(strategy))
        for param in ownership.params:
            param.pieces(ownership.parts(param), 0)
    except UserError as error:
        raise UserError(f"train.strategy {strategy}: {error}") from None


def cost_model(hf_config: dict[str, Any]) -> CostModel:
    """Relative cost of attention from the architecture: see ``CostModel``; per layer, embeddings left out."""
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    attention = heads * (hf_config.get("head_dim") or hidden // heads)
    kv = attention * (hf_config.get("num_key_value_heads") or heads) // heads
    experts = hf_config.get("num_experts_per_tok")
    each = hf_config.get("moe_intermediate_size") or hf_config["intermediate_size"]
    width = each * experts if experts else hf_config["intermediate_size"]
    active = hidden * (2 * attention + 2 * kv) + 3 * hidden * width
    return CostModel(attention=attention / active)


def _make_model(recipe: Recipe, run_dir: RunDir) -> None:
    if Path(run_dir.model_path(recipe)).exists():  # an earlier attempt made it
        return
    from areal_mega.models.random_init import make_random_model

    make_random_model(recipe.model.path, run_dir.model_path(recipe), recipe.run.seed)


async def _save_before(leaving: asyncio.Event, run: Run, say: Callable[[str], None]) -> None:
    """Have the run save and end when a machine that it cannot do without is about to go."""
    await leaving.wait()
    say("a task with train ranks was told to end: saving before it does, if a step ends in time")
    run.stop_asked = True
    await asyncio.Future()


async def _for_ever(*works: Coroutine[Any, Any, None]) -> None:
    await gather_all(works)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
