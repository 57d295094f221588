"""A train rank: one process of the training engine."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.core.memory import keep_freed_memory
from areal_mega.launch.worker import WorkerContext
from areal_mega.rpc.rank_server import RankServer

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

STORE = ("trainstore", 0)
"""Under this key rank 0 announces where the train ranks' torch.distributed store listens."""


def main(context: WorkerContext) -> None:
    import torch.distributed as dist

    from areal_mega.megatron.platform import detect
    from areal_mega.parallel.strategy import parse

    recipe = context.recipe
    world_size = parse(recipe.train.strategy).world_size
    server = RankServer(context.token, context.name)
    address = server.start(context.host)

    platform = detect(recipe.launch.device)
    if platform.is_cpu:
        keep_freed_memory()
    with platform.importing():
        from areal_mega.launch.roles.recovering import Recovering
        from areal_mega.megatron.engine import MegatronEngine
        from areal_mega.megatron.worker import METHODS, TrainWorker
    platform.init_process_group(
        store=_store(context, world_size), rank=context.rank, world_size=world_size, timeout_s=recipe.launch.rpc_timeout_s
    )
    engine = MegatronEngine(
        model=recipe.model,
        train=recipe.train,
        router=recipe.router,
        total_steps=recipe.run.steps,
        seed=recipe.run.seed,
        rank=context.rank,
        model_path=context.model_path,
        platform=platform,
    )
    if recipe.model.reference_path is not None:
        engine.set_reference(recipe.model.reference_path)
    worker = TrainWorker(engine, recipe, algorithm_of(recipe), server, context.token)
    for method in METHODS:
        server.register(method, getattr(worker, method))
    Recovering(engine).serve(server)
    context.announce(address, reporter=engine.is_reporter, dp=engine.coords.dp)
    server.serve_forever()
    engine.close()
    dist.destroy_process_group()


def _store(context: WorkerContext, world_size: int) -> Store:
    """The store where train ranks meet. Rank 0 listens on a port that the system chooses, so that no two runs can collide."""
    import torch.distributed as dist

    recipe = context.recipe
    timeout = timedelta(seconds=recipe.launch.startup_timeout_s)
    host = context.host
    if context.rank == 0:
        store = dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        context.run_dir.announce(*STORE, f"{host}:{store.port}")
        return store
    host, _, port = context.wait_for([STORE])[STORE]["address"].rpartition(":")
    return dist.TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)
