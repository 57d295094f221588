"""Weights over a gloo group into a running server: digests equal, tokens kept, versions right, in every pause mode."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from served import served
from tiny_models import tiny_model

from areal_mega.rollout.client import InferenceClient
from areal_mega.rollout.inference import GenerateRequest, ServerFault
from areal_mega.serving.weights import DIGESTS
from areal_mega.sync.digest import combine, tensor_digest
from areal_mega.sync.group import create_group, destroy_group

NAMES = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), "qwen3_moe", eos_token_id=None)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with served(model, "--weight-version", "0", "--dist-timeout", "8") as url:
        yield url


@asynccontextmanager
async def joined(url: str) -> AsyncIterator[tuple[InferenceClient, dist.ProcessGroup, str]]:
    """A client and this process as the trainer, rank 0 of a new group with the server."""
    client, name, port = InferenceClient(url, timeout_s=60, retries=0), f"weights-{next(NAMES)}", free_port()
    trainer = asyncio.to_thread(create_group, address="127.0.0.1", port=port, rank=0, world_size=2, name=name, backend="gloo", timeout_s=30)
    server = client.init_group(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=name, backend="gloo")
    group, _ = await asyncio.gather(trainer, server)
    try:
        yield client, group, name
    finally:
        await client.resume()
        await client.destroy_group(name)
        if group in dist.distributed_c10d._world.pg_map:  # a test may have left it already
            destroy_group(group)
        await client.close()


def changed(model: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in load_file(model / "model.safetensors").items()}


async def send(client: InferenceClient, group: dist.ProcessGroup, name: str, weights: dict[str, torch.Tensor], **how: object) -> None:
    """One bucket, flat or tensor by tensor."""
    flat = bool(how.get("flattened", True))

    def broadcast() -> None:
        if flat:
            dist.broadcast(torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in weights.values()]), src=0, group=group)
        else:
            for tensor in weights.values():
                dist.broadcast(tensor.contiguous(), src=0, group=group)

    update = client.update_bucket(
        names=list(weights),
        dtypes=[str(t.dtype).removeprefix("torch.") for t in weights.values()],
        shapes=[list(t.shape) for t in weights.values()],
        group_name=name,
        **how,  # type: ignore[arg-type]
    )
    await asyncio.gather(update, asyncio.to_thread(broadcast))


def digest_of(weights: dict[str, torch.Tensor]) -> str:
    return combine({name: tensor_digest(t, DIGESTS) for name, t in weights.items()})


@pytest.mark.parametrize("flattened", [True, False])
async def test_the_server_holds_exactly_what_was_sent(url: str, model: Path, flattened: bool) -> None:
    weights = changed(model, 1 + flattened)
    async with joined(url) as (client, group, name):
        await client.pause("retract")
        await client.begin_update()
        items = list(weights.items())
        await send(client, group, name, dict(items[:20]), flattened=flattened)
        await send(client, group, name, dict(items[20:]), flattened=flattened, version=11, flush_cache=True)
        await client.end_update()
        held, samples = await client.digests(DIGESTS), await client.digests("xxh3-sampled")
        with pytest.raises(ServerFault, match="digests must be 'xxh3' or 'xxh3-sampled', got 'sums'"):
            await client.digests("sums")
    assert held.weight_version == samples.weight_version == 11
    assert samples.tensors == {n: tensor_digest(t, "xxh3-sampled") for n, t in weights.items()}
    assert held.combined == digest_of(weights)
    assert held.tensors == {n: tensor_digest(t, DIGESTS) for n, t in weights.items()}


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_requests_in_flight_go_on_under_the_new_version(url: str, model: Path, mode: str) -> None:
    requests = [
        GenerateRequest(input_ids=tuple(range(5, 5 + 3 * (1 + i // 4))), max_new_tokens=400, seed=i, temperature=1.0) for i in range(12)
    ]
    async with joined(url) as (client, group, name):
        await client.update_from_disk(str(model), 20)
        before = load_file(model / "model.safetensors")
        task = asyncio.create_task(client.generate(requests))
        await wait_for_tokens(client)
        await client.pause(mode)  # type: ignore[arg-type]
        weights = changed(model, 7)
        await client.begin_update()
        await send(client, group, name, weights, version=21, flush_cache=mode != "in_place")
        await client.end_update()
        assert not task.done()
        await client.resume()
        generations = await asyncio.wait_for(task, 60)
        held = await client.digests(DIGESTS)
    assert held.combined == digest_of(weights)
    for request, generation in zip(requests, generations, strict=True):
        assert generation.finish_reason == "length" and len(generation.output_ids) == 400
        assert set(generation.versions) == {20, 21} and list(generation.versions) == sorted(generation.versions)
        if mode != "in_place":  # there, the new weights read keys of the old ones
            switch = generation.versions.index(21)
            check_logprobs(model, before, request, generation, 0, switch)
            check_logprobs(model, weights, request, generation, switch, 400)


async def wait_for_tokens(client: InferenceClient, requests: int = 12, tokens: int = 500) -> None:
    """Until the batch has run for some steps."""
    for _ in range(2000):
        state = (await client._transport.request("GET", "/server_info"))["internal_states"][0]
        if state["running"] == requests and state["cached_tokens"] > tokens:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("generation did not get going")


def check_logprobs(model: Path, weights: dict[str, torch.Tensor], request, generation, start: int, end: int) -> None:  # type: ignore[no-untyped-def]
    """Tokens [start, end) have the log-probabilities of these weights."""
    from transformers import AutoModelForCausalLM

    path = model.parent / "reference"
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text((model / "config.json").read_text())
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[*request.input_ids, *generation.output_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(ids).logits[0].float(), -1)
    n = len(request.input_ids)
    expected = logprobs[n - 1 : -1].gather(1, ids[0, n:, None]).squeeze(1)[start:end]
    torch.testing.assert_close(torch.tensor(generation.logprobs[start:end]), expected, atol=1e-4, rtol=0)


async def test_without_a_pause_an_update_waits_for_running_requests(url: str, model: Path) -> None:
    request = GenerateRequest(input_ids=(7, 8, 9), max_new_tokens=120, seed=3)
    async with joined(url) as (client, group, name):
        await client.update_from_disk(str(model), 30)
        task = asyncio.create_task(client.generate([request]))
        await wait_for_tokens(client, requests=1, tokens=5)
        await client.begin_update()
        await send(client, group, name, changed(model, 9), version=31, flush_cache=True)
        await client.end_update()
        [first] = await task
        [second] = await client.generate([request])
    assert set(first.versions) == {30} and set(second.versions) == {31}


async def test_nothing_is_generated_between_two_buckets(url: str, model: Path) -> None:
    weights = changed(model, 4)
    items = list(weights.items())
    async with joined(url) as (client, group, name):
        await client.begin_update()
        await send(client, group, name, dict(items[:10]))
        task = asyncio.create_task(client.generate([GenerateRequest(input_ids=(5,), max_new_tokens=1)]))
        await asyncio.sleep(0.3)
        assert not task.done()
        await send(client, group, name, dict(items[10:]), version=41)
        await client.end_update()
        [generation] = await asyncio.wait_for(task, 30)
    assert generation.versions == (41,)


async def test_a_wrong_request_is_refused_before_anything_is_received(url: str) -> None:
    async with joined(url) as (client, _, name):
        tensor = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": name}
        with pytest.raises(ServerFault, match="must run between begin_weight_update"):
            await client.update_bucket(**tensor)
        await client.begin_update()
        with pytest.raises(ServerFault, match="already open"):
            await client.begin_update()
        for change, message in [
            ({"names": ["model.nrom.weight"]}, "no parameter of this qwen3_moe model"),
            ({"shapes": [[63]]}, r"shape \[63\], the model has \[64\]"),
            ({"dtypes": ["float7"]}, "dtype float7"),
            ({"group_name": "nope"}, "Group nope not in"),
            ({"names": [], "dtypes": [], "shapes": []}, "bucket is empty"),
            ({"dtypes": []}, "do not match"),
        ]:
            with pytest.raises(ServerFault, match=message):
                await client.update_bucket(**{**tensor, **change})
        await client.end_update()
        with pytest.raises(ServerFault, match="no weight-update session"):
            await client.end_update()
        with pytest.raises(ServerFault, match="does not exist"):
            await client.destroy_group("nope")


async def test_a_run_with_one_wrong_bucket_is_refused_before_anything_is_received(url: str) -> None:
    async with joined(url) as (client, _, name):
        before = await client.digests(DIGESTS)
        right = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": name}
        await client.begin_update()
        for wrong, message in [
            ({**right, "names": ["model.nrom.weight"]}, "no parameter of this qwen3_moe model"),
            ({**right, "shapes": [[63]]}, r"shape \[63\], the model has \[64\]"),
            ({**right, "dtypes": ["float7"]}, "dtype float7"),
            ("model.norm.weight", "each must be a JSON object"),
            (None, "each must be a JSON object"),
            ({**right, "names": [["model.norm.weight"]]}, "must be strings"),
            ({**right, "shapes": [64]}, "must be lists of integers"),
        ]:
            body = {"buckets": [right, wrong], "load_format": "flattened_bucket", "weight_version": "61"}
            with pytest.raises(ServerFault, match=message):
                await client._transport.request("POST", "/update_weights_from_distributed", body)
        await client.end_update()  # nobody sent anything: the first bucket would have been waited for in vain
        assert await client.digests(DIGESTS) == before
        [generation] = await client.generate([GenerateRequest(input_ids=(5,), max_new_tokens=1)])
        assert len(generation.output_ids) == 1


async def test_a_trainer_that_dies_leaves_a_server_that_says_so_and_heals(url: str, model: Path) -> None:
    async with joined(url) as (client, group, name):
        await client.begin_update()
        destroyed = asyncio.to_thread(destroy_group, group)
        update = client.update_bucket(names=["model.norm.weight"], dtypes=["float32"], shapes=[[64]], group_name=name, version=51)
        answers = await asyncio.gather(update, destroyed, return_exceptions=True)
        assert isinstance(answers[0], ServerFault) and "Failed to receive weights" in str(answers[0])
        with pytest.raises(ServerFault, match="the weights are incomplete"):
            await client.end_update()
        request = GenerateRequest(input_ids=(5,), max_new_tokens=1)
        with pytest.raises(ServerFault, match="no generation: the weights are incomplete: Failed to receive"):
            await client.generate([request])
        await client.resume()
        with pytest.raises(ServerFault, match="no generation"):
            await client.generate([request])
        await client.update_from_disk(str(model), 52)
        [generation] = await client.generate([request])
        assert generation.versions == (52,)


async def test_after_a_failed_update_only_a_complete_one_lets_a_server_generate(url: str, model: Path) -> None:
    request, weights = GenerateRequest(input_ids=(5, 6), max_new_tokens=4, seed=1), changed(model, 12)
    async with joined(url) as (client, group, name):
        await client.begin_update()
        await send(client, group, name, dict(list(weights.items())[:5]))
    async with joined(url) as (client, group, name):
        with pytest.raises(ServerFault, match="left in the midst of an update"):
            await client.end_update()
        items = list(weights.items())
        await client.begin_update()
        await send(client, group, name, dict(items[:20]), version=53)
        with pytest.raises(ServerFault, match=f"left out {len(items) - 20} of {len(items)} tensors"):
            await client.end_update()
        with pytest.raises(ServerFault, match="no generation"):
            await client.generate([request])
        await client.begin_update()
        await send(client, group, name, dict(items[:20]))
        await send(client, group, name, dict(items[20:]), version=54)
        await client.end_update()
        [generation] = await client.generate([request])
        assert set(generation.versions) == {54}
        assert (await client.digests(DIGESTS)).combined == digest_of(weights)
