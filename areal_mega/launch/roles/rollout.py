"""A rollout worker: runs workflows against one inference replica."""

from __future__ import annotations

import asyncio
import signal

from areal_mega.launch.worker import WorkerContext
from areal_mega.rollout.worker import RolloutWorker
from areal_mega.rpc.server import RpcServer


def main(context: WorkerContext) -> None:
    asyncio.run(_serve(context))


async def _serve(context: WorkerContext) -> None:
    server = RpcServer(context.token, context.name)
    address = await server.start(context.host)
    spill = context.run_dir.path / "spill" / f"rollout-{context.rank}"
    worker = RolloutWorker(context.recipe, address=address, spill=spill)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        await worker.start()
        worker.register(server)
        context.announce(address)
        await stopped.wait()
    finally:
        await worker.close()
        await server.stop()
