"""Requests that a real SGLang 0.5.23 has answered, sent to the embedded server: same status, same keys, same types.

``tests/data/sglang_answers.json`` holds the recorded exchanges (SmolLM2-135M and a tiny Qwen3-MoE on a CPU). Token ids are folded into
the test model's vocabulary; numbers and texts differ, of course.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from served import served
from tiny_models import VOCAB_SIZE, tiny_model

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data" / "sglang_answers.json").read_text())
MESSAGES_DIFFER = {"/pause_generation", "/init_weights_update_group"}
"""Answers of SGLang's validator quote its own source; the form is kept."""


def named(exchange: dict[str, Any]) -> str:
    return f"{exchange['path'].strip('/')}-{exchange['status']}-{RECORDED.index(exchange)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tiny_model(tmp_path_factory.mktemp("conformance"), "qwen3_moe", max_position_embeddings=2048)
    with served(folder, "--enable-return-routed-experts") as url:
        yield url, folder


def adapted(request: Any, folder: Path) -> Any:
    """The recorded request for the test's model: its folder, its vocabulary."""
    if isinstance(request, dict):
        return {k: str(folder) if k == "model_path" else v if k == "sampling_params" else adapted(v, folder) for k, v in request.items()}
    if isinstance(request, list) and request and isinstance(request[0], int):
        return [max(3, token % VOCAB_SIZE) for token in request]
    if isinstance(request, list):
        return [adapted(item, folder) for item in request]
    return request


def same_form(ours: Any, theirs: Any, where: str = "answer") -> None:
    """Every key of theirs, with a value of the same type; their null says nothing of the type."""
    if theirs is None or (where.endswith(NULLABLE) and ours is None):
        return
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), where
        if where.endswith("finish_reason"):
            assert ours["type"] in ("stop", "length", "abort")
            return
        if where.endswith("logprobs.top_logprobs[0]"):  # keyed by the token's text
            return
        missing = theirs.keys() - ours.keys()
        assert not missing, f"{where} lacks {sorted(missing)}"
        for key, value in theirs.items():
            same_form(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert isinstance(ours, list), where
        if theirs and ours:
            pairs = zip(ours, theirs, strict=True) if len(ours) == len(theirs) <= 3 else [(ours[0], theirs[0])]
            for i, (a, b) in enumerate(pairs):
                same_form(a, b, f"{where}[{i}]")
    else:
        number = isinstance(theirs, int | float) and not isinstance(theirs, bool)
        assert isinstance(ours, int | float if number else type(theirs)), f"{where}: {ours!r} for {theirs!r}"


async def sent(url: str, folder: Path, exchange: dict[str, Any]) -> tuple[int, str]:
    body = adapted(exchange["request"], folder)
    async with aiohttp.ClientSession() as http, http.request(exchange["method"], url + exchange["path"], json=body) as response:
        return response.status, await response.text()


NULLABLE = ("cached_tokens_details", "matched_stop")
SESSION = ("/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update")
"""Sense only in their order: test_an_update_session."""
LONG = [e for e in RECORDED if (e["request"] or {}).get("rid", "").startswith("r-long")]


STANDALONE = [
    e
    for e in RECORDED
    if e not in LONG
    and e["path"] not in SESSION
    and (e["path"], e["status"]) not in [("/destroy_weights_update_group", 200), ("/flush_cache", 400)]  # need a group, a running request
]


@pytest.mark.parametrize("exchange", STANDALONE, ids=named)
async def test_a_recorded_request(server: tuple[str, Path], exchange: dict[str, Any]) -> None:
    url, folder = server
    status, text = await sent(url, folder, exchange)
    assert status == exchange["status"], text
    if "events" in exchange:
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        assert text.endswith("data: [DONE]\n\n") and len(events) == exchange["request"]["sampling_params"]["max_new_tokens"]
        for ours, theirs in zip(events, exchange["events"], strict=False):
            same_form(ours, theirs)
        lengths = [len(e["output_ids"]) for e in events]
        assert lengths == sorted(set(lengths)), "events are cumulative"
    elif "text" in exchange:
        assert text.split("\n")[0] == exchange["text"]
    else:
        same_form(json.loads(text), exchange["answer"])
        if status == 400 and exchange["path"] not in MESSAGES_DIFFER:
            assert json.loads(text) == exchange["answer"]
        check_generation(exchange, json.loads(text))


def check_generation(exchange: dict[str, Any], answer: Any) -> None:
    if exchange["path"] != "/generate" or exchange["status"] != 200:
        return
    for ours in answer if isinstance(answer, list) else [answer]:
        meta, ids = ours["meta_info"], ours["output_ids"]
        assert meta["completion_tokens"] == len(ids)
        if exchange["request"].get("return_logprob"):
            assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
        if exchange["request"].get("return_routed_experts"):
            start = exchange["request"].get("routed_experts_start_len", 0)
            positions = meta["prompt_tokens"] + len(ids) - 1 - start
            assert len(base64.b64decode(meta["routed_experts"])) == 4 * positions * 2 * 2


async def test_an_update_session(server: tuple[str, Path]) -> None:
    session = [e for e in RECORDED if e["path"] in SESSION]
    assert [e["status"] for e in session] == [200, 400, 400, 200, 400]
    for exchange in session:
        status, text = await sent(*server, exchange)
        assert (status, json.loads(text)) == (exchange["status"], exchange["answer"])


@pytest.mark.parametrize("exchange", [e for e in LONG if e["path"] == "/generate" and "answer" in e], ids=lambda e: e["request"]["rid"])
async def test_an_interrupted_request(server: tuple[str, Path], exchange: dict[str, Any]) -> None:
    """r-long goes through a pause in place; r-long3 ends by a pause with abort; r-long4 by an abort of its own."""
    url, folder = server
    request = exchange["request"] | {"sampling_params": exchange["request"]["sampling_params"] | {"max_new_tokens": 1900}}
    task = asyncio.create_task(sent(url, folder, exchange | {"request": request}))
    flush = next(e for e in RECORDED if e["path"] == "/flush_cache" and e["status"] == 400)
    for _ in range(500):  # until it runs
        if (await sent(url, folder, flush))[0] == 400:
            break
        await asyncio.sleep(0.01)
    rid = request["rid"]
    calls = {
        "r-long": [("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})],
        "r-long3": [("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})],
        "r-long4": [("/abort_request", {"rid": rid})],
    }[rid]
    for path, body in calls:
        assert (await sent(url, folder, {"method": "POST", "path": path, "request": body}))[0] == 200
    status, text = await asyncio.wait_for(task, 60)
    answer = json.loads(text)
    assert status == 200
    same_form(answer, exchange["answer"])
    reason = answer["meta_info"]["finish_reason"]
    if rid == "r-long":
        assert reason["type"] == "length" and len(answer["output_ids"]) == 1900
    else:
        assert reason == exchange["answer"]["meta_info"]["finish_reason"] and len(answer["output_ids"]) < 1900


async def test_a_client_that_hangs_up_aborts_its_request(server: tuple[str, Path]) -> None:
    url, _ = server
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    async with aiohttp.ClientSession() as http:
        for stream in (False, True):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4), http.post(url + "/generate", json=body | {"stream": stream}) as response:
                    await response.read()
            for _ in range(500):
                async with http.get(url + "/server_info") as response:
                    if (await response.json())["internal_states"][0]["running"] == 0:
                        break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("the request still runs")


async def test_a_paused_server_says_so_and_makes_requests_wait(server: tuple[str, Path]) -> None:
    url, folder = server

    async def status(method: str, path: str, body: Any = None) -> int:
        return (await sent(url, folder, {"method": method, "path": path, "request": body}))[0]

    assert await status("POST", "/pause_generation", {"mode": "retract"}) == 200
    assert await status("GET", "/ready") == 503 and await status("GET", "/health") == 200
    task = asyncio.create_task(status("POST", "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}))
    await asyncio.sleep(0.2)
    assert not task.done()
    assert await status("POST", "/continue_generation", {}) == 200
    assert await asyncio.wait_for(task, 30) == 200 and await status("GET", "/ready") == 200
