"""What ranks do in the tests of invariance: the policy loss on a batch of ragged samples, many of them with an answer of one token."""

from __future__ import annotations

from functools import partial
from typing import Any

import engine_cases as cases
import numpy as np

from areal_mega.algorithms.aggregation import sample_weights
from areal_mega.algorithms.measure import to_metrics
from areal_mega.algorithms.policy import policy_loss
from areal_mega.algorithms.registry import resolve_algorithm
from areal_mega.config.schema import AlgorithmSection

LENGTHS = (5, 17, 9, 30, 2, 17, 12, 21, 3, 1)
ONE_TOKEN_ANSWERS = (0, 3, 4, 7, 8)
Job = dict[str, Any]
"""``strategy``, ``plan`` (micro-batches of sample indices for each data-parallel rank) and ``algorithm``; perhaps ``router``."""


def samples(aggregation: Any) -> list[dict[str, np.ndarray]]:
    """The last has no answer at all: a prompt of one token."""
    rng = np.random.default_rng(3)
    out: list[dict[str, np.ndarray]] = []
    for i, n in enumerate(LENGTHS):
        positions = np.arange(n)
        mask = positions == n - 1 if i in ONE_TOKEN_ANSWERS else positions > n // 3
        out.append(
            {
                "input_ids": rng.integers(1, cases.VOCAB, n),
                "loss_mask": mask,
                "logprobs": rng.normal(-5.8, 0.2, n),
                "proximal": rng.normal(-5.8, 0.2, n),
                "advantages": np.full(n, rng.normal()),
            }
        )
    counts = [int(sample["loss_mask"].sum()) for sample in out]
    assert counts.count(1) == len(ONE_TOKEN_ANSWERS) and counts[-1] == 0
    for sample, weight in zip(out, sample_weights(aggregation, counts), strict=True):
        sample["weights"] = np.full(len(sample["input_ids"]), weight)
    return out


def losses(rank: int, world_size: int, *, folder: str, jobs: list[Job]) -> list[dict[str, Any]]:
    """One engine after the other: the loss of this data-parallel rank's samples, and the whole model's gradients (on rank 0)."""
    return [_loss(rank, folder, job) for job in jobs]


def _loss(rank: int, folder: str, job: Job) -> dict[str, Any]:
    section = AlgorithmSection(name=job["algorithm"], correction="tis", clip_low=0.5, clip_high=0.5)
    algorithm = resolve_algorithm(section, max_staleness=1, minibatches=2, has_reference=False)
    engine = cases.make_engine(rank, folder, job["strategy"], optimizer={"distributed": False}, router=job.get("router", {}))
    rows = samples(algorithm.aggregation)
    batches = [engine.pack([rows[i] for i in micro], micro) for micro in job["plan"][engine.coords.dp]]
    measured = engine.compute_gradients(batches, partial(policy_loss, algorithm=algorithm), 0.7)
    loss = to_metrics(measured)["train/loss"].value if engine.is_reporter and any(measured) else 0.0
    gradients = cases.gathered_gradients(engine)
    engine.close()
    return {"loss": loss, "gradients": gradients}
