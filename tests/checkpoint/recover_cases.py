"""Ranks that train, save, and go on: from the same process, or recovered under another strategy."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))

import engine_cases as cases

from areal_mega.checkpoint.recover import RecoverSave, load_recovered
from areal_mega.megatron.recover_state import EngineStates


def _about(engine: Any) -> dict[str, Any]:
    return {"family": engine.family, "hf_config": engine.hf_config, "layout": engine.layout, "rank": engine.rank, "naming": engine.naming}


def _steps(engine: Any, count: int) -> list[float]:
    batches = cases.my_batches(engine, 2)
    return [engine.train_minibatch(batches, cases.weighted_loss, 1.0).grad_norm for _ in range(count)]


def _weights(engine: Any) -> dict[str, Any]:
    return {item[0]: item[1].float().clone() for item in engine.gather_hf().stream() if item is not None}


def save_and_go_on(
    rank: int,
    world_size: int,
    *,
    folder: str,
    strategy: str,
    place: str,
    dtype: str = "fp32",
    optimizer: dict | None = None,
    updates: int = 2,
) -> dict[str, Any]:
    """Some updates, a checkpoint, two more updates; the weights at the checkpoint and at the end."""
    engine = cases.make_engine(rank, folder, strategy, dtype=dtype, optimizer=optimizer, router={"expert_bias_update_rate": 0.0})
    _steps(engine, updates)
    states = EngineStates(engine)
    saving = RecoverSave(states, Path(place), source=folder, device=engine.platform.device, buffers={}, **_about(engine))
    at_save, digest, counters = _weights(engine), states.digest(), states.counters()
    norms = _steps(engine, 2)  # while the thread writes: what it writes is a copy
    deadline = time.monotonic() + 60
    while not saving.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        saving.commit("{}")
    out = {"norms": norms, "at_save": at_save, "weights": _weights(engine), "digest": digest, "counters": counters}
    engine.close()
    return out


def recover(
    rank: int,
    world_size: int,
    *,
    folder: str,
    strategy: str,
    place: str,
    counters: dict,
    dtype: str = "fp32",
    optimizer: dict | None = None,
) -> dict[str, Any]:
    """A fresh engine that goes on from the checkpoint."""
    engine = cases.make_engine(rank, folder, strategy, dtype=dtype, optimizer=optimizer, router={"expert_bias_update_rate": 0.0})
    states = EngineStates(engine)
    load_recovered(states, Path(place), **_about(engine))
    states.restore_counters(counters)
    digest, at_load = states.digest(), _weights(engine)
    norms = _steps(engine, 2)
    out = {"norms": norms, "weights": _weights(engine), "digest": digest, "at_load": at_load}
    engine.close()
    return out
