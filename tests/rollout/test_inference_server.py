"""One suite for every server that speaks SGLang's protocol: the embedded one, a real SGLang, and the recording of a real SGLang.

See ``peers`` for how a real one is found and recorded. Two tiny Qwen3-MoE models stand for two versions of the weights; transformers says
what each token's log-probability under each of them is, so a token that was lost, repeated or given the wrong version shows.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import CONTEXT, DATA, ENV, GROUP, RECORDING, Peer, played_back, real_sglang, recorded_through
from served import served
from serving_trainer import Trainer, judged, routed
from tiny_models import tiny_model

from areal_mega.rollout.client import InferenceClient
from areal_mega.rollout.inference import GenerateRequest, Generation, PauseMode, ServerFault

PROMPT = (5, 6, 7, 8, 9, 10, 11)
WAIT_S = 120.0
EXACT = 1e-4
NUMBERS = itertools.count()
KINDS = ["embedded", "recorded", *["sglang"] * bool(ENV)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one model. No token ends a text, so that greedy answers are as long as asked for."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny_model(folder, "qwen3_moe", seed, max_position_embeddings=CONTEXT, eos_token_id=None) for seed in (0, 1)]


@pytest.fixture(scope="module", params=KINDS)
def live(request: pytest.FixtureRequest, models: list[Path]) -> Iterator[tuple[str, str]]:
    flags = ("--weight-version=0", "--enable-return-routed-experts")
    if request.param == "embedded":
        with served(models[0], *flags) as url:
            yield request.param, url
    elif request.param == "sglang":
        with real_sglang(models[0], "--dtype=float32", *flags) as url:
            yield request.param, url
    else:
        yield request.param, ""


@pytest.fixture
async def peer(live: tuple[str, str], request: pytest.FixtureRequest, models: list[Path]) -> AsyncIterator[Peer]:
    kind, url = live
    name = request.node.originalname + "".join(f"-{v}" for k, v in request.node.callspec.params.items() if k != "live")
    if kind == "recorded":
        async with played_back(name) as url:
            yield Peer(kind, url, live=False)
        return
    client = InferenceClient(url, timeout_s=WAIT_S, retries=0)
    await client.update_from_disk(str(models[0]), 0)  # every test begins with the same weights
    await client.close()
    if kind == "sglang" and RECORDING:
        async with recorded_through(url, name) as proxy:
            yield Peer(kind, proxy, live=True)
    else:
        yield Peer(kind, url, live=True)


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(peer.url, timeout_s=WAIT_S, retries=0)
    yield client
    await client.close()


@pytest.fixture
async def trainer(client: InferenceClient, peer: Peer) -> AsyncIterator[Trainer]:
    trainer = Trainer(client, f"{GROUP}-{next(NUMBERS)}", live=peer.live)
    await trainer.join()
    yield trainer
    await trainer.leave()


def ask(n: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"input_ids": PROMPT, "max_new_tokens": n, "temperature": 0.0, "seed": 7, **fields})


def check_logprobs(folder: Path, generation: Generation, temperature: float = 1.0, *, greedy: bool = False) -> None:
    expected, best = judged(folder, PROMPT, generation, temperature)
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=EXACT, rtol=0)
    if greedy:
        assert list(generation.output_ids) == best


async def test_what_the_server_can_do(peer: Peer, client: InferenceClient) -> None:
    await client.wait_healthy(60)
    able = await client.probe()
    assert (able.engine, able.version) == (("sglang", "0.5.23") if peer.is_sglang else ("areal-mega-embedded", able.version))
    assert able.weight_version == "0" and await client.weight_version() == 0
    assert able.max_context == (CONTEXT - 6 if peer.is_sglang else CONTEXT)
    assert able.update_sessions and able.version_spans and able.routed_experts and able.checksums
    assert (able.hf_digests is None) == peer.is_sglang and able.seeds is not peer.is_sglang


async def test_greedy_answers_are_those_of_transformers(client: InferenceClient, models: list[Path]) -> None:
    [generation] = await client.generate([ask(12)])
    assert generation.prompt_tokens == len(PROMPT) and generation.versions == (0,) * 12 and generation.finish_reason == "length"
    check_logprobs(models[0], generation, greedy=True)


async def test_samples_of_a_group(peer: Peer, client: InferenceClient, models: list[Path]) -> None:
    """Log-probabilities are of the scaled logits and of the whole vocabulary, whatever top-p and top-k cut off."""
    requests = [ask(10, temperature=0.7, top_p=0.9, top_k=50, seed=i) for i in range(6)]
    generations = await client.generate(requests)
    for generation in generations:
        assert 1 <= len(generation.output_ids) <= 10 and len(generation.versions) == len(generation.output_ids)
        check_logprobs(models[0], generation, 0.7)
    assert len({g.output_ids for g in generations}) == 6, "members of a group are samples of their own"
    if not peer.is_sglang:
        again = await client.generate(requests[::-1])
        assert [g.output_ids for g in again] == [g.output_ids for g in generations[::-1]], "a seed decides its sample"


async def test_stop_strings_and_tokens(client: InferenceClient) -> None:
    [plain] = await client.generate([ask(12)])
    third = plain.output_ids[2]
    first = plain.output_ids.index(third)
    [by_token] = await client.generate([ask(12, stop_token_ids=(third,))])
    assert by_token.finish_reason == "stop" and by_token.output_ids == plain.output_ids[: first + 1]
    word = plain.text[4:6]
    [by_word] = await client.generate([ask(12, stop=(word,))])
    assert by_word.finish_reason == "stop" and by_word.text == plain.text[: plain.text.index(word)]
    assert by_word.output_ids == plain.output_ids[: len(by_word.output_ids)] and len(by_word.output_ids) < 12


async def test_a_request_beyond_the_context_is_refused(client: InferenceClient) -> None:
    with pytest.raises(ServerFault, match=rf"answered 400: .*{CONTEXT}"):
        await client.generate([ask(CONTEXT)])


async def test_a_request_may_fill_the_context(client: InferenceClient) -> None:
    """What the probe found is what a sample may have, in one request or in two."""
    longest = (await client.probe()).max_context
    assert longest is not None
    prompt = (PROMPT * CONTEXT)[: longest - 20]
    [generation] = await client.generate([ask(20, input_ids=prompt)])
    assert len(generation.output_ids) == 20 and generation.finish_reason == "length"
    [rest] = await client.generate([ask(1, input_ids=(*prompt, *generation.output_ids[:19]))])
    assert rest.output_ids == generation.output_ids[19:]


async def test_aborted_requests_keep_their_tokens(client: InferenceClient, models: list[Path]) -> None:
    task = asyncio.create_task(client.generate([ask(CONTEXT - 50)]))
    await asyncio.sleep(0.5)
    while not task.done():  # an abort that comes before the request does nothing
        await client.abort_all()
        await asyncio.wait({task}, timeout=0.5)
    [generation] = task.result()
    assert generation.finish_reason == "abort" and len(generation.output_ids) < CONTEXT - 50
    check_logprobs(models[0], generation, greedy=True)


async def test_routed_experts(client: InferenceClient, models: list[Path]) -> None:
    one, two = await client.generate([ask(9, routed_experts=True), ask(5, routed_experts=True)])
    for generation in (one, two):
        ids = [*PROMPT, *generation.output_ids]
        assert generation.routed_experts is not None and generation.routed_experts.shape == (len(ids) - 1, 2 * 2)
        found = np.sort(generation.routed_experts.reshape(len(ids) - 1, 2, 2), -1)
        np.testing.assert_array_equal(found, routed(models[0], ids[:-1]).numpy())
    [plain] = await client.generate([ask(2)])
    assert plain.routed_experts is None


@pytest.mark.parametrize("flattened", [True, False])
async def test_weights_over_a_group(peer: Peer, client: InferenceClient, trainer: Trainer, models: list[Path], flattened: bool) -> None:
    before = await client.checksums()
    await client.pause("retract")
    await trainer.send(models[1], 11, flush_cache=True, flattened=flattened)
    await client.resume()
    assert await client.weight_version() == 11
    [generation] = await client.generate([ask(12)])
    assert set(generation.versions) == {11}
    check_logprobs(models[1], generation, greedy=True)
    sent = await client.checksums()
    assert sent.keys() == before.keys() and sent != before
    await client.update_from_disk(str(models[1]), 12)
    assert await client.weight_version() == 12 and await client.checksums() == sent, "the same weights by another way"


async def test_an_update_has_a_beginning_and_an_end(client: InferenceClient, trainer: Trainer) -> None:
    norm: dict[str, Any] = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    with pytest.raises(ServerFault, match="must run between begin_weight_update"):
        await client.update_bucket(**norm, group_name=trainer.name)
    with pytest.raises(ServerFault, match="answered 400"):
        await client.end_update()
    await client.begin_update()
    with pytest.raises(ServerFault, match="answered 400"):
        await client.begin_update()
    with pytest.raises(ServerFault, match="answered 400"):
        await client.update_bucket(**norm, group_name="none-of-this-name")
    await client.end_update()
    with pytest.raises(ServerFault, match="answered 400"):
        await client.destroy_group("none-of-this-name")


async def test_a_group_may_be_formed_anew(client: InferenceClient, trainer: Trainer, models: list[Path]) -> None:
    """As it is when another server has joined or died."""
    await trainer.leave()
    trainer.name += "-2"
    await trainer.join()
    await client.pause("retract")
    await trainer.send(models[1], 3, flush_cache=True)
    await client.resume()
    [generation] = await client.generate([ask(4)])
    assert set(generation.versions) == {3}
    check_logprobs(models[1], generation, greedy=True)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_an_update_in_mid_request(peer: Peer, client: InferenceClient, trainer: Trainer, models: list[Path], mode: PauseMode) -> None:
    """No token is lost or repeated, and each has the version of the weights that made it."""
    budget = 120 if peer.is_sglang else CONTEXT - 50
    for attempt in range(12):  # until a pause falls into the middle of a request
        version, old, new = attempt + 1, models[attempt % 2], models[(attempt + 1) % 2]
        tasks = [asyncio.create_task(client.generate([ask(budget, routed_experts=True), ask(budget // 2)]))]
        await asyncio.sleep(0.05 * (attempt + 1))  # a fast server is caught by the first tries, a slow one by any
        await client.pause(mode)
        waiting = asyncio.create_task(client.generate([ask(3)]))
        await trainer.send(new, version, flush_cache=mode != "in_place")
        await client.resume()
        (long, short), [late] = await asyncio.wait_for(tasks[0], WAIT_S), await asyncio.wait_for(waiting, WAIT_S)
        assert set(late.versions) == {version}
        assert (len(long.output_ids), len(short.output_ids)) == (budget, budget // 2)
        if len(set(long.versions)) == 2:
            break
    else:
        raise AssertionError("no pause fell into the middle of a request")
    for generation in (long, short):
        check_switch(generation, (version - 1, old), (version, new), kept_cache=mode == "in_place")
    assert long.routed_experts is not None and len(long.routed_experts) == len(PROMPT) + budget - 1


def check_switch(generation: Generation, before: tuple[int, Path], after: tuple[int, Path], *, kept_cache: bool) -> None:
    versions = list(generation.versions)
    assert versions == sorted(versions) and set(versions) <= {before[0], after[0]}
    switch = versions.count(before[0])
    for (_, folder), part in ((before, slice(0, switch)), (after, slice(switch, None))):
        if folder == after[1] and kept_cache:
            continue  # the new weights read keys of the old ones: nobody else can say what comes of that
        expected, best = judged(folder, PROMPT, generation)
        torch.testing.assert_close(torch.tensor(generation.logprobs[part]), expected[part], atol=EXACT, rtol=0)
        assert list(generation.output_ids[part]) == best[part]


async def test_a_paused_server_is_alive(client: InferenceClient) -> None:
    await client.pause("retract")
    task = asyncio.create_task(client.generate([ask(2)]))
    assert await client.weight_version() == 0
    await asyncio.sleep(0.5)
    assert not task.done(), "requests wait"
    await client.resume()
    [generation] = await asyncio.wait_for(task, WAIT_S)
    assert len(generation.output_ids) == 2


def test_every_recording_is_of_a_test_here() -> None:
    source = Path(__file__).read_text()
    names = {path.stem.partition("-")[0] for path in DATA.glob("*.json")}
    assert names and all(f"async def {name}(" in source for name in names)
