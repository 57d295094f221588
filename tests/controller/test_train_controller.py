"""Which calls one train step makes of the train ranks."""

from __future__ import annotations

from typing import Any

from fake_workers import recipe
from rollout_samples import group

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.controller.batch import plan_step
from areal_mega.controller.train import TrainController
from areal_mega.core.types import Group
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse


class Rank:
    address = peer = "train rank 0"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        self.calls.append((method, kwargs))
        if method == "update":
            return {"metrics": {}, "grad_norm": 1.0, "lr": 0.1, "skipped": False}
        return {"kl": {}} if method == "logprobs" else None


async def test_a_minibatch_without_a_token_to_train_on_is_no_update() -> None:
    settings = recipe(2, 0)
    rank = Rank()
    train = TrainController([rank], RankLayout(parse("megatron:d1")), settings, algorithm_of(settings))  # type: ignore[list-item]
    groups: list[Group] = [group(name, [{"finish_reason": reason}] * 2) for name, reason in (("a", "length"), ("b", "stop"))]
    batch = plan_step(groups, min_version=0, mask_truncated=True, dp=1, minibatches=2, microbatch_tokens=4096)
    await train.step(batch, step=0, version=0)
    updated = [kwargs["minibatch"] for method, kwargs in rank.calls if method == "update"]
    assert [batch.samples[batch.minibatches[n].samples[0]].id.group_id for n in updated] == ["b"]
