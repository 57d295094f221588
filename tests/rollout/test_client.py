"""The client against a scripted server: every fault by its name, nothing lost or doubled over interruptions; then against a real one."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from served import served
from tiny_models import tiny_model

from areal_mega.core.errors import DeadlineExceeded
from areal_mega.rollout.client import InferenceClient
from areal_mega.rollout.inference import GenerateRequest, ServerFault

RECORDED = json.loads((Path(__file__).parent.parent / "data" / "sglang_answers.json").read_text())
Answer = Callable[[dict[str, Any]], Any]


class Scripted:
    """A server whose answers to /generate are given one after another, each by a function of the body."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any]] = []
        self.url = ""
        self.version = ""
        """What it reports, where it is no recorded server but an old one."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        answer = self.script.pop(0)(self.bodies[-1])
        if asyncio.iscoroutine(answer):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    async def other(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, await request.json() if request.can_read_body else None))
        if request.path in ("/model_info", "/server_info") and self.version:
            return web.json_response({"weight_version": self.version})
        for exchange in RECORDED:
            if (exchange["method"], exchange["path"], exchange["status"]) == (request.method, request.path, 200):
                return web.json_response(exchange["answer"]) if "answer" in exchange else web.Response(text=exchange["text"])
        if request.path == "/begin_weight_update":
            return web.Response(status=405)
        return web.Response(status=404, text="no such route")


@asynccontextmanager
async def scripted(*script: Answer, retries: int = 0, timeout_s: float = 10) -> AsyncIterator[tuple[Scripted, InferenceClient]]:
    server = Scripted()
    server.script = list(script)
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_route("*", "/{path:.*}", server.other)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = InferenceClient(server.url, timeout_s=timeout_s, retries=retries)
    try:
        yield server, client
    finally:
        await client.close()
        await runner.cleanup()


def one(ids: list[int], kind: str = "length", version: str = "3", spans: Any = None, **meta: Any) -> dict[str, Any]:
    filled = {
        "id": "x",
        "finish_reason": {"type": kind},
        "prompt_tokens": 2,
        "weight_version": version,
        "output_token_logprobs": [[-0.5 * i, token, None] for i, token in enumerate(ids)],
        "weight_versions": spans if spans is not None else [{"version": version, "start": 0, "end": len(ids)}] * bool(ids),
    }
    return {"text": "".join(chr(64 + t) for t in ids), "output_ids": ids, "meta_info": filled | meta}


def always(*answers: dict[str, Any]) -> Answer:
    return lambda body: list(answers)


REQUEST = GenerateRequest(
    input_ids=(1, 2), max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=7, stop=("z",), stop_token_ids=(9,), seed=11
)


async def test_members_of_a_prompt_travel_together() -> None:
    other = GenerateRequest(input_ids=(3,), max_new_tokens=1, rid="mine")
    twin = GenerateRequest(input_ids=(1, 2), max_new_tokens=4, seed=12)

    def answer(body: dict[str, Any]) -> Any:
        return [one([5, 6, 7, 8], "stop") for _ in body["input_ids"]] if len(body["input_ids"]) == 2 else [one([4])]

    async with scripted(answer, answer) as (server, client):
        generations = await client.generate([REQUEST, other, twin])
    assert [g.output_ids for g in generations] == [(5, 6, 7, 8), (4,), (5, 6, 7, 8)]
    assert generations[0].versions == (3,) * 4 and generations[0].logprobs == (0.0, -0.5, -1.0, -1.5)
    assert generations[0].finish_reason == "stop" and generations[1].finish_reason == "length"
    pair = next(b for b in server.bodies if len(b["input_ids"]) == 2)
    assert pair["input_ids"] == [[1, 2], [1, 2]] and pair["return_logprob"] is True
    expected = {"max_new_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7}
    assert pair["sampling_params"][0] == expected | {"stop": ["z"], "stop_token_ids": [9], "sampling_seed": 11}
    assert len(set(pair["rid"])) == 2 and {len(r) for r in pair["rid"]} == {32}
    assert next(b for b in server.bodies if len(b["input_ids"]) == 1)["rid"] == ["mine"]


async def test_an_interrupted_request_goes_on_with_what_it_has() -> None:
    script = [
        always(one([5], "abort", "3"), one([6, 7, 8, 9], "length", "3")),
        always(one([], "abort", "3")),
        always(one([6, 7], "abort", "4")),
        always(one([8], "stop", "5", finish_reason={"type": "stop", "matched": 8})),
    ]
    async with scripted(*script) as (server, client):
        first, second = await client.generate([REQUEST, REQUEST])
    assert first.output_ids == (5, 6, 7, 8) and first.versions == (3, 4, 4, 5) and first.finish_reason == "stop"
    assert second.output_ids == (6, 7, 8, 9) and second.versions == (3,) * 4
    assert [b["input_ids"] for b in server.bodies] == [[[1, 2]] * 2, [[1, 2, 5]], [[1, 2, 5]], [[1, 2, 5, 6, 7]]]
    assert [b["sampling_params"][0]["max_new_tokens"] for b in server.bodies] == [4, 3, 3, 1]
    assert all(b["sampling_params"][0]["sampling_seed"] == 11 for b in server.bodies)
    rids = [r for b in server.bodies for r in b["rid"]]
    assert len(set(rids)) == len(rids)
    assert server.calls[-1] == ("/detokenize", {"model": "", "tokens": [5, 6, 7]})  # whole, and without the stop token


async def test_a_request_whose_budget_ended_with_the_interruption_is_done() -> None:
    async with scripted(always(one([5, 6, 7, 8], "abort"))) as (_, client):
        [generation] = await client.generate([REQUEST])
    assert generation.finish_reason == "length" and generation.output_ids == (5, 6, 7, 8)


async def test_abort_all_ends_requests_for_good() -> None:
    sent, waiting = asyncio.Event(), asyncio.Event()

    async def held() -> Any:
        sent.set()
        await waiting.wait()
        return [one([5], "abort")]

    async with scripted(lambda body: held()) as (server, client):
        task = asyncio.create_task(client.generate([REQUEST]))
        await asyncio.wait_for(sent.wait(), 10)
        await client.abort_all()
        waiting.set()
        [generation] = await task
    assert generation.finish_reason == "abort" and generation.output_ids == (5,)
    assert ("/abort_request", {"abort_all": True}) in server.calls


async def test_a_server_that_only_aborts_is_found_out() -> None:
    async with scripted(*[always(one([], "abort"))] * 20) as (_, client):
        with pytest.raises(ServerFault, match="aborted 20 times in a row without a token"):
            await client.generate([REQUEST])


GOOD = always(one([5, 6, 7, 8]))
FAULTS: dict[str, tuple[Answer, str]] = {
    "malformed JSON": (lambda body: web.Response(text='[{"text": '), "malformed JSON"),
    "no answer": (lambda body: web.Response(text=""), "answered 1 samples|without"),
    "server error": (lambda body: web.Response(status=500, text="boom"), "answered 500: boom"),
    "NaN": (always(one([5], output_token_logprobs=[[None, 5, None]])), "log-probability that is not a finite number"),
    "too few samples": (lambda body: [], "answered 0 samples where 1 were asked for"),
    "too many samples": (always(one([5]), one([5])), "answered 2 samples where 1"),
    "too many tokens": (always(one([5] * 5)), "answered 5 tokens, more than asked for"),
    "logprobs of other tokens": (always(one([5], output_token_logprobs=[[-1.0, 6, None]])), "log-probabilities of"),
    "no logprobs": (
        always({"text": "", "output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}}}),
        "without 'output_token_logprobs'",
    ),
    "unknown end": (always(one([5], "tired")), "ended with 'tired'"),
    "spans with a gap": (always(one([5, 6], spans=[{"version": "3", "start": 1, "end": 2}])), "leave a gap at token 0"),
    "spans too short": (always(one([5, 6], spans=[{"version": "3", "start": 0, "end": 1}])), "cover 1 of 2 tokens"),
    "a version that goes back": (
        always(one([5, 6], spans=[{"version": "3", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}])),
        "weight version 2 after tokens of version 3",
    ),
    "log-probabilities that are no list": (always(one([5], output_token_logprobs=None)), "what cannot be read"),
    "log-probabilities that are no numbers": (always(one([5], output_token_logprobs=[["low", 5, None]])), "what cannot be read"),
    "spans of another kind": (always(one([5], spans=["3"])), "what cannot be read"),
    "a span without an end": (always(one([5], spans=[{"version": "3", "start": 0}])), r"what cannot be read \(KeyError: 'end'\)"),
    "version without number": (always(one([5], version="new")), "weight version 'new' is not a number"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_named_and_a_good_second_answer_taken(fault: str) -> None:
    answer, message = FAULTS[fault]
    async with scripted(answer) as (server, client):
        with pytest.raises(ServerFault, match=message) as caught:
            await client.generate([REQUEST])
        assert server.url in str(caught.value)
    async with scripted(answer, GOOD, retries=1) as (server, client):
        [generation] = await client.generate([REQUEST])
    assert generation.output_ids == (5, 6, 7, 8)
    assert server.bodies[0]["input_ids"] == server.bodies[1]["input_ids"] and server.bodies[0]["rid"] != server.bodies[1]["rid"]


async def test_a_refusal_is_not_repeated() -> None:
    refusal = web.Response
    async with scripted(lambda body: refusal(status=400, text="too long"), GOOD, retries=3) as (server, client):
        with pytest.raises(ServerFault, match="answered 400: too long"):
            await client.generate([REQUEST])
    assert len(server.bodies) == 1


async def test_a_server_that_hangs_is_a_deadline() -> None:
    async with scripted(lambda body: asyncio.sleep(1), timeout_s=0.3) as (_, client):
        with pytest.raises(DeadlineExceeded, match=r"did not answer /generate within 0.3 s"):
            await client.generate([REQUEST])


async def test_a_server_that_is_not_there() -> None:
    client = InferenceClient("http://127.0.0.1:9", timeout_s=2, retries=0)
    with pytest.raises(ServerFault, match="connection failed") as caught:
        await client.generate([REQUEST])
    assert caught.value.is_unreachable
    with pytest.raises(DeadlineExceeded, match=r"http://127.0.0.1:9 was not healthy within 0.5 s; last: .*connection failed"):
        await client.wait_healthy(0.5)
    await client.close()


def experts(*rows: int) -> str:
    """Base64 as servers send it: one row of four numbers per given one."""
    return base64.b64encode(np.array([[row] * 4 for row in rows], dtype="<i4").tobytes()).decode()


@pytest.mark.parametrize("nothing", [None, ""])
async def test_routed_experts_of_an_interrupted_sample_are_joined(nothing: str | None) -> None:
    """Each answer brings the rows that are still missing; a sample that has more of them than another has them cut off."""
    script = [
        always(one([5, 6], "abort", routed_experts=experts(0, 1, 2)), one([], "abort", routed_experts=nothing)),
        always(one([7, 8], routed_experts=experts(90, 91, 92, 3, 4)), one([5, 6, 7, 8], routed_experts=experts(0, 1, 2, 3, 4))),
    ]
    request = replace(REQUEST, routed_experts=True)
    async with scripted(*script) as (server, client):
        generations = await client.generate([request, request])
    assert [b["routed_experts_start_len"] for b in server.bodies] == [0, 0] and server.bodies[0]["return_routed_experts"] is True
    for generation in generations:
        assert generation.routed_experts is not None and generation.routed_experts[:, 0].tolist() == [0, 1, 2, 3, 4]
    script = [always(one([5, 6], "abort", routed_experts=experts(0, 1, 2))), always(one([7, 8], routed_experts=experts(3, 4)))]
    async with scripted(*script) as (server, client):
        [generation] = await client.generate([request])
    assert server.bodies[1]["routed_experts_start_len"] == 3
    assert generation.routed_experts is not None and generation.routed_experts[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (None, "--enable-return-routed-experts"),
        ("no base64!", "cannot be decoded"),
        (experts(0, 1, 2), "12 routed experts for 5 positions"),
        ("", "0 routed experts for 5"),
    ],
)
async def test_routed_experts_that_cannot_be_right(encoded: str | None, message: str) -> None:
    async with scripted(always(one([5, 6, 7, 8], routed_experts=encoded))) as (_, client):
        with pytest.raises(ServerFault, match=message):
            await client.generate([replace(REQUEST, routed_experts=True)])


async def test_servers_without_spans_give_the_older_version() -> None:
    answer = one([5, 6], version="8")
    del answer["meta_info"]["weight_versions"]
    async with scripted(always(answer)) as (_, client):
        client._version = 7
        [generation] = await client.generate([GenerateRequest(input_ids=(1,), max_new_tokens=2)])
    assert generation.versions == (7, 7)


async def test_servers_without_spans_are_asked_for_their_version_before_each_request() -> None:
    answer = one([5, 6], version="8")
    del answer["meta_info"]["weight_versions"]
    async with scripted(lambda body: answer, always(answer)) as (server, client):
        server.version = "0"
        assert not (await client.probe()).version_spans
        server.version = "8"  # somebody else's sync
        [generation] = await client.generate([GenerateRequest(input_ids=(1,), max_new_tokens=2)])
    assert generation.versions == (8, 8)


async def test_recorded_sglang_answers_are_understood() -> None:
    recorded = [e for e in RECORDED if e["path"] == "/generate" and e["status"] == 200 and (e["request"] or {}).get("return_logprob")]
    used = 0
    for exchange in recorded:
        answers = exchange.get("answer")
        if answers is None or exchange["request"].get("rid", "") in ("r-long3", "r-long4"):
            continue
        answers = answers if isinstance(answers, list) else [answers]
        answers = [a for a in answers if a["meta_info"]["weight_version"] != "v2"]
        requests = [GenerateRequest(input_ids=(1,), max_new_tokens=60) for _ in answers]
        async with scripted(always(*answers)) as (_, client):
            generations = await client.generate(requests)
        for generation, answer in zip(generations, answers, strict=True):
            assert list(generation.output_ids) == answer["output_ids"] and generation.text == answer["text"]
            spans = answer["meta_info"]["weight_versions"]
            assert set(generation.versions) == {0 if s["version"] == "default" else int(s["version"]) for s in spans}
            used += 1
    assert used >= 4


async def test_an_old_server_has_no_sessions() -> None:
    async with scripted() as (server, client):
        client._sessions_known = False
        await client.begin_update()
        await client.end_update()
        assert server.calls == []
    async with scripted() as (server, client):
        assert await client._has_sessions()


async def test_disk_updates_keep_the_cache_of_frozen_requests() -> None:
    async with scripted() as (server, client):
        await client.update_from_disk("/m", 2)
        client._paused = "in_place"
        await client.update_from_disk("/m", 3)
    bodies = [body for path, body in server.calls if path == "/update_weights_from_disk"]
    assert [(b["weight_version"], b["flush_cache"]) for b in bodies] == [("2", True), ("3", False)]


async def test_the_embedded_server_from_probe_to_samples(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3_moe")
    with served(folder, "--weight-version", "0") as url:
        client = InferenceClient(url, timeout_s=60, retries=1)
        await client.wait_healthy(30)
        able = await client.probe()
        assert able.engine == "areal-mega-embedded" and able.weight_version == "0" and able.max_context == 512
        assert able.update_sessions and able.version_spans and able.hf_digests and not able.routed_experts
        requests = [GenerateRequest(input_ids=(5, 6, 7), max_new_tokens=12, seed=i) for i in range(4)]
        first, again = await client.generate(requests), await client.generate(requests[2:])
        assert [g.output_ids for g in first[2:]] == [g.output_ids for g in again]
        assert all(set(g.versions) == {0} and len(g.versions) == len(g.output_ids) == len(g.logprobs) for g in first)
        with pytest.raises(ServerFault, match="maximum context length of 512"):
            await client.generate([GenerateRequest(input_ids=(5,), max_new_tokens=512)])
        await client.close()
