"""A process whose main thread works while its background thread answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.rpc.client import PeerUnreachable, RpcClient, RpcError
from areal_mega.rpc.rank_server import RankServer


class Rank:
    """A rank server on a thread that stands for the main thread of its process."""

    def __init__(self) -> None:
        self.server = RankServer("secret", "train rank 0")
        self.release, self.entered = threading.Event(), threading.Event()
        self.log: list[Any] = []
        for name in ("block", "note", "fail", "fetch", "too_slow", "shutdown", "leave"):
            self.server.register(name, getattr(self, name))
        self.server.register_async("soon", self.soon)
        self.address = self.server.start("127.0.0.1")
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        try:
            self.server.serve_forever()
        except SystemExit:
            self.log.append("SystemExit")

    def client(self) -> RpcClient:
        return RpcClient(self.address, "secret", "train rank 0")

    def block(self) -> None:
        self.entered.set()
        assert self.release.wait(120)

    def note(self, item: int) -> bool:
        self.log.append(item)
        return threading.current_thread() is self.thread

    def fail(self) -> None:
        raise UserError("no such folder")

    def fetch(self, address: str) -> Any:
        """Blocking code that calls another process."""

        async def call() -> Any:
            client = RpcClient(address, "secret", "self")
            try:
                return await client.call("health", timeout_s=60)
            finally:
                await client.close()

        return self.server.run(call(), timeout_s=60)

    def too_slow(self) -> None:
        self.server.run(asyncio.sleep(60), timeout_s=0.05)

    def shutdown(self) -> str:
        self.server.stop()
        return "bye"

    def leave(self) -> None:
        raise SystemExit(1)

    async def soon(self) -> str:
        return "now"


async def queue_holds(client: RpcClient, calls: int) -> dict[str, Any]:
    """Wait until so many calls have arrived and not begun; returns the health of that moment."""
    while True:
        health: dict[str, Any] = await client.call("health", timeout_s=60)
        if health["queued"] >= calls:
            return health


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.release.set()
    rank.server.stop()
    rank.thread.join(30)
    assert not rank.thread.is_alive()


async def test_health_and_async_methods_answer_while_the_main_thread_is_busy(rank: Rank) -> None:
    client = rank.client()
    busy = asyncio.create_task(client.call("block", timeout_s=120))
    await asyncio.to_thread(rank.entered.wait, 60)
    queued = asyncio.create_task(client.call("note", timeout_s=120, item=1))
    health = await queue_holds(client, 1)
    assert health["busy"] == "block" and health["busy_s"] > 0 and not busy.done() and not queued.done()
    assert await client.call("soon", timeout_s=60) == "now"
    rank.release.set()
    assert await busy is None
    assert await queued is True
    assert (await client.call("health", timeout_s=60))["busy"] is None
    await client.close()


async def test_blocking_calls_run_one_at_a_time_in_order_on_the_serving_thread(rank: Rank) -> None:
    client = rank.client()
    assert await client.call("note", timeout_s=60, item=-1) is True
    busy = asyncio.create_task(client.call("block", timeout_s=120))
    await asyncio.to_thread(rank.entered.wait, 60)
    calls = []
    for item in range(20):
        calls.append(asyncio.create_task(client.call("note", timeout_s=120, item=item)))
        await queue_holds(client, item + 1)
    rank.release.set()
    assert all(await asyncio.gather(*calls))
    await busy
    assert rank.log == [-1, *range(20)]
    await client.close()


async def test_errors_go_to_the_caller_and_serving_goes_on(rank: Rank) -> None:
    client = rank.client()
    with pytest.raises(UserError, match="no such folder"):
        await client.call("fail", timeout_s=60)
    with pytest.raises(RpcError, match="TypeError"):
        await client.call("note", timeout_s=60)
    with pytest.raises(DeadlineExceeded, match=r"train rank 0: sleep did not finish within 0.05 s"):
        await client.call("too_slow", timeout_s=60)
    assert await client.call("note", timeout_s=60, item=1) is True
    await client.close()


async def test_blocking_code_can_call_another_process(rank: Rank) -> None:
    client = rank.client()
    assert (await client.call("fetch", timeout_s=60, address=rank.address))["busy"] == "fetch"
    await client.close()


async def test_a_method_may_end_serving_and_is_answered(rank: Rank) -> None:
    client = rank.client()
    assert await client.call("shutdown", timeout_s=60) == "bye"
    await asyncio.to_thread(rank.thread.join, 30)
    with pytest.raises(PeerUnreachable):
        await client.call("health", timeout_s=60)
    await client.close()


async def test_leaving_from_within_a_call_tells_this_caller_and_those_who_wait(rank: Rank) -> None:
    client = rank.client()
    busy = asyncio.create_task(client.call("block", timeout_s=120))
    await asyncio.to_thread(rank.entered.wait, 60)
    calls = []
    for method in ("leave", "fail"):
        calls.append(asyncio.create_task(client.call(method, timeout_s=120)))
        await queue_holds(client, len(calls))
    rank.release.set()
    await busy
    with pytest.raises(RpcError, match="is ending: SystemExit"):
        await calls[0]
    with pytest.raises((RpcError, PeerUnreachable), match=r"stopped before fail began|unreachable"):
        await calls[1]
    await asyncio.to_thread(rank.thread.join, 30)
    assert rank.log == ["SystemExit"]
    await client.close()
