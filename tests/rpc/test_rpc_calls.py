"""Calls over real sockets: results, every way to fail, large bodies, peers that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import aiohttp
import numpy as np
import pytest

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.rpc import wire
from areal_mega.rpc.client import PeerUnreachable, RpcClient, RpcError
from areal_mega.rpc.codec import CodecError, decode, encode
from areal_mega.rpc.server import RpcServer

PEER = """
import asyncio, os, sys
from areal_mega.rpc.server import RpcServer
async def main():
    server = RpcServer("secret", "peer")
    async def sleep(seconds): await asyncio.sleep(seconds)
    async def die(): os._exit(3)
    server.register("sleep", sleep)
    server.register("die", die)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Service:
    """What the tests call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def echo(self, value: Any) -> Any:
        self.calls.append(value)
        return value

    async def size(self, value: np.ndarray) -> int:
        return value.nbytes

    async def fail(self, kind: str) -> None:
        raise {"user": UserError("a typo"), "deadline": DeadlineExceeded("rank 3 is missing"), "bug": KeyError("x")}[kind]

    async def slow(self) -> None:
        await asyncio.sleep(60)

    async def unsendable(self) -> object:
        return object()


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def address(service: Service) -> AsyncIterator[str]:
    server = RpcServer("secret", "test")
    for method in ("echo", "size", "fail", "slow", "unsendable"):
        server.register(method, getattr(service, method))
    yield await server.start("127.0.0.1")
    await server.stop()


@pytest.fixture
async def client(address: str) -> AsyncIterator[RpcClient]:
    client = RpcClient(address, "secret", "train rank 0")
    yield client
    await client.close()


@pytest.fixture
def peer() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


async def post(address: str, body: bytes, token: str = "secret", method: str = "echo") -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{address}{wire.PATH}{method}", data=body, headers={"Authorization": f"Bearer {token}"}) as response,
    ):
        return response.status, decode(await response.read())


async def test_a_call_returns_what_the_handler_returns(client: RpcClient) -> None:
    value = {"a": (1, [2.0, None]), "b": np.arange(3)}
    back = await client.call("echo", timeout_s=30, value=value)
    assert back["a"] == value["a"] and (back["b"] == value["b"]).all()
    assert await client.call("health", timeout_s=30) == {"name": "test", "pid": os.getpid()}


async def test_many_calls_at_once_keep_their_answers_apart(client: RpcClient) -> None:
    assert await asyncio.gather(*(client.call("echo", timeout_s=60, value=i) for i in range(200))) == list(range(200))


async def test_an_exception_carries_type_message_and_traceback(client: RpcClient) -> None:
    with pytest.raises(RpcError) as caught:
        await client.call("fail", timeout_s=30, kind="bug")
    error = caught.value
    assert (error.method, error.kind, error.message) == ("fail", "KeyError", "'x'")
    assert error.peer.startswith("train rank 0 at 127.0.0.1:") and "in fail" in error.remote_traceback and "in fail" in str(error)


async def test_a_users_mistake_and_a_deadline_cross_as_what_they_are(client: RpcClient) -> None:
    with pytest.raises(UserError, match=r"^a typo$"):
        await client.call("fail", timeout_s=30, kind="user")
    with pytest.raises(DeadlineExceeded, match=r"train rank 0 at .*rank 3 is missing"):
        await client.call("fail", timeout_s=30, kind="deadline")


async def test_a_silent_peer_is_named_with_the_deadline(client: RpcClient) -> None:
    with pytest.raises(DeadlineExceeded, match=r"train rank 0 at 127\.0\.0\.1:\d+ did not answer slow within 0.2 s"):
        await client.call("slow", timeout_s=0.2)
    assert await client.call("echo", timeout_s=30, value=1) == 1


async def test_wrong_arguments_and_methods_are_errors_that_help(client: RpcClient) -> None:
    with pytest.raises(RpcError, match=r"TypeError.*valeu"):
        await client.call("echo", timeout_s=30, valeu=1)
    with pytest.raises(RpcError, match=r"no method 'ecoh'.*echo"):
        await client.call("ecoh", timeout_s=30)


async def test_what_cannot_be_encoded_is_an_error_at_the_side_that_has_it(client: RpcClient) -> None:
    with pytest.raises(CodecError, match="cannot encode"):
        await client.call("echo", timeout_s=30, value=object())
    with pytest.raises(RpcError, match=r"CodecError: cannot encode a builtins.object"):
        await client.call("unsendable", timeout_s=30)


@pytest.mark.parametrize("token", ["wrong", "", "secret2", "sécret"])
async def test_a_wrong_token_is_refused_at_the_first_try(address: str, service: Service, token: str) -> None:
    refused = []

    async def count(*_: Any) -> None:
        refused.append(1)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(count)
    client = RpcClient(address, token, "train rank 0")
    client._session = aiohttp.ClientSession(trace_configs=[trace])
    client._loop = asyncio.get_running_loop()
    with pytest.raises(RpcError, match="Unauthorized: wrong token"):
        await client.call("echo", timeout_s=30, value=1)
    await client.close()
    assert service.calls == [] and refused == [1]
    assert (await post(address, encode({"value": 1}), token="wrong"))[0] == 401


async def test_a_wrong_token_with_a_huge_body_is_still_refused_as_such(address: str) -> None:
    client = RpcClient(address, "wrong", "train rank 0")
    with pytest.raises(RpcError, match="wrong token"):
        await client.call("size", timeout_s=120, value=np.zeros(64 * 2**20, np.uint8))
    await client.close()


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81", encode([1]), encode({1: 2}), os.urandom(1000)])
async def test_a_malformed_body_is_400_and_the_server_lives_on(address: str, service: Service, body: bytes) -> None:
    status, answer = await post(address, body)
    assert status == 400 and answer["kind"] == "CodecError"
    assert service.calls == []
    assert await post(address, encode({"value": 1})) == (200, 1)


async def test_noise_on_the_socket_does_not_hurt(address: str, client: RpcClient) -> None:
    for noise in (b"\0" * 100, b"GET /rpc/echo HTTP/1.1\r\n\r\n", b"POST /rpc/echo HTTP/1.1\r\nContent-Length: 999\r\n\r\nx"):
        _, writer = await asyncio.open_connection(*wire.split_address(address))
        writer.write(noise)
        await writer.drain()
        writer.close()
    assert await client.call("echo", timeout_s=30, value=1) == 1


async def test_arrays_of_200_mb_pass_both_ways(client: RpcClient) -> None:
    big = np.arange(25 * 2**20, dtype=np.int64)
    assert big.nbytes == 200 * 2**20
    back = await client.call("echo", timeout_s=240, value=big)
    assert (back == big).all()


async def test_nobody_listening_is_unreachable() -> None:
    with closing(wire.listen_socket("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    client = RpcClient(f"127.0.0.1:{port}", "secret", "rollout rank 1")
    with pytest.raises(PeerUnreachable, match=r"rollout rank 1 at 127.0.0.1:\d+ is unreachable \(calling echo\)"):
        await client.call("echo", timeout_s=30)
    await client.close()


async def test_another_program_at_the_address_is_said_to_be_one() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = RpcClient(wire.format_address(*server.sockets[0].getsockname()), "secret", "train rank 0")
        with pytest.raises(RpcError, match="something else listening"):
            await client.call("echo", timeout_s=30)
        await client.close()


async def test_a_peer_killed_in_mid_call_is_unreachable_long_before_the_deadline(peer: tuple[subprocess.Popen[str], str]) -> None:
    process, address = peer
    client = RpcClient(address, "secret", "rollout rank 0")
    call = asyncio.create_task(client.call("sleep", timeout_s=3600, seconds=3600))
    await client.call("health", timeout_s=30)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerUnreachable, match=r"rollout rank 0 at .*calling sleep"):
        await call
    with pytest.raises(PeerUnreachable):  # and it stays so
        await client.call("health", timeout_s=3600)
    await client.close()


async def test_a_peer_that_exits_within_the_call_is_unreachable(peer: tuple[subprocess.Popen[str], str]) -> None:
    client = RpcClient(peer[1], "secret", "rollout rank 0")
    with pytest.raises(PeerUnreachable, match="calling die"):
        await client.call("die", timeout_s=3600)
    await client.close()


async def test_a_frozen_peer_meets_the_deadline(peer: tuple[subprocess.Popen[str], str]) -> None:
    process, address = peer
    client = RpcClient(address, "secret", "rollout rank 0")
    await client.call("health", timeout_s=30)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match="did not answer health"):
        await client.call("health", timeout_s=0.3)
    await client.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "", "0.0.0.0", "192.0.2.1"])
async def test_a_bad_host_is_one_line_about_launch_host(host: str) -> None:
    with pytest.raises(UserError, match=r"cannot listen on .*launch.host") as caught:
        await RpcServer("secret", "test").start(host)
    assert "\n" not in str(caught.value)


async def test_a_taken_port_is_one_line(address: str) -> None:
    host, port = wire.split_address(address)
    with pytest.raises(UserError, match=f"cannot listen on {address}: Address already in use"):
        await RpcServer("secret", "test").start(host, port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 80), ("n0.cluster", 65535), ("::1", 1)])
def test_addresses_round_trip(host: str, port: int) -> None:
    assert wire.split_address(wire.format_address(host, port)) == (host, port)
