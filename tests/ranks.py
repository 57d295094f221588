"""Run a function on several ranks, each a process of its own, without paying for the imports every time.

Importing torch, Megatron-Core and transformers takes ten seconds and more on a small machine. A *nursery* process imports them once per
test session and forks the ranks of each case from itself: a case costs a fork and the forming of a gloo group, and every rank starts clean.

    from ranks import run_ranks

    def add_up(rank: int, world_size: int, *, start: float) -> dict:
        t = torch.tensor([start + rank])
        torch.distributed.all_reduce(t)
        return {"total": t}

    def test_add_up():
        assert run_ranks(2, add_up, start=1.0)[0]["total"] == 3.0

The function is named by its file and name (a module-level function, or ``"dotted.module:name"`` with tests/ and the repository root on the
path); it is never pickled. Arguments and results are JSON values, numpy arrays, torch tensors (returned as numpy; bf16 as float32), bytes,
tuples (returned as lists) and dataclass-free containers of them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


START_S = 280.0
"""Imports take ten seconds on an idle machine. One that is loaded twenty-fold has been seen to take three minutes."""


class RankFailed(AssertionError):
    """A rank raised, died, or ran out of time. The message holds the end of its log."""


def run_ranks(
    world_size: int,
    target: str | Callable[..., Any],
    *,
    timeout_s: float = 240.0,
    distributed: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call ``target(rank, world_size, **kwargs)`` on ``world_size`` fresh processes; their results by rank.

    Args:
        timeout_s: the case is killed and fails after so many seconds.
        distributed: form the default gloo process group first.

    Raises:
        RankFailed: with the traceback of the first rank that failed.
    """
    global _nursery
    if _nursery is None or _nursery.process.poll() is not None:
        _nursery = _Nursery()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        dump(Path(folder) / "kwargs", kwargs)
        case = {"dir": folder, "world_size": world_size, "target": _locate(target), "distributed": distributed, "timeout_s": timeout_s}
        failure = _nursery.run(case, timeout_s)
        if failure is not None:
            rank, cause = failure
            log = Path(folder) / f"rank-{rank}.log"
            text = log.read_text(errors="replace") if log.exists() else ""
            raise RankFailed(f"rank {rank} of {world_size} {cause}; the end of its log:\n{text[-6000:]}")
        return [load(Path(folder) / f"result-{rank}") for rank in range(world_size)]


# --- values in files, without pickle


def dump(path: Path, value: Any) -> None:
    """Write ``path``.json and ``path``.npz (written last, so that its presence means that both are whole)."""
    arrays: dict[str, np.ndarray] = {}
    path.with_suffix(".json").write_text(json.dumps(_pack(value, arrays)))
    np.savez(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Any:
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        return _unpack(json.loads(path.with_suffix(".json").read_text()), arrays)


def _pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        tensor = value.detach().cpu()
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        key = f"a{len(arrays)}"
        arrays[key] = np.asarray(value)
        return {"array": key}
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[_pack(k, arrays), _pack(v, arrays)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_pack(v, arrays) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a rank's argument or result cannot be a {type(value).__name__}")


def _unpack(value: Any, arrays: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v, arrays) for v in value]
    if isinstance(value, dict):
        if "array" in value:
            array = arrays[value["array"]]
            return array.item() if array.ndim == 0 else array
        if "hex" in value:
            return bytes.fromhex(value["hex"])
        return {_unpack(k, arrays): _unpack(v, arrays) for k, v in value["dict"]}
    return value


# --- naming the function


def _locate(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    source = inspect.getsourcefile(target)
    assert source and target.__qualname__ == target.__name__, f"{target} must be a module-level function of a file"
    return f"{Path(source).resolve()}:{target.__name__}"


def _resolve(target: str) -> Callable[..., Any]:
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    path = Path(place) if Path(place).is_absolute() else ROOT / place
    sys.path.insert(0, str(path.parent))
    if path == Path(__file__).resolve():
        return globals()[name]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _load() -> str:
    """For messages about time: what the machine was doing."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


# --- the test's side


class _Nursery:
    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=ROOT,
            text=True,
            bufsize=1,
        )
        self._answer(START_S)
        atexit.register(self.close)

    def run(self, case: dict[str, Any], timeout_s: float) -> tuple[int, str] | None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            answer = self._answer(timeout_s + 30.0)
        except BaseException:
            # pytest's own time limit, or Ctrl-C: the answer still to come must not be taken for the next case's.
            self.close()
            raise
        return None if answer["failure"] is None else tuple(answer["failure"])

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(timeout_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.close()
            raise RankFailed(f"the nursery gave no answer within {timeout_s:.0f} s; {_load()}")
        return json.loads(line)

    def close(self) -> None:
        global _nursery
        _nursery = None
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_nursery: _Nursery | None = None


# --- the nursery's side


def _die_with_parent(parent: int) -> None:
    """Linux: be killed when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _warm_up() -> None:
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    torch.set_num_threads(1)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"forking a process of {threads} threads is not safe"


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    children: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(os.getppid())
    _warm_up()
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        failure = _run_case(json.loads(line), children)
        answers.write(json.dumps({"failure": failure}) + "\n")


def _run_case(case: dict[str, Any], children: list[int]) -> tuple[int, str] | None:
    """Fork the ranks and wait for all; the first that fails ends the others. (rank, how it ended), or None."""
    nursery, deadline = os.getpid(), time.monotonic() + case["timeout_s"]
    ranks: dict[int, int] = {}
    for rank in range(case["world_size"]):
        pid = os.fork()
        if pid == 0:
            _child(case, rank, nursery)
        ranks[pid] = rank
        children.append(pid)
    failure: tuple[int, str] | None = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            children.remove(pid)
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code != 0 and failure is None:
                failure = (rank, "raised" if code == 1 else f"ended with {code}")
                _kill(ranks)
        elif failure is None and time.monotonic() > deadline:
            failure = (min(ranks.values()), f"(missing: {sorted(ranks.values())}) was not done within {case['timeout_s']:.0f} s; {_load()}")
            _kill(ranks)
        elif pid == 0:
            time.sleep(0.005)
    return failure


def _kill(ranks: dict[int, int]) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _child(case: dict[str, Any], rank: int, nursery: int) -> None:
    code = 1
    try:
        _die_with_parent(nursery)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(f"{case['dir']}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        folder, world_size = Path(case["dir"]), case["world_size"]
        if case["distributed"]:
            _form_group(folder, rank, world_size, case["timeout_s"])
        kwargs = load(folder / "kwargs")
        dump(folder / f"result-{rank}", _resolve(case["target"])(rank, world_size, **kwargs))
        if case["distributed"]:
            import torch.distributed

            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # rank 0 holds the store: it must not leave first
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _form_group(folder: Path, rank: int, world_size: int, timeout_s: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    timeout, port_file = timedelta(seconds=timeout_s), folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), world_size, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


if __name__ == "__main__":
    _serve()
