"""The rollout worker: one per inference replica. Runs episodes against its server and keeps what they made until it is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_mega.config.schema import Recipe
from areal_mega.core.types import Prompt
from areal_mega.data.tokenizer import load_tokenizer
from areal_mega.parallel.strategy import parse
from areal_mega.rewards.runner import RewardRunner
from areal_mega.rollout.engines import client_for
from areal_mega.rollout.executor import Executor
from areal_mega.rollout.gate import Gate
from areal_mega.rollout.inference import InferenceServer
from areal_mega.rollout.load import load_workflow
from areal_mega.rollout.meter import DecodeMeter, Metered
from areal_mega.rollout.patient import Patient
from areal_mega.rollout.results import PURPOSES, EpisodeResult, Purpose
from areal_mega.rollout.store import TrajectoryStore
from areal_mega.rollout.workflow import GenerationEngine, GenerationSettings, Workflow, WorkflowContext
from areal_mega.rpc.fetch import Bundle, bundle
from areal_mega.rpc.server import RpcServer

METHODS = (
    "connect",
    "submit",
    "cancel",
    "collect",
    "fetch",
    "release",
    "measures",
    "status",
    "suspend",
    "withdraw",
    "resume",
    "close_gate",
    "open_gate",
)


class RolloutWorker:
    """What the controller and the train ranks call. Use: ``start``, ``connect``, then the rest; ``close`` at the end.

    Args:
        recipe: the run's recipe.
        address: host:port under which this worker is called; it goes into every handle.
        spill: folder for trajectories that memory has no room for; this worker's alone.
    """

    def __init__(self, recipe: Recipe, *, address: str, spill: Path) -> None:
        self._recipe = recipe
        self._store = TrajectoryStore(address, limit=int(recipe.rollout.store_mb * 2**20), folder=spill)
        reward = recipe.reward
        self._reward = RewardRunner(reward.path, reward.kwargs, timeout_s=reward.timeout_s, workers=reward.workers)
        self._meter = DecodeMeter()
        self._workflows: dict[Purpose, Workflow] = {}
        self._client: InferenceServer | None = None
        self._base_url = ""
        self._connecting = asyncio.Lock()
        self._executor: Executor | None = None
        self._gate: Gate | None = None
        self._suspensions = 0

    def register(self, server: RpcServer) -> None:
        """Serve every method of `METHODS`."""
        for method in METHODS:
            server.register(method, getattr(self, method))

    async def start(self) -> None:
        """Load tokenizer and workflow, start the verifier processes.

        Raises:
            UserError: model folder, workflow or reward are not what the recipe says.
        """
        tokenizer = await asyncio.to_thread(load_tokenizer, self._recipe.model.path)
        workflow = self._recipe.workflow
        for purpose in PURPOSES:
            self._workflows[purpose] = load_workflow(workflow.path, workflow.kwargs, self._context(tokenizer, purpose))
        await self._reward.start()

    async def connect(self, base_url: str, deadline_s: float) -> dict[str, Any]:
        """Use the inference server at ``base_url`` once it is healthy; returns what it can do.

        May be called again, with the same server: the caller's start of this replica was cut, or failed, before it had the answer.

        Raises:
            DeadlineExceeded: it is not healthy after ``deadline_s`` seconds.
        """
        async with self._connecting:
            client = await self._client_of(base_url)
            await client.wait_healthy(deadline_s)
            capabilities = await client.probe()
            if self._executor is None:
                self.use(Patient(client))
            return asdict(capabilities)

    async def _client_of(self, base_url: str) -> InferenceServer:
        """The client that is there, or another in its place where it is of another server that was never used."""
        before = self._client
        if before is not None and self._base_url == base_url:
            return before
        assert self._executor is None, f"the worker is connected to {self._base_url} already"
        rollout = self._recipe.rollout
        engine = parse(rollout.strategy).engine
        client = client_for(engine, base_url, timeout_s=rollout.request_timeout_s, retries=rollout.request_retries)
        self._client, self._base_url = client, base_url
        if before is not None:
            await before.close()
        return client

    async def suspend(self) -> None:
        """The server is gone: what ran on it waits for ``withdraw`` or ``resume``, nothing of it is lost or reported as failed."""
        self._suspensions += 1
        await self._running.suspend()

    async def withdraw(self, purpose: Purpose = "train") -> list[int]:
        """Tickets of the episodes that have not finished (call after ``suspend``): they are somebody else's from now on."""
        return self._running.withdraw(purpose)

    async def resume(self, deadline_s: float) -> None:
        """The server is back, with the current weights.

        Raises:
            DeadlineExceeded: it is not healthy after ``deadline_s`` seconds.
        """
        assert self._client is not None, "connect the worker first"
        suspensions = self._suspensions
        await self._client.wait_healthy(deadline_s)
        await self._client.probe()
        if suspensions == self._suspensions:  # else that server is gone, and the one that is healthy now has no weights yet
            self._running.resume()

    def use(self, engine: GenerationEngine) -> None:
        """Generate with ``engine`` from now on (what ``connect`` does with its client)."""
        assert self._workflows, "start the worker first"
        assert self._executor is None, "the worker is connected already"
        self._gate = Gate(Metered(engine, self._meter))
        self._executor = Executor(
            run=self._recipe.run.name,
            engine=self._gate,
            workflows=self._workflows,
            store=self._store,
            max_concurrent=self._recipe.rollout.max_concurrent_prompts,
            timeout_s=self._recipe.rollout.prompt_timeout_s,
        )

    async def close_gate(self) -> None:
        """Send no new request to the server; returns when all that were sent are answered."""
        assert self._gate is not None, "connect the worker first"
        await self._gate.close()

    async def open_gate(self) -> None:
        """Send requests again."""
        assert self._gate is not None, "connect the worker first"
        self._gate.open()

    async def submit(self, prompts: Mapping[int, Prompt], step: int, purpose: Purpose = "train") -> int:
        """Queue prompts of train step ``step``, by ticket; returns how many of this purpose are under way."""
        self._running.submit(prompts, step=step, purpose=purpose)
        waiting, running, _ = self._running.queued(purpose)
        return waiting + running

    async def cancel(self, tickets: Sequence[int], purpose: Purpose = "train") -> None:
        """End these submissions without a result, wherever they are; unknown ones are none of this worker's any more."""
        await self._running.cancel(tickets, purpose=purpose)

    async def collect(self, max_groups: int, wait_s: float, purpose: Purpose = "train") -> list[EpisodeResult]:
        """Finished episodes, at most ``max_groups``, in the order they finished; an empty list after ``wait_s`` without one."""
        return await self._running.collect(max_groups, wait_s=wait_s, purpose=purpose)

    async def fetch(self, keys: Sequence[str]) -> Bundle:
        """Arrays by the keys of their handles, in that order."""
        return bundle(self._store.get(keys))

    async def release(self, keys: Sequence[str]) -> int:
        """Forget arrays that were trained on or will not be; returns the bytes freed."""
        return self._store.release(keys)

    async def measures(self) -> dict[str, dict[int, int]]:
        """What the server did since the last call: ``tokens`` and ``ms`` by number of running sequences."""
        tokens, ms = self._meter.take()
        return {"tokens": tokens, "ms": ms}

    async def status(self) -> dict[str, Any]:
        """Queues, counters since start, bytes held, and the episodes that have run longest (prompt id, seconds)."""
        executor = self._running
        queues = {purpose: dict(zip(("waiting", "running", "finished"), executor.queued(purpose), strict=True)) for purpose in PURPOSES}
        return {
            "queues": queues,
            "counts": dict(executor.counts),
            "rewards": dict(self._reward.counts),
            "store": {"arrays": len(self._store), "nbytes": self._store.nbytes, "spilled": self._store.spilled_nbytes},
            "oldest": executor.oldest(),
        }

    async def close(self) -> None:
        """Cancel episodes, end the verifier processes, leave the server, remove what was spilled."""
        if self._executor is not None:
            await self._executor.close()
        await self._reward.close()
        if self._client is not None:
            await self._client.close()
        self._store.close()

    @property
    def _running(self) -> Executor:
        assert self._executor is not None, "connect the worker to an inference server first"
        return self._executor

    def _context(self, tokenizer: Any, purpose: Purpose) -> WorkflowContext:
        return WorkflowContext(
            tokenizer=tokenizer,
            settings=settings_for(self._recipe, purpose),
            reward=self._reward,
            run_seed=self._recipe.run.seed,
            evaluation=purpose == "eval",
        )


def settings_for(recipe: Recipe, purpose: Purpose) -> GenerationSettings:
    """How episodes of a purpose sample: evaluation has its own number of samples, temperature and length."""
    rollout, evaluation = recipe.rollout, recipe.eval
    if purpose == "train":
        group_size, temperature, max_new_tokens = rollout.group_size, rollout.temperature, rollout.max_new_tokens
    else:
        group_size, temperature = evaluation.samples, evaluation.temperature
        max_new_tokens = evaluation.max_new_tokens or rollout.max_new_tokens
    return GenerationSettings(
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )
