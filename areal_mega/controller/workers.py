"""A rollout worker as the controller sees it: its calls end with it, once the run has given it up as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

from areal_mega.rpc.client import PeerUnreachable, RpcClient

_STATUS_S = 5.0
NEWS_S = 60.0
"""Within this the death of a process is known that a failed call is the first sign of, on whatever machine it was."""

Wait = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


async def simply(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` alone."""
    await work


class WorkerGone(Exception):
    """The worker was lost, before the call or during it. What it held is dealt with by whoever lost it."""


class Worker:
    """One rollout worker.

    Args:
        rank: of its replica.
        client: calls it. Its address is the worker's name: one that is started again has another.
    """

    def __init__(self, rank: int, client: RpcClient) -> None:
        self.rank, self.name, self.peer = rank, client.address, client.peer
        self.submitting = asyncio.Lock()
        """Prompts are given to a worker and taken back from it one after the other."""
        self._client = client
        self._lost = False
        self._gone: asyncio.Future[None] | None = None
        """Done when it is lost; every call waits for it too, so it is one for all of them."""

    def lose(self) -> None:
        """It is lost: every call ends now."""
        self._lost = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        """As `RpcClient.call`.

        Raises:
            WorkerGone: see there.
        """
        if self._lost:
            raise WorkerGone(self.peer)
        gone = self._gone = self._gone or asyncio.get_running_loop().create_future()
        call = asyncio.ensure_future(self._client.call(method, timeout_s=timeout_s, **kwargs))
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if call.done() and isinstance(call.exception(), PeerUnreachable):
                # It may be dead, which is not known yet.
                await asyncio.wait({gone}, timeout=NEWS_S)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
        if self._lost:
            raise WorkerGone(self.peer)
        return call.result()


async def follow(
    workers: Callable[[], Iterable[Worker]], came: asyncio.Event, listen: Callable[[Worker], Coroutine[Any, Any, None]]
) -> None:
    """Run ``listen`` for every worker that is there or comes, for ever; one that fails ends all.

    Args:
        came: set when ``workers`` has another one.
        listen: returns when its worker is lost.
    """
    listeners: dict[Worker, asyncio.Task[None]] = {}
    try:
        while True:
            came.clear()
            for worker in workers():
                if worker not in listeners:
                    listeners[worker] = asyncio.create_task(listen(worker))
            another = asyncio.create_task(came.wait())
            try:
                await asyncio.wait({another, *listeners.values()}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                another.cancel()
            for worker, listener in list(listeners.items()):
                if listener.done():
                    del listeners[worker]
                    await listener
    finally:
        for listener in listeners.values():
            listener.cancel()
        await asyncio.gather(*listeners.values(), return_exceptions=True)


async def what_runs(workers: Sequence[Worker], serving: Collection[str]) -> list[str]:
    """A line on each worker: its longest-running episodes, or why there are none. ``serving``: names of those that have a server."""
    calls = [asyncio.wait_for(worker.call("status", timeout_s=_STATUS_S), _STATUS_S) for worker in workers]
    lines = []
    for worker, answer in zip(workers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, BaseException):
            lines.append(f"{worker.peer} does not answer")
        elif worker.name not in serving:
            lines.append(f"{worker.peer} has no inference server")
        else:
            oldest = [f"prompt {prompt} for {seconds:.0f} s" for prompt, seconds in answer["oldest"]]
            lines.append(f"{worker.peer} runs {', '.join(oldest) or 'nothing'}")
    return lines
