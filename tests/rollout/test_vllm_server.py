"""vLLM's client against a real vLLM (of a tied, an untied and a sparse model), and against the recording of one (of the tied model).

See ``vllm_peers`` for how a real one is found and recorded. Two tiny models stand for two versions of the weights; transformers says what
each token's log-probability under each of them is, so a token that was lost, repeated or given the wrong version shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import RECORDING, Peer, played_back, recorded_through
from safetensors.torch import load_file
from serving_trainer import Trainer, judged
from tiny_models import tiny_model
from vllm_peers import CONTEXT, DATA, ENV, VLLM, real_vllm

from areal_mega.rollout.inference import GenerateRequest, Generation, PauseMode, ServerFault
from areal_mega.rollout.vllm import VLLMClient
from areal_mega.sync.digest import combine, tensor_digest

PROMPT = (5, 6, 7, 8, 9, 10, 11)
EOS_ID = 1  # of tiny_tokenizer
WAIT_S = 300.0
EXACT = 1e-4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {}),
    "untied": ("llama", {"head_dim": 32}),
    "sparse": ("qwen3_moe", {"moe_intermediate_size": 48}),  # vLLM pads experts to multiples of 32 on a CPU
}
KINDS = ["recorded-tied", *[f"vllm-{name}" for name in MODELS if ENV]]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    server, _, model = request.param.partition("-")
    return server, model


@pytest.fixture(scope="module")
def models(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one model. Answers are as long as asked for: seeds are such that no greedy answer ends itself."""
    family, fields = MODELS[kind[1]]
    folder = tmp_path_factory.mktemp("models")
    return [tiny_model(folder, family, seed, max_position_embeddings=CONTEXT, eos_token_id=None, **fields) for seed in (0, 1)]


@pytest.fixture(scope="module")
def url(kind: tuple[str, str], models: list[Path]) -> Iterator[str]:
    if kind[0] == "recorded":
        yield ""
        return
    with real_vllm(models[0]) as url:
        yield url


@pytest.fixture
async def peer(kind: tuple[str, str], url: str, request: pytest.FixtureRequest, models: list[Path]) -> AsyncIterator[Peer]:
    name = request.node.originalname + "".join(f"-{v}" for k, v in request.node.callspec.params.items() if k != "kind")
    if kind[0] == "recorded":
        async with played_back(name, VLLM) as played:
            yield Peer(kind[0], played, live=False)
        return
    client = VLLMClient(url, timeout_s=WAIT_S, retries=0)
    await client.wait_healthy(WAIT_S)
    await client.update_from_disk(str(models[0]), 0)  # every test begins with the same weights
    await client.close()
    if RECORDING and kind[1] == "tied":
        async with recorded_through(url, name, VLLM) as proxy:
            yield Peer(kind[0], proxy, live=True)
    else:
        yield Peer(kind[0], url, live=True)


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[VLLMClient]:
    client = VLLMClient(peer.url, timeout_s=WAIT_S, retries=0)
    yield client
    await client.close()


@pytest.fixture
async def trainer(client: VLLMClient, peer: Peer) -> AsyncIterator[Trainer]:
    trainer = Trainer(client, "weights", live=peer.live)
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


async def test_what_the_server_can_do(client: VLLMClient) -> None:
    await client.wait_healthy(60)
    able = await client.probe()
    assert (able.engine, able.version, able.weight_version, able.max_context) == ("vllm", "0.32.0", "0", CONTEXT)
    assert able.update_sessions and able.version_spans and able.hf_digests and able.checksums and able.seeds
    assert not able.routed_experts and not able.several_groups
    with pytest.raises(ServerFault, match="routed experts were asked for"):
        await client.generate([ask(2, routed_experts=True)])


async def test_greedy_answers_are_those_of_transformers(client: VLLMClient, models: list[Path]) -> None:
    [generation] = await client.generate([ask(12)])
    assert generation.prompt_tokens == len(PROMPT) and generation.versions == (0,) * 12 and generation.finish_reason == "length"
    check_logprobs(models[0], generation, greedy=True)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.6, 1.0, -1), (1.8, 1.0, -1), (0.7, 0.9, 50), (1.4, 1.0, 5)])
async def test_logprobs_are_at_the_sampling_temperature_and_of_the_whole_vocabulary(
    client: VLLMClient, models: list[Path], temperature: float, top_p: float, top_k: int
) -> None:
    """Samples of a group: each has a seed of its own, and the same log-probabilities as the trainer will compute."""
    requests = [ask(10, temperature=temperature, top_p=top_p, top_k=top_k, seed=i) for i in range(4)]
    generations = await client.generate([*requests, ask(10)])
    for generation in generations[:4]:
        assert len(generation.output_ids) == 10
        check_logprobs(models[0], generation, temperature)
    check_logprobs(models[0], generations[4], greedy=True)  # in the batch of the others
    assert len({g.output_ids for g in generations}) == 5, "members of a group are samples of their own"
    again = await client.generate(requests[::-1])
    assert [g.output_ids for g in again] == [g.output_ids for g in generations[3::-1]], "a seed decides its sample"


async def test_stop_strings_and_tokens(client: VLLMClient) -> None:
    [plain] = await client.generate([ask(12)])
    third = plain.output_ids[2]
    first = plain.output_ids.index(third)
    [by_token] = await client.generate([ask(12, stop_token_ids=(third,))])
    assert by_token.finish_reason == "stop" and by_token.output_ids == plain.output_ids[: first + 1]
    assert plain.text.startswith(by_token.text) and len(by_token.text) < len(plain.text)
    word = plain.text[4:6]
    [by_word] = await client.generate([ask(12, stop=(word,))])
    assert by_word.finish_reason == "stop" and by_word.text == plain.text[: plain.text.index(word)]
    assert by_word.output_ids == plain.output_ids[: len(by_word.output_ids)] and len(by_word.output_ids) < 12


async def test_a_request_beyond_the_context_is_refused(client: VLLMClient) -> None:
    with pytest.raises(ServerFault, match=rf"answered 400: .*{CONTEXT}"):
        await client.generate([ask(CONTEXT + 1, input_ids=PROMPT * 200)])


async def test_aborted_requests_keep_their_tokens(client: VLLMClient, models: list[Path]) -> None:
    task = asyncio.create_task(client.generate([ask(CONTEXT - 50)]))
    await asyncio.sleep(0.5)
    while not task.done():  # an abort that comes before the request does nothing
        await client.abort_all()
        await asyncio.wait({task}, timeout=0.5)
    [generation] = task.result()
    assert generation.finish_reason == "abort" and len(generation.output_ids) < CONTEXT - 50
    check_logprobs(models[0], generation, greedy=True)


@pytest.mark.parametrize("flattened", [True, False])
async def test_weights_over_a_group(client: VLLMClient, trainer: Trainer, models: list[Path], flattened: bool) -> None:
    before = await client.checksums()
    await client.pause("retract")
    await trainer.send(models[1], 11, flush_cache=True, flattened=flattened)
    await client.resume()
    assert await client.weight_version() == 11
    [generation] = await client.generate([ask(12)])
    assert set(generation.versions) == {11}
    check_logprobs(models[1], generation, greedy=True)
    held = await client.digests("sums")
    digests = {name: tensor_digest(tensor) for name, tensor in load_file(models[1] / "model.safetensors").items()}
    assert (held.weight_version, held.tensors, held.combined) == (11, digests, combine(digests))
    sent = await client.checksums()
    assert sent.keys() == before.keys() and sent != before
    await client.update_from_disk(str(models[1]), 12)
    assert (await client.digests("sums")).combined == held.combined and await client.checksums() == sent, "the same weights by another way"
    [generation] = await client.generate([ask(12)])
    assert set(generation.versions) == {12}
    check_logprobs(models[1], generation, greedy=True)


async def test_an_update_has_a_beginning_and_an_end(client: VLLMClient, trainer: Trainer) -> None:
    norm: dict[str, Any] = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    with pytest.raises(ServerFault, match="start_weight_update must be called"):
        await client.update_bucket(**norm, group_name=trainer.name)
    with pytest.raises(ServerFault, match="without a matching start_weight_update"):
        await client.end_update()
    await client.begin_update()
    with pytest.raises(ServerFault, match="already active"):
        await client.begin_update()
    with pytest.raises(ServerFault, match="it is not in the weight-sync group 'none-of-this-name'"):
        await client.update_bucket(**norm, group_name="none-of-this-name")
    await client.end_update()
    with pytest.raises(ServerFault, match="it is not in the weight-sync group 'none-of-this-name'"):
        await client.destroy_group("none-of-this-name")


async def test_a_group_may_be_formed_anew(client: VLLMClient, trainer: Trainer, models: list[Path]) -> None:
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
async def test_an_update_in_mid_request(client: VLLMClient, trainer: Trainer, models: list[Path], mode: PauseMode) -> None:
    """No token is lost or repeated, budgets count what was generated before, and each token has the version of its weights."""
    budget = 300
    for attempt in range(12):  # until a pause falls into the middle of a request
        version, old, new = attempt + 1, models[attempt % 2], models[(attempt + 1) % 2]
        asked = [ask(budget), ask(budget // 2), ask(budget, temperature=0.8, seed=attempt)]
        running = asyncio.create_task(client.generate(asked))
        await asyncio.sleep(0.1 * (attempt + 1))
        await client.pause(mode)
        waiting = asyncio.create_task(client.generate([ask(3)]))
        await trainer.send(new, version, flush_cache=mode != "in_place")
        await client.resume()
        generations, [late] = await asyncio.wait_for(running, WAIT_S), await asyncio.wait_for(waiting, WAIT_S)
        assert set(late.versions) == {version}
        for request, generation in zip(asked, generations, strict=True):
            # vLLM stops at the tokenizer's end of sequence too, which a sample may draw: once in some hundred tokens here.
            drawn = request.temperature > 0 and generation.finish_reason == "stop" and generation.output_ids[-1] == EOS_ID
            assert drawn or len(generation.output_ids) == request.max_new_tokens, generation
        if all(len(set(g.versions)) == 2 for g in generations):
            break
    else:
        raise AssertionError("no pause fell into the middle of the requests")
    for request, generation in zip(asked, generations, strict=True):
        check_switch(generation, (version - 1, old), (version, new), request.temperature, kept_cache=mode == "in_place")
    switch = generations[2].versions.count(version - 1)
    assert generations[2].output_ids[:switch] != generations[2].output_ids[switch : 2 * switch], "the noise of a seed comes once"


def check_switch(
    generation: Generation, before: tuple[int, Path], after: tuple[int, Path], temperature: float, *, kept_cache: bool
) -> None:
    versions = list(generation.versions)
    assert versions == sorted(versions) and set(versions) <= {before[0], after[0]}
    switch = versions.count(before[0])
    for (_, folder), part in ((before, slice(0, switch)), (after, slice(switch, None))):
        if folder == after[1] and kept_cache:
            continue  # the new weights read keys of the old ones: nobody else can say what comes of that
        expected, best = judged(folder, PROMPT, generation, temperature)
        torch.testing.assert_close(torch.tensor(generation.logprobs[part]), expected[part], atol=EXACT, rtol=0)
        if temperature == 0:
            assert list(generation.output_ids[part]) == best[part]


async def test_a_paused_server_is_alive(client: VLLMClient) -> None:
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
