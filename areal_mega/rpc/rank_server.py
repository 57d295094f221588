"""Calls to a process whose main thread does the work: HTTP in a background thread, one blocking call at a time on the main one.

Torch and Megatron want one thread, and a train step blocks it for minutes; the background thread answers ``health`` meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from areal_mega.core.errors import DeadlineExceeded
from areal_mega.rpc.server import AsyncHandler, RpcServer


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    answer: concurrent.futures.Future[Any]


class RankServer:
    """Serves blocking functions on the thread that calls ``serve_forever``, in the order in which the calls arrived.

    ``health`` is answered at once: ``{"name", "pid", "busy", "busy_s", "queued"}``, where ``busy`` names the running method or is None.
    """

    def __init__(self, token: str, name: str) -> None:
        self.name = name
        self._server = RpcServer(token, name)
        self._server.register("health", self._health)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._running: tuple[str, float] | None = None
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"rpc {name}", daemon=True)

    def register(self, method: str, function: Callable[..., Any]) -> None:
        """Serve a blocking function as ``method``. What it returns is encoded while the next call may already run: return fresh arrays."""

        async def enqueue(**kwargs: Any) -> Any:
            if self._stopped:
                raise RuntimeError(f"{self.name} is stopping")
            call = _Call(method, function, kwargs, concurrent.futures.Future())
            self._calls.put(call)
            return await asyncio.wrap_future(call.answer)

        self._server.register(method, enqueue)

    def register_async(self, method: str, handler: AsyncHandler) -> None:
        """Serve a coroutine function on the background loop, at once, whatever the main thread does. It must not block."""
        self._server.register(method, handler)

    def start(self, host: str, port: int = 0) -> str:
        """Listen, and return the address ``host:port``. Calls to blocking methods wait until ``serve_forever``.

        Raises:
            UserError: as ``RpcServer.start``.
        """
        self._thread.start()
        return self.run(self._server.start(host, port), timeout_s=60.0)

    def run[T](self, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine on the background loop and wait for it: how blocking code calls other processes.

        Raises:
            DeadlineExceeded: it did not finish in time (it is cancelled).
        """
        assert threading.current_thread() is not self._thread, "the background loop cannot wait for itself"
        name = getattr(work, "__qualname__", "a coroutine")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        done, _ = concurrent.futures.wait([future], timeout_s)  # not result(timeout): the coroutine's own TimeoutError must pass as it is
        if not done:
            future.cancel()
            raise DeadlineExceeded(f"{self.name}: {name} did not finish within {timeout_s:g} s")
        return future.result()

    def serve_forever(self) -> None:
        """Run calls on this thread until ``stop``. An exception of a call goes to its caller; serving goes on."""
        try:
            while (call := self._calls.get()) is not None:
                if not call.answer.set_running_or_notify_cancel():
                    continue  # given up before it began
                self._running = (call.method, time.monotonic())
                try:
                    call.answer.set_result(call.function(**call.kwargs))
                except Exception as error:  # whatever went wrong is the caller's to know
                    call.answer.set_exception(error)
                except BaseException as error:  # SystemExit, KeyboardInterrupt: the caller is told, and this process ends
                    call.answer.set_exception(RuntimeError(f"{self.name} is ending: {type(error).__name__}"))
                    raise
                finally:
                    self._running = None
        finally:
            self._finish()

    def stop(self) -> None:
        """Let ``serve_forever`` return after the calls that arrived before. From any thread, or a handler."""
        self._calls.put(None)

    def _finish(self) -> None:
        self._stopped = True
        while not self._calls.empty():
            if (call := self._calls.get()) is not None and call.answer.set_running_or_notify_cancel():
                call.answer.set_exception(RuntimeError(f"{self.name} stopped before {call.method} began"))
        self.run(self._server.stop(), timeout_s=10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _health(self) -> dict[str, Any]:
        method, since = self._running or (None, time.monotonic())
        return {
            "name": self.name,
            "pid": os.getpid(),
            "busy": method,
            "busy_s": time.monotonic() - since,
            "queued": self._calls.qsize(),
        }
