"""vLLM's client against a scripted server: every fault by its name, nothing lost or doubled over interruptions."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from areal_mega.core.errors import DeadlineExceeded
from areal_mega.rollout.engines import client_for
from areal_mega.rollout.inference import GenerateRequest, ServerFault
from areal_mega.rollout.vllm import VLLMClient
from areal_mega.sync import vllm_plugin

Answer = Callable[[dict[str, Any]], Any]
REQUEST = GenerateRequest(
    input_ids=(1, 2), max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=7, stop=("z",), stop_token_ids=(9,), seed=11
)


class Scripted:
    """Answers to generation are given one after another, each by a function of the body; to other routes from ``answers``."""

    def __init__(self, script: list[Answer]) -> None:
        self.script, self.bodies, self.calls, self.url = script, [], [], ""  # type: ignore[var-annotated]
        self.answers: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
            "/weight_info": {"weight_version": "default"},
            "/detokenize": {"prompt": "whole"},
            "/collective_rpc": {"results": [{"digests": {"a": "1"}}]},
        }
        self.posts = {"/start_weight_update", "/weight_checker"}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        answer = self.script.pop(0)(self.bodies[-1])
        if asyncio.iscoroutine(answer):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    async def other(self, request: web.Request) -> web.Response:
        self.calls.append((request.path_qs, await request.json() if request.can_read_body else None))
        if request.method == "GET" and request.path in self.posts:
            return web.Response(status=405)
        answer = self.answers.get(request.path)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        return web.Response(status=404, text="no such route") if answer is None else web.json_response(answer)


@asynccontextmanager
async def scripted(*script: Answer, retries: int = 0, timeout_s: float = 10) -> AsyncIterator[tuple[Scripted, VLLMClient]]:
    server = Scripted(list(script))
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    app.router.add_route("*", "/{path:.*}", server.other)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = client_for("vllm", f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=timeout_s, retries=retries)
    assert isinstance(client, VLLMClient)
    try:
        yield server, client
    finally:
        await client.close()
        await runner.cleanup()


def one(ids: list[int], kind: str = "length", version: str = "3", reason: Any = None, **fields: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": kind,
        "stop_reason": reason,
        "token_ids": ids,
        "text": "".join(chr(64 + t) for t in ids),
        "logprobs": {"content": [{"token": "", "logprob": -0.5 * i} for i, _ in enumerate(ids)]},
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}] * bool(ids),
    }
    return {"choices": [choice | fields]}


def answering(answer: Any) -> Answer:
    return lambda body: answer


def top(sampled: float, best: float) -> dict[str, Any]:
    """A one-token answer with its likeliest tokens."""
    ranked = [{"token_id": 5, "logprob": sampled, "rank": 2}, {"token_id": 6, "logprob": best, "rank": 1}]
    return one([5], logprobs={"content": [{"token_id": 5, "logprob": sampled, "rank": 2, "top_logprobs": ranked}]})


async def test_members_of_a_group_are_requests_of_their_own() -> None:
    twin = GenerateRequest(input_ids=(1, 2), max_new_tokens=4, seed=12, rid="mine")

    def echo(body: dict[str, Any]) -> Any:
        return one([5, 6, 7, 8] if body["sampling_params"]["seed"] == 11 else [4])

    async with scripted(echo, echo) as (server, client):
        first, second = await client.generate([REQUEST, twin])
    assert first.output_ids == (5, 6, 7, 8) and first.versions == (3,) * 4 and first.logprobs == (0.0, -0.5, -1.0, -1.5)
    assert second.output_ids == (4,) and second.text == "D" and second.prompt_tokens == 2
    body, other = sorted(server.bodies, key=lambda b: b["sampling_params"]["seed"])
    assert body["token_ids"] == [1, 2] and other["request_id"] == "mine" != body["request_id"]
    expected = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "logprobs": 0, "seed": 11}
    assert body["sampling_params"] == expected | {"stop": ["z"], "stop_token_ids": [9]}


async def test_an_interrupted_request_goes_on_with_what_it_has() -> None:
    script = [one([5], "abort"), one([], "abort"), one([6, 7], "abort", "4"), one([8], "stop", "5", reason=8)]
    async with scripted(*map(answering, script)) as (server, client):
        [generation] = await client.generate([REQUEST])
    assert generation.output_ids == (5, 6, 7, 8) and generation.versions == (3, 4, 4, 5) and generation.finish_reason == "stop"
    assert [b["token_ids"] for b in server.bodies] == [[1, 2], [1, 2, 5], [1, 2, 5], [1, 2, 5, 6, 7]]
    assert [b["sampling_params"]["max_tokens"] for b in server.bodies] == [4, 3, 3, 1]
    seeds = [b["sampling_params"]["seed"] for b in server.bodies]
    assert seeds[0] == 11 and seeds[1] == seeds[2] and len(set(seeds)) == 3, "vLLM starts its noise anew with each request"
    assert server.calls == [("/detokenize", {"tokens": [5, 6, 7]})] and generation.text == "whole"


async def test_a_stop_string_and_an_end_of_sequence() -> None:
    async with scripted(answering(one([5, 6], "stop", reason="z")), answering(one([5, 9], "stop"))) as (_, client):
        [by_word] = await client.generate([REQUEST])
        [by_end] = await client.generate([REQUEST])
    assert by_word.finish_reason == by_end.finish_reason == "stop" and by_end.output_ids == (5, 9)


async def test_abort_all_ends_requests_for_good() -> None:
    sent = asyncio.Event()

    async def held() -> Any:
        while not any(path == "/abort_requests" for path, _ in server.calls):
            sent.set()
            await asyncio.sleep(0.01)
        return one([5], "abort")

    async with scripted(lambda body: held()) as (server, client):
        server.answers["/abort_requests"] = {"aborted": 1}
        task = asyncio.create_task(client.generate([REQUEST]))
        await sent.wait()
        await client.abort_all()
        [generation] = await task
    assert generation.finish_reason == "abort" and generation.output_ids == (5,)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (one([5], logprobs={"content": [{"logprob": -9999.0}]}), "not a finite number"),
        (one([5, 6], logprobs={"content": [{"logprob": -1.0}]}), "2 tokens but 1 log-probabilities"),
        (one([5], logprobs=None), "answered without"),
        ({"choices": []}, "answered without"),
        ([], "answered without"),
        (one([5], "error"), "ended with 'error', which is unknown"),
        (one([5] * 5), "5 tokens, more than asked for"),
        (one([5, 6], weight_versions=[{"version": "1", "start": 1, "end": 2}]), "leave a gap at token 0"),
        (one([5, 6], weight_versions=[{"version": "1", "start": 0, "end": 1}]), "cover 1 of 2 tokens"),
        (one([5, 6], weight_versions=None), "cover 0 of 2 tokens"),
        (one([5], version="v7"), "weight version 'v7' is not a number"),
        (
            one([5], weight_versions=[{"version": "1", "start": 0}]),
            r"/inference/v1/generate answered what cannot be read \(KeyError: 'end'\)",
        ),
        (one([5], weight_versions=["3"]), "what cannot be read"),
        (one([5], logprobs={"content": [{"logprob": "NaN"}]}), "what cannot be read"),
        (
            one([5, 6], weight_versions=[{"version": "3", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]),
            "weight version 2 after tokens of version 3",
        ),
        (web.Response(text="<html>"), "malformed JSON"),
    ],
)
async def test_a_bad_answer_is_asked_for_again_and_nothing_of_it_kept(answer: Any, said: str) -> None:
    async with scripted(answering(answer)) as (_, client):
        with pytest.raises(ServerFault, match=said):
            await client.generate([REQUEST])
    good = one([7], "stop", reason=7)
    if isinstance(answer, web.Response):
        answer = web.Response(text="<html>")
    async with scripted(answering(answer), answering(good), retries=1) as (server, client):
        [generation] = await client.generate([REQUEST])
    assert generation.output_ids == (7,) and len(server.bodies) == 2


async def test_a_refusal_is_not_repeated_and_a_silent_server_named() -> None:
    async with scripted(answering(web.Response(status=400, text="too long")), retries=3) as (server, client):
        with pytest.raises(ServerFault, match="answered 400: too long"):
            await client.generate([REQUEST])
        assert len(server.bodies) == 1
    async with scripted(lambda body: asyncio.sleep(0.3), timeout_s=0.1) as (_, client):
        with pytest.raises(DeadlineExceeded, match=r"did not answer /inference/v1/generate within 0\.1 s"):
            await client.generate([REQUEST])


async def test_what_probing_finds() -> None:
    async with scripted(answering(top(-5, -4)), answering(top(-6, -2)), answering(top(-4, -4)), answering(one([5]))) as (server, client):
        able = await client.probe()
        assert able.engine == "vllm" and able.version_spans and able.hf_digests and able.checksums and able.max_context == 64
        [generation] = await client.generate([REQUEST])
        assert generation.versions == (3,)
    assert [b["sampling_params"]["temperature"] for b in server.bodies[:3]] == [2.0, 1.0, 2.0]


async def test_log_probabilities_that_cannot_be_trained_on_are_refused() -> None:
    raw = [top(-5, -2), top(-5, -2), top(-2, -2)]
    async with scripted(*map(answering, raw)) as (_, client):
        with pytest.raises(ServerFault, match=r"not at the sampling temperature; start vLLM with --logprobs-mode=processed_logprobs$"):
            await client.probe()
    cut = [top(-5, -4), top(-6, -2), top(0, 0), one([5])]
    async with scripted(*map(answering, cut)) as (_, client):
        await client.probe()
        with pytest.raises(ServerFault, match=r"its log-probabilities are those after top_p 0\.9 and top_k 7"):
            await client.generate([REQUEST])
        [generation] = await client.generate([GenerateRequest(input_ids=(1,), max_new_tokens=1)])
        assert generation.output_ids == (5,), "uncut, they are what the trainer computes"


async def test_a_server_without_the_routes_is_refused_and_one_without_the_plug_in_is_not() -> None:
    async with scripted() as (server, client):
        server.posts.clear()
        with pytest.raises(ServerFault, match=r"vLLM 0\.32\.0 has no /start_weight_update; start it with VLLM_SERVER_DEV_MODE=1"):
            await client.probe()
    async with scripted(answering(top(-5, -4)), answering(top(-6, -2)), answering(top(-4, -4))) as (server, client):
        server.answers["/collective_rpc"] = 500
        able = await client.probe()
        assert not able.hf_digests


@pytest.mark.parametrize(
    ("route", "answer"),
    [
        ("/version", {}),
        ("/version", []),
        ("/v1/models", {"data": []}),
        ("/v1/models", {"data": [7]}),
        ("/weight_info", {"version": "1"}),
        ("/collective_rpc", {"results": 7}),
    ],
)
async def test_a_probe_names_what_it_cannot_read(route: str, answer: Any) -> None:
    async with scripted(answering(top(-5, -4)), answering(top(-6, -2)), answering(top(-4, -4))) as (server, client):
        server.answers[route] = answer
        with pytest.raises(ServerFault, match=f"{route} answered what cannot be read"):
            await client.probe()


async def test_checks_of_weights_name_what_they_cannot_read() -> None:
    async with scripted() as (server, client):
        server.posts.clear()
        server.answers |= {"/collective_rpc": {"results": []}, "/weight_checker": {"sums": {}}}
        with pytest.raises(ServerFault, match="/collective_rpc answered what cannot be read"):
            await client.digests("sums")
        with pytest.raises(ServerFault, match="/weight_checker answered what cannot be read"):
            await client.checksums()


async def test_a_server_without_spans_gives_the_older_of_two_versions() -> None:
    probes = [top(-5, -4), top(-6, -2), top(-4, -4)]
    for answer in probes:
        del answer["choices"][0]["weight_versions"]

    def then(body: dict[str, Any]) -> Any:
        server.answers["/weight_info"] = {"weight_version": "8"}
        return one([5, 6], weight_versions=None)

    async with scripted(*map(answering, probes), then) as (server, client):
        assert not (await client.probe()).version_spans
        server.answers["/weight_info"] = {"weight_version": "7"}
        [generation] = await client.generate([REQUEST])
    assert generation.versions == (7, 7)


async def test_pauses_and_a_whole_update() -> None:
    routes = ("/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
    bucket: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [(2,)], "group_name": "g"}
    async with scripted() as (server, client):
        server.posts.clear()
        server.answers |= {route: {} for route in (*routes, "/reset_prefix_cache")}
        with pytest.raises(ServerFault, match=r"it is not in the weight-sync group 'g' \(it is in ''\)"):
            await client.update_bucket(**bucket)
        await client.init_group(master_address="h", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo")
        for mode in ("retract", "in_place", "abort"):
            await client.pause(mode)
        await client.begin_update()
        await client.update_bucket(**bucket)
        await client.update_bucket(**bucket, version=5, flush_cache=True)
        await client.end_update()
        await client.resume()
        paths = [path for path, _ in server.calls]
        assert paths[1:4] == [
            "/pause?mode=keep&clear_cache=true",
            "/pause?mode=keep&clear_cache=false",
            "/pause?mode=abort&clear_cache=true",
        ]
        flush = "/reset_prefix_cache?reset_running_requests=true"
        assert paths[4:] == ["/start_weight_update", *["/update_weights"] * 2, flush, "/finish_weight_update", "/resume"]
        assert dict(server.calls)["/finish_weight_update"] == {"weight_version": "5"}
        held = await client.digests("sums")
        assert held.tensors == {"a": "1"} and held.weight_version == 0


async def test_an_update_that_was_not_sent_whole_has_no_version() -> None:
    async with scripted() as (server, client):
        server.posts.clear()
        server.answers |= {"/start_weight_update": {}, "/finish_weight_update": {}}
        await client.begin_update()
        await client.end_update()
        assert server.calls[-1] == ("/finish_weight_update", {})


async def test_workers_that_received_different_weights_are_named() -> None:
    async with scripted() as (server, client):
        server.answers["/collective_rpc"] = {"results": [{"digests": {"a": "1"}}, {"digests": {"a": "2"}}]}
        with pytest.raises(ServerFault, match="its 2 workers received different weights"):
            await client.digests("sums")


async def test_a_server_that_waits_for_bytes_is_healthy_all_the_same() -> None:
    """Its engine answers nothing meanwhile; the controller asks who is silent when a sync takes too long."""
    async with scripted() as (server, client):
        server.answers |= {"/health": {}, "/weight_info": 500}
        waiting = asyncio.create_task(client._waiting("/update_weights", {}))
        await asyncio.sleep(0)
        assert await client.weight_version() == 0
        with pytest.raises(ServerFault):
            await waiting
        with pytest.raises(ServerFault):
            await client.weight_version()


def test_the_plug_in_is_for_the_pythons_of_vllm() -> None:
    """It and all that it imports of ours runs under Python 3.10."""
    package = vllm_plugin.FOLDER.parent.parent
    plug_in = vllm_plugin.FOLDER / "areal_mega_vllm.py"
    files = ("__init__.py", "core/__init__.py", "core/errors.py", "sync/__init__.py", "sync/group.py", "sync/digest.py")
    for file in (plug_in, *(package / name for name in files)):
        ast.parse(file.read_text(), feature_version=(3, 10))
    assert f'BACKEND = "{vllm_plugin.BACKEND}"' in plug_in.read_text()
    assert f"class {vllm_plugin.EXTENSION.partition('.')[2]}:" in plug_in.read_text()
    assert {path.name for path in vllm_plugin.FOLDER.glob("*.py")} == {"__init__.py", "areal_mega_vllm.py"}
