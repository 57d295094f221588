"""The rollout worker behind its RPC server, first on a controlled engine, then on the embedded inference server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_fakes import FakeEngine, prompts, tickets
from tiny_models import tiny_model, tiny_tokenizer

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.core.types import Group, sampling_seed
from areal_mega.rollout.client import InferenceClient
from areal_mega.rollout.inference import Capabilities, ServerFault
from areal_mega.rollout.results import EpisodeResult
from areal_mega.rollout.worker import RolloutWorker, settings_for
from areal_mega.rpc.client import RpcClient
from areal_mega.rpc.errors import RpcError
from areal_mega.rpc.fetch import unbundle
from areal_mega.rpc.server import RpcServer

CALL_S = 120.0
ARITHMETIC = "areal_mega.rewards.arithmetic.arithmetic_reward"


def recipe(model: Path, *, reward: str = ARITHMETIC, **sections: Any) -> Recipe:
    base: dict[str, Any] = {
        "run": {"name": "run", "steps": 1, "seed": 7},
        "model": {"path": str(model), "dtype": "fp32"},
        "reward": {"path": reward, "timeout_s": 60.0},
        "rollout": {"group_size": 4, "max_new_tokens": 12, "dtype": "fp32"},
        "eval": {"samples": 2, "max_new_tokens": 6},
    }
    return Recipe.model_validate({**base, **sections})


@asynccontextmanager
async def serving(the_recipe: Recipe) -> AsyncIterator[tuple[RolloutWorker, RpcClient]]:
    """A started worker and a client of it."""
    server = RpcServer("token", "rollout rank 0")
    address = await server.start("127.0.0.1")
    worker, client = (
        RolloutWorker(the_recipe, address=address, spill=Path(the_recipe.run.root) / "spill"),
        RpcClient(address, "token", "rollout rank 0"),
    )
    try:
        await worker.start()
        worker.register(server)
        yield worker, client
    finally:
        await client.close()
        await worker.close()
        await server.stop()


async def collect(client: RpcClient, n: int, purpose: str = "train") -> dict[str, EpisodeResult]:
    out: list[EpisodeResult] = []
    async with asyncio.timeout(CALL_S):
        while len(out) < n:
            out += await client.call("collect", max_groups=n, wait_s=1.0, purpose=purpose, timeout_s=CALL_S)
    return {r.prompt.id: r for r in out}


async def fetch(client: RpcClient, group: Group) -> list[dict[str, np.ndarray]]:
    """The arrays of each sample, checked against their handles."""
    out = []
    for sample in group.samples:
        handles = list(sample.tensors.values())
        assert {h.owner for h in handles} == {client.address}
        arrays = unbundle(await client.call("fetch", keys=[h.key for h in handles], timeout_s=CALL_S), handles)
        assert [(a.shape, str(a.dtype), a.nbytes) for a in arrays] == [(h.shape, h.dtype, h.nbytes) for h in handles]
        out.append(dict(zip(sample.tensors, arrays, strict=True)))
    return out


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


async def test_groups_cross_the_wire_and_are_released(tokenizer_folder: Path) -> None:
    async with serving(recipe(tokenizer_folder)) as (worker, client):
        engine = FakeEngine(version=3)
        worker.use(engine)
        assert await client.call("submit", prompts=tickets(prompts(3)), step=2, timeout_s=CALL_S) == 3
        results = await collect(client, 3)
        assert {i: r.outcome for i, r in results.items()} == {"p0": "group", "p1": "group", "p2": "group"}
        group = results["p1"].group
        assert group is not None and group.worker == client.address and group.prompt == prompts(2)[1]
        assert [(s.id.step, s.id.member, s.oldest_version) for s in group.samples] == [(2, m, 3) for m in range(4)]
        arrays = await fetch(client, group)
        assert all(a["versions"][a["loss_mask"]].tolist() == [3] * 4 for a in arrays)

        before = (await client.call("status", timeout_s=CALL_S))["store"]
        assert before["arrays"] == 3 * 4 * 4
        keys = [h.key for r in results.values() if r.group for s in r.group.samples for h in s.tensors.values()]
        assert await client.call("release", keys=keys, timeout_s=CALL_S) == before["nbytes"]
        status = await client.call("status", timeout_s=CALL_S)
        assert status["store"] == {"arrays": 0, "nbytes": 0, "spilled": 0}
        assert status["counts"]["train/group"] == 3 and status["counts"]["train/tokens"] == 3 * 4 * 4
        assert sum(status["rewards"].values()) == 12
        with pytest.raises(RpcError, match="not in the store"):
            await client.call("fetch", keys=keys[:1], timeout_s=CALL_S)


async def test_evaluation_samples_by_its_own_settings(tokenizer_folder: Path) -> None:
    async with serving(recipe(tokenizer_folder)) as (worker, client):
        engine = FakeEngine()
        worker.use(engine)
        await client.call("submit", prompts=tickets(prompts(2)), step=0, purpose="eval", timeout_s=CALL_S)
        results = await collect(client, 2, "eval")
        assert {(r.temperature, r.max_new_tokens) for r in engine.asked} == {(0.0, 6)}
        for result in results.values():
            assert result.purpose == "eval" and result.group is not None
            assert [dict(s.tensors) for s in result.group.samples] == [{}, {}]
            assert all("parsed" in s.scores for s in result.group.samples)
        assert (await client.call("status", timeout_s=CALL_S))["store"]["arrays"] == 0
        assert await client.call("collect", max_groups=1, wait_s=0.0, timeout_s=CALL_S) == []


async def test_queues_and_the_longest_running_are_known(tokenizer_folder: Path) -> None:
    class Stuck(FakeEngine):
        async def generate(self, requests: Any) -> Any:
            await asyncio.Event().wait()

    async with serving(recipe(tokenizer_folder, rollout={"max_concurrent_prompts": 1})) as (worker, client):
        worker.use(Stuck())
        await client.call("submit", prompts=tickets(prompts(3)), step=0, timeout_s=CALL_S)
        await asyncio.sleep(0.05)
        status = await client.call("status", timeout_s=CALL_S)
        assert status["queues"]["train"] == {"waiting": 2, "running": 1, "finished": 0}
        assert status["oldest"][0][0] == "p0"


async def test_a_server_that_goes_while_its_worker_resumes_is_not_generated_with(tokenizer_folder: Path) -> None:
    """It is healthy again later, with weights that nobody has sent it."""

    class Server(FakeEngine):
        healthy = asyncio.Event()

        async def wait_healthy(self, deadline_s: float) -> None:
            await self.healthy.wait()

        async def probe(self) -> None: ...

        async def close(self) -> None: ...

    async with serving(recipe(tokenizer_folder)) as (worker, client):
        server: Any = Server()
        worker.use(server)
        worker._client = server
        await worker.suspend()
        resuming = asyncio.create_task(worker.resume(60.0))
        await asyncio.sleep(0)
        await worker.suspend()
        server.healthy.set()
        await resuming
        await client.call("submit", prompts=tickets(prompts(1)), step=0, timeout_s=CALL_S)
        await asyncio.sleep(0.05)
        assert server.asked == []
        await worker.resume(60.0)
        assert set(await collect(client, 1)) == {"p0"}


async def test_mistakes_of_the_user_reach_the_caller_as_such(tokenizer_folder: Path, tmp_path: Path) -> None:
    plain = tiny_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    chat = prompts(1)[0]
    chat = type(chat)(id="c", epoch=0, row={"id": "c", "messages": [{"role": "user", "content": "x"}], "answer": "1"})
    async with serving(recipe(tmp_path)) as (worker, client):
        worker.use(FakeEngine())
        await client.call("submit", prompts={0: chat}, step=0, timeout_s=CALL_S)
        with pytest.raises(UserError, match="no chat template"):
            await client.call("collect", max_groups=1, wait_s=CALL_S, timeout_s=CALL_S)
    for wrong in ({"reward": "areal_mega.rewards.nothing"}, {"workflow": {"path": "areal_mega.nothing.Workflow"}}):
        with pytest.raises(UserError):
            async with serving(recipe(tokenizer_folder, **wrong)):
                pass


def test_settings_of_each_purpose() -> None:
    the_recipe = recipe(Path("m"), rollout={"stop": ["\n"], "top_k": 5, "max_new_tokens": 9}, eval={"samples": 3, "temperature": 0.5})
    train, evaluation = settings_for(the_recipe, "train"), settings_for(the_recipe, "eval")
    assert (train.group_size, train.temperature, train.max_new_tokens, train.top_k, train.stop) == (8, 1.0, 9, 5, ("\n",))
    assert (evaluation.group_size, evaluation.temperature, evaluation.max_new_tokens) == (3, 0.5, 9)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), "qwen3_moe")


@asynccontextmanager
async def embedded_server(folder: Path) -> AsyncIterator[str]:
    """The embedded inference server as a process of its own; gives its base URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal_mega.serving", str(folder), "--port", "0", "--dtype", "float32", "--weight-version", "5"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            while b"http://" not in (line := await process.stdout.readline()):
                assert line, "the server ended before it listened"
        yield line.decode().split()[-1]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def reference_logprobs(folder: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """log p(token t | tokens before t) by transformers in fp32; index 0 is 0."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    with torch.inference_mode():
        for ids in sequences:
            ids_t = torch.from_numpy(ids.astype(np.int64))
            logprobs_tv = model(ids_t[None]).logits[0].log_softmax(-1)
            out.append(np.concatenate([[0.0], logprobs_tv[:-1].gather(1, ids_t[1:, None])[:, 0].numpy()]))
    return out


async def test_groups_from_the_embedded_server(model_folder: Path) -> None:
    """Real tokens: members differ, log-probabilities are the model's, versions the server's, rewards from another process."""
    the_recipe = recipe(model_folder, reward="rollout_fakes:length_reward")
    async with embedded_server(model_folder) as base_url, serving(the_recipe) as (_, client):
        capabilities = await client.call("connect", base_url=base_url, deadline_s=60.0, timeout_s=CALL_S)
        assert capabilities["weight_version"] == "5"
        await client.call("submit", prompts=tickets(prompts(6)), step=0, timeout_s=CALL_S)
        await client.call("submit", prompts=tickets(prompts(2)), step=0, purpose="eval", timeout_s=CALL_S)
        results = await collect(client, 6)
        evaluated = await collect(client, 2, "eval")

        arrays: list[dict[str, np.ndarray]] = []
        for result in results.values():
            assert result.outcome == "group" and result.dropped == {}, result.reason
            assert result.group is not None and [s.id.member for s in result.group.samples] == [0, 1, 2, 3]
            mine = await fetch(client, result.group)
            answers = [tuple(a["input_ids"][a["loss_mask"]].tolist()) for a in mine]
            assert len(set(answers)) == 4, "members of a group were sampled alike"
            tokenizer = tiny_tokenizer()
            for sample, answer in zip(result.group.samples, answers, strict=True):
                assert [(v.version, v.tokens) for v in sample.versions] == [(5, len(answer))]
                assert sample.finish_reason == ("length" if len(answer) == 12 and answer[-1] != 1 else "stop")
                assert sample.reward == len(tokenizer.decode(answer, skip_special_tokens=True))
                assert int(sample.scores["pid"]) != os.getpid()
            arrays += mine
        expected = await asyncio.to_thread(reference_logprobs, model_folder, [a["input_ids"] for a in arrays])
        for a, reference in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(a["logprobs"][a["loss_mask"]], reference[a["loss_mask"]], atol=1e-4)
            assert not a["logprobs"][~a["loss_mask"]].any()

        for result in evaluated.values():
            assert result.group is not None
            assert len({s.length for s in result.group.samples}) == 1, "greedy samples are equal"
            assert len({s.reward for s in result.group.samples}) == 1


async def test_tokens_keep_their_versions_over_an_update(model_folder: Path) -> None:
    """Weights are replaced (by equal ones) under running requests: each token says which version made it, and none is lost."""
    long = recipe(model_folder, rollout={"group_size": 4, "max_new_tokens": 400, "dtype": "fp32"})
    async with embedded_server(model_folder) as base_url, serving(long) as (_, client):
        await client.call("connect", base_url=base_url, deadline_s=60.0, timeout_s=CALL_S)
        admin = InferenceClient(base_url, timeout_s=CALL_S, retries=0)
        try:
            mixed: list[dict[str, np.ndarray]] = []
            for version in range(6, 26):  # the update may come before the first token or after the last one: then once more
                await client.call("submit", prompts=tickets(prompts(2, start=10 * version)), step=version, timeout_s=CALL_S)
                await asyncio.sleep(0.1)
                await admin.pause("retract")
                try:
                    await admin.update_from_disk(str(model_folder), version)
                finally:
                    await admin.resume()
                for result in (await collect(client, 2)).values():
                    assert result.group is not None, result.reason
                    for sample, arrays in zip(result.group.samples, await fetch(client, result.group), strict=True):
                        versions = arrays["versions"][arrays["loss_mask"]]
                        assert set(versions.tolist()) <= {version - 1, version} and (np.diff(versions) >= 0).all()
                        assert [(v.version, v.tokens) for v in sample.versions] == [
                            (int(v), int((versions == v).sum())) for v in sorted(set(versions))
                        ]
                        assert sample.loss_tokens == 400 or arrays["input_ids"][-1] == 1
                        if len(sample.versions) == 2:
                            mixed.append(arrays)
                if mixed:
                    break
        finally:
            await admin.close()
    assert mixed, "no update came while a request ran"
    expected = await asyncio.to_thread(reference_logprobs, model_folder, [a["input_ids"] for a in mixed])
    for a, reference in zip(mixed, expected, strict=True):
        np.testing.assert_allclose(a["logprobs"][a["loss_mask"]], reference[a["loss_mask"]], atol=1e-4)


async def test_behind_a_closed_gate_every_answer_is_of_one_version(model_folder: Path) -> None:
    long = recipe(model_folder, rollout={"group_size": 4, "max_new_tokens": 400, "dtype": "fp32"})
    async with embedded_server(model_folder) as base_url, serving(long) as (_, client):
        await client.call("connect", base_url=base_url, deadline_s=60.0, timeout_s=CALL_S)
        admin = InferenceClient(base_url, timeout_s=CALL_S, retries=0)
        try:
            await client.call("submit", prompts=tickets(prompts(2)), step=0, timeout_s=CALL_S)
            await asyncio.sleep(0.1)
            await client.call("close_gate", timeout_s=CALL_S)
            await client.call("submit", prompts=tickets(prompts(2, start=5)), step=0, timeout_s=CALL_S)
            await admin.pause("retract")
            await admin.update_from_disk(str(model_folder), 7)
            await admin.resume()
            before = await collect(client, 2)
            assert await client.call("collect", max_groups=4, wait_s=0.2, timeout_s=CALL_S) == [], "nothing begins behind the gate"
            await client.call("open_gate", timeout_s=CALL_S)
            after = await collect(client, 2)
        finally:
            await admin.close()
    assert set(before) == {"p0", "p1"} and set(after) == {"p5", "p6"}
    for results, version in ((before, 5), (after, 7)):
        samples = [sample for result in results.values() if result.group is not None for sample in result.group.samples]
        assert len(samples) == 8 and all([v.version for v in sample.versions] == [version] for sample in samples)


async def test_the_same_seed_gives_the_same_group(model_folder: Path) -> None:
    async with embedded_server(model_folder) as base_url:
        groups = []
        for _ in range(2):
            async with serving(recipe(model_folder)) as (_, client):
                await client.call("connect", base_url=base_url, deadline_s=60.0, timeout_s=CALL_S)
                await client.call("submit", prompts=tickets(prompts(2)), step=0, timeout_s=CALL_S)
                results = await collect(client, 2)
                found = [results[i].group for i in ("p0", "p1")]
                groups.append([[a["input_ids"].tolist() for a in await fetch(client, g)] for g in found if g is not None])
    assert groups[0] == groups[1]
    assert sampling_seed(7, "p0", 0, 0) != sampling_seed(7, "p1", 0, 0)


class Lame:
    """A server's client: its server fails the first probe."""

    def __init__(self, base_url: str) -> None:
        self.base_url, self.closed, self.probes = base_url, False, 0

    async def wait_healthy(self, deadline_s: float) -> None:
        await asyncio.sleep(0)

    async def probe(self) -> Capabilities:
        self.probes += 1
        await asyncio.sleep(0)
        if self.probes == 1:
            raise ServerFault(self.base_url, "it reports no version")
        return Capabilities(
            engine="embedded",
            version="1",
            weight_version="0",
            max_context=None,
            update_sessions=True,
            version_spans=True,
            hf_digests=None,
            routed_experts=False,
        )

    async def close(self) -> None:
        self.closed = True


async def test_a_worker_may_be_told_again_to_connect(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Lame] = []

    def client_for(engine: str, base_url: str, **_: Any) -> Lame:
        made.append(Lame(base_url))
        return made[-1]

    monkeypatch.setattr("areal_mega.rollout.worker.client_for", client_for)
    async with serving(recipe(tokenizer_folder)) as (worker, client):
        with pytest.raises(RpcError, match="it reports no version"):
            await client.call("connect", base_url="http://a", deadline_s=5.0, timeout_s=CALL_S)
        with pytest.raises(RpcError, match="it reports no version"):
            await client.call("connect", base_url="http://b", deadline_s=5.0, timeout_s=CALL_S)
        assert [lame.closed for lame in made] == [True, False]
        calls = [client.call("connect", base_url="http://b", deadline_s=5.0, timeout_s=CALL_S) for _ in range(2)]
        first, second = await asyncio.gather(*calls)
        executor = worker._executor
        assert first == second and executor is not None
        await client.call("connect", base_url="http://b", deadline_s=5.0, timeout_s=CALL_S)
        assert worker._executor is executor and len(made) == 2
    assert made[1].closed


async def test_a_server_that_is_not_there_is_named(tokenizer_folder: Path) -> None:
    async with serving(recipe(tokenizer_folder)) as (_, client):
        with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:9"):
            await client.call("connect", base_url="http://127.0.0.1:9", deadline_s=0.5, timeout_s=CALL_S)
