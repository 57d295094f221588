"""The controller's side of the train ranks: one method call is one collective over all of them."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.controller.batch import StepBatch, loss_scalars, work_order
from areal_mega.controller.calls import gather_all
from areal_mega.core import metrics as m
from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.core.metrics import Metrics, merge
from areal_mega.parallel.layout import RankLayout
from areal_mega.rpc.client import RpcClient
from areal_mega.rpc.wire import split_address


class NotLoaded(RunFailed):
    """The ranks could not fetch a batch. Nothing of them has changed: another one may be tried."""


class TrainController:
    """All train ranks of the run.

    Args:
        clients: by rank.
        layout: of ``train.strategy``.
    """

    def __init__(self, clients: Sequence[RpcClient], layout: RankLayout, recipe: Recipe, algorithm: Algorithm) -> None:
        assert len(clients) == layout.world_size
        self._clients, self.layout, self._recipe, self._algorithm = clients, layout, recipe, algorithm

    def calls(self, method: str, *, timeout_s: float | None = None, **kwargs: Any) -> dict[str, Coroutine[Any, Any, Any]]:
        """The same call to every rank, not yet made, by who is called."""
        limit = self._recipe.launch.rpc_timeout_s if timeout_s is None else timeout_s
        return {client.peer: client.call(method, timeout_s=limit, **kwargs) for client in self._clients}

    def host(self, rank: int) -> str:
        """The address on which a rank listens."""
        return split_address(self._clients[rank].address)[0]

    async def call(self, method: str, **kwargs: Any) -> list[Any]:
        """The same call to every rank; answers by rank."""
        return await self.call_each(method, [kwargs] * len(self._clients))

    async def call_each(self, method: str, kwargs_by_rank: Sequence[Mapping[str, Any]]) -> list[Any]:
        timeout_s = self._recipe.launch.rpc_timeout_s
        return await gather_all(
            client.call(method, timeout_s=timeout_s, **kwargs) for client, kwargs in zip(self._clients, kwargs_by_rank, strict=True)
        )

    async def step(self, batch: StepBatch, *, step: int, version: int) -> Metrics:
        """Fetch, log-probabilities, and every optimizer update of one train step (hops 5 and 6).

        Raises:
            NotLoaded: the first failed; why is its cause.
        """
        clock = time.perf_counter()
        orders = [work_order(batch, self.layout.coords(rank).dp, version) for rank in range(self.layout.world_size)]
        try:
            await self.call_each("load", orders)
        except (RunFailed, DeadlineExceeded) as error:
            raise NotLoaded(str(error)) from error
        loaded = time.perf_counter()
        kl_s: dict[int, float] = {}
        if self._algorithm.needs_proximal or self._algorithm.needs_reference:
            for answer in await self.call("logprobs"):
                kl_s |= answer["kl"]
        advantages, weights = loss_scalars(batch, self._algorithm, fixed_length=self._recipe.rollout.max_new_tokens, kl_s=kl_s or None)
        scored = time.perf_counter()
        parts: list[Metrics] = []
        for number, minibatch in enumerate(batch.minibatches):
            if not any(batch.trained_tokens[i] for i in minibatch.samples):
                continue  # nothing to learn from, and Adam would go on by its momentum
            chosen = {i: advantages[i] for i in minibatch.samples}, {i: weights[i] for i in minibatch.samples}
            parts.append(_reduce(await self.call("update", minibatch=number, advantages=chosen[0], weights=chosen[1], step=step)))
        updated = time.perf_counter()
        await self.call("release")
        times: Metrics = {
            "time/fetch": m.total(loaded - clock),
            "time/logprobs": m.total(scored - loaded),
            "time/update": m.total(updated - scored),
            "train/tokens_per_s": m.last(batch.tokens / (updated - clock)),
        }
        if kl_s:
            times["kl/reward"] = m.mean_of(kl_s.values())
        return merge([*parts, times])

    async def warmup(self, steps: int) -> Metrics:
        """The next ``steps`` supervised updates."""
        clock = time.perf_counter()
        metrics = _reduce(await self.call("warmup", steps=steps))
        metrics["time/update"] = m.total(time.perf_counter() - clock)
        return metrics


def _reduce(answers: Sequence[Mapping[str, Any]]) -> Metrics:
    """Measurements of all reporters, each by its own reduction; norm and rate are the same on every rank."""
    metrics = merge(answer["metrics"] for answer in answers)
    metrics["train/lr"] = m.last(answers[0]["lr"])
    metrics["train/skipped_updates"] = m.total(float(answers[0]["skipped"]))
    if not answers[0]["skipped"]:
        metrics["train/grad_norm"] = m.mean_of([answers[0]["grad_norm"]])
    return metrics
