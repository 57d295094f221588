"""Ranks that train, save, and go on: from the same process, or recovered under another strategy."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))

import engine_cases as cases
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_mega.checkpoint import recover as recovering
from areal_mega.checkpoint.recover import RecoverSave, load_recovered
from areal_mega.core.errors import RunFailed, UserError
from areal_mega.launch.roles.recovering import Recovering
from areal_mega.megatron.recover_state import EngineStates
from areal_mega.models.table import TableMismatch
from areal_mega.rpc.client import RpcClient
from areal_mega.rpc.rank_server import RankServer


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


def _save(engine: Any, folder: str, place: Path, buffers: dict) -> RecoverSave:
    return RecoverSave(EngineStates(engine), place, source=folder, device=engine.platform.device, buffers=buffers, **_about(engine))


def _wait(saving: RecoverSave) -> None:
    deadline = time.monotonic() + 60
    while not saving.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _message(kind: type[Exception], work: Any) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class _Allocations(TorchDispatchMode):
    """Counts new float tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += "aten.empty" in str(func)
        return func(*args, **(kwargs or {}))


def short_of_memory(rank: int, world_size: int, *, folder: str, strategy: str, place: str) -> dict[str, Any]:
    """A machine with room for what one rank copies, not for both."""
    engine = cases.make_engine(rank, folder, strategy)
    buffers: dict = {}
    first = _save(engine, folder, Path(place) / "a", buffers)
    _wait(first)
    free = first.nbytes + 1000
    recovering.available = lambda: free
    message = _message(UserError, lambda: _save(engine, folder, Path(place) / "b", {}))
    again = _save(engine, folder, Path(place) / "c", buffers)  # what is kept already needs no room
    _wait(again)
    engine.close()
    return {"message": message, "nbytes": first.nbytes, "kept": len(buffers)}


def copies_and_errors(rank: int, world_size: int, *, folder: str, strategy: str, place: str) -> dict[str, Any]:
    """How many host tensors a first and a second save allocate; what `done` raises."""
    engine, buffers, made = cases.make_engine(rank, folder, strategy), {}, []
    for name in ("first", "second"):
        with _Allocations() as allocations:
            saving = _save(engine, folder, Path(place) / name, buffers)
        _wait(saving)
        made.append(allocations.made)

    def fail(*_: Any) -> None:
        raise error

    recovering.write_shard = fail
    messages = []
    for number, error in enumerate([MemoryError(), ValueError("RESOURCE_EXHAUSTED\nat chunk 0"), UserError("the disk is full")]):
        saving = _save(engine, folder, Path(place) / f"fails-{number}", buffers)
        kind = UserError if isinstance(error, UserError) else RunFailed
        messages.append(_message(kind, lambda saving=saving: _wait(saving)))
    engine.close()
    return {"made": made, "buffers": len(buffers), "messages": messages}


class _Watched(EngineStates):
    """States that two threads must be filling at once before either goes on; ``without``: a parameter that this engine does not have."""

    def __init__(self, engine: Any, without: str | None = None) -> None:
        super().__init__(engine)
        self._both, self._calls, self._lock = threading.Barrier(2), 0, threading.Lock()
        self._without = without

    @property
    def shapes(self) -> Any:
        return {name: shape for name, shape in super().shapes.items() if name != self._without}

    def fill(self, name: str, kind: str, whole: torch.Tensor) -> None:
        with self._lock:
            self._calls += 1
            early = self._calls <= 2
        if early:
            self._both.wait(20)
        super().fill(name, kind, whole)


def load_at_once(rank: int, world_size: int, *, folder: str, strategy: str, place: str) -> dict[str, Any]:
    engine = cases.make_engine(rank, folder, strategy)
    load_recovered(_Watched(engine), Path(place), **_about(engine))
    digest, lost = EngineStates(engine).digest(), sorted(EngineStates(engine).shapes)[0]
    message = _message(TableMismatch, lambda: load_recovered(_Watched(engine, lost), Path(place), **_about(engine)))
    engine.close()
    return {"digest": digest, "message": message, "lost": lost}


def commit_beside_a_step(rank: int, world_size: int, *, folder: str, strategy: str, place: str) -> dict[str, Any]:
    """The rank's own thread is busy until the checkpoint has its name, which a commit on that thread could not give it."""
    engine = cases.make_engine(rank, folder, strategy)
    server, there, found = RankServer("secret", "train rank 0"), Path(place), []

    def step() -> None:
        deadline = time.monotonic() + 20
        while not there.is_dir() and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(there.is_dir())

    Recovering(engine).serve(server)
    server.register("step", step)
    address = server.start("127.0.0.1")

    async def control() -> None:
        client = RpcClient(address, "secret", "train rank 0")
        try:
            await client.call("recover_begin", place=place, timeout_s=60)
            while not await client.call("recover_done", timeout_s=60):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.gather(client.call("step", timeout_s=60), client.call("recover_commit", state="{}", timeout_s=60))
        finally:
            await client.close()
            server.stop()

    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(control())
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    server.serve_forever()
    thread.join(30)
    engine.close()
    return {"found": found, "errors": [repr(error) for error in errors]}
