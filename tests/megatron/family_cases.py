"""Families in the engine: what ranks do, many cases to a process. Functions here run in processes of their own (see ``ranks``)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import engine_cases as cases
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_mega.megatron.engine import MegatronEngine
from areal_mega.megatron.routing import routers

Job = dict[str, Any]
"""``folder``, ``strategy`` and any of ``split``, ``router``, ``train``."""


def references(rank: int, world_size: int, *, folders: dict[str, str]) -> dict[str, dict]:
    """transformers' logits, log-probabilities and gradients of every family."""
    return {name: cases.hf_logits(rank, world_size, folder=folder) for name, folder in folders.items()}


def parities(rank: int, world_size: int, *, jobs: list[Job]) -> list[dict]:
    """One engine after the other: logits, gradients, and whether the weights leave as they came (on rank 0)."""
    return [_parity(rank, job) for job in jobs]


def _engine(rank: int, job: Job, **more: Any) -> MegatronEngine:
    return cases.make_engine(rank, job["folder"], job["strategy"], train=job.get("train"), router=job.get("router", {}), **more)


def _parity(rank: int, job: Job) -> dict:
    engine = _engine(rank, job, optimizer={"distributed": False})
    batches = cases.my_batches(engine, job.get("split", 1))
    received = {item[0]: item[1].clone() for item in engine.gather_hf().stream() if item is not None}
    logprobs = engine.logprobs([replace(batch, fields={}) for batch in batches], 1.0)
    # Under context parallelism no rank sees whole samples' logits; log-probabilities are put together.
    logits = cases.whole_logits(engine, batches) if engine.strategy.cp == 1 else None
    engine.compute_gradients(batches, cases.weighted_loss, 1.0)
    gradients = cases.gathered_gradients(engine)
    engine.close()
    report = engine.is_reporter
    return {
        "logprobs": cases.by_sample(logprobs, batches) if report else {},
        "logits": cases.by_sample(logits, batches) if report else {},
        "gradients": gradients,
        "export": None if rank else _same(received, load_file(Path(job["folder"]) / "model.safetensors")),
    }


def _same(received: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return received.keys() == wanted.keys() and all(torch.equal(received[name], wanted[name]) for name in wanted)


def summary(results: list[dict], reference: dict) -> dict[str, Any]:
    """Of one job on all ranks: largest difference of logits, largest relative one of gradients, and whether the export is bit-equal.

    A gradient's error is relative to the larger of its own norm and a thousandth of the whole gradient's.
    """
    seen: set[int] = set()
    logits = 0.0
    for result in results:
        for kind in ("logits", "logprobs"):
            for index, values in result[kind].items():
                logits = max(logits, float(np.abs(values - reference[kind][index]).max()))
                seen.add(index)
    assert seen == set(range(len(cases.LENGTHS))), "every sample is somebody's"
    gradients, expected = results[0]["gradients"], reference["gradients"]
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    whole = np.sqrt(sum(float(np.square(g).sum()) for g in expected.values()))
    errors = {n: np.linalg.norm(g - expected[n]) / max(np.linalg.norm(expected[n]), 1e-3 * whole) for n, g in gradients.items()}
    worst = max(errors, key=lambda n: errors[n])
    return {"logits": logits, "gradients": float(errors[worst]), "where": worst, "export": results[0]["export"]}


def check(found: dict[str, Any], what: str) -> None:
    assert found["logits"] < 1e-4, f"{what}: logits differ by {found['logits']:.2e}"
    assert found["gradients"] < 1e-5, f"{what}: gradient of {found['where']} is off by {found['gradients']:.2e}"
    assert found["export"], f"{what}: the export is not the source"


# --- the router's knobs --------------------------------------------------------------------------------------------------------------


def updates(rank: int, world_size: int, *, jobs: list[Job]) -> list[dict]:
    """One update each: its gradient norm, its metrics, and the correction biases before and after by layer (of this rank)."""
    out = []
    for job in jobs:
        engine = _engine(rank, job, dtype=job.get("dtype", "fp32"), optimizer={"lr": 1e-3})
        batches = cases.my_batches(engine, job.get("split", 1))
        before = _biases(engine)
        result = engine.train_minibatch(batches, LOSSES[job.get("loss", "weighted")], 1.0)
        after = _biases(engine)
        assert all(bias.dtype == torch.float32 for bias in after.values())
        engine.close()
        metrics = {name: metric.result for name, metric in result.metrics.items() if name.startswith("router/")}
        out.append({"grad_norm": result.grad_norm, "metrics": metrics, "before": before, "after": after, "skipped": result.skipped})
    return out


LOSSES = {"weighted": cases.weighted_loss, "nan": cases.nan_loss}


def _biases(engine: MegatronEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_shards().items() if name.endswith("expert_bias")}


def loads(rank: int, world_size: int, *, folder: str) -> list[list[float]]:
    """Tokens of each expert in one batch, counted anew from the router's scores, sample after sample."""
    engine = cases.make_engine(rank, folder, "megatron:d1")
    counts = [torch.zeros(r.num_experts) for r in routers(engine._chunks)]

    def count(router: Any, args: Any, output: tuple[Tensor, Tensor], number: int) -> None:
        counts[number] += output[1].sum(0)

    handles = [r.register_forward_hook(partial(count, number=n)) for n, r in enumerate(routers(engine._chunks))]
    for i, sample in enumerate(cases.make_samples()):
        engine.logprobs([engine.pack([{"input_ids": sample["input_ids"]}], [i])], 1.0)
    for handle in handles:
        handle.remove()
    engine.close()
    return [count.tolist() for count in counts]


def refusals(rank: int, world_size: int, *, jobs: list[Job]) -> list[str]:
    """The one line of every job that is refused."""
    from areal_mega.core.errors import UserError

    out = []
    for job in jobs:
        try:
            _engine(rank, job).close()
        except UserError as error:
            out.append(str(error))
        else:
            out.append("accepted")
    return out
