"""Command line and environment of every process of a run. Pure: no process is started, no file read."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Literal

from areal_mega.config.checks import SERVER_FLAGS, server_flag
from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.launch.local import ProcessSpec
from areal_mega.launch.rundir import RunDir
from areal_mega.parallel.strategy import ParallelStrategy
from areal_mega.sync import GRACE_S, vllm_plugin

Device = Literal["cpu", "cuda"]

_OUR_PYTHON = (sys.executable, "-P", "-m")
"""Our own modules, from where this process has them (see ``python_path``), and not from the working folder that -m alone would look in
first: it may hold another copy."""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def worker_spec(
    role: str, rank: int, *, run_dir: RunDir, recipe: Recipe, device: Device, gpus: Sequence[int] = (), env: Mapping[str, str] | None = None
) -> ProcessSpec:
    """A train rank or rollout worker: ``areal_mega.launch.worker`` on its GPUs (slot numbers; none for a process that needs none)."""
    argv = [
        *_OUR_PYTHON,
        "areal_mega.launch.worker",
        role,
        f"--rank={rank}",
        f"--run-dir={run_dir.path}",
        f"--attempt={run_dir.attempt}",
    ]
    full = process_env(recipe, device=device, gpus=gpus) | {"PYTHONPATH": python_path(os.environ)} | dict(env or {})
    return ProcessSpec(role=role, rank=rank, argv=argv, env=full, cpus=_cpus(role, recipe))


def server_spec(
    rank: int,
    *,
    recipe: Recipe,
    strategy: ParallelStrategy,
    model_path: str,
    host: str,
    port: int,
    device: Device,
    gpus: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> ProcessSpec:
    """Inference replica ``rank``: the engine that ``rollout.strategy`` names, with ``rollout.server_args`` verbatim at the end.

    ``strategy`` is the whole rollout strategy; a replica has its t·p ranks. ``gpus`` are the replica's slot numbers.

    Raises:
        UserError: ``rollout.server_args`` sets what the recipe sets elsewhere.
    """
    for arg in recipe.rollout.server_args:
        if (flag := server_flag(arg)) in SERVER_FLAGS:
            raise UserError(f"rollout.server_args has {flag}, which {SERVER_FLAGS[flag]} decides; remove it")
    build = _SERVERS.get(strategy.engine)
    if build is None:
        raise UserError(f"rollout.strategy names the engine {strategy.engine}; inference servers are: {', '.join(sorted(_SERVERS))}")
    argv = [*build(recipe, strategy, model_path, device), f"--host={host}", f"--port={port}", *recipe.rollout.server_args]
    full = process_env(recipe, device=device, gpus=gpus) | dict(env or {})
    if strategy.engine == "embedded":
        full.setdefault("PYTHONPATH", python_path(os.environ))
    elif strategy.engine == "vllm":
        full = _vllm_env(device, os.environ) | full
    elif device == "cpu":
        full.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    return ProcessSpec(role="server", rank=rank, argv=argv, env=full, cpus=_cpus("server", recipe))


def process_env(recipe: Recipe, *, device: Device, gpus: Sequence[int], parent: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a process needs in its environment before its first import.

    Args:
        gpus: slot numbers, counted among the GPUs that ``parent`` (this process's environment) may see.
    """
    parent = os.environ if parent is None else parent
    env = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": visible_devices(gpus, parent),
    }
    if device == "cpu":
        env["OMP_NUM_THREADS"] = str(recipe.launch.threads)
    else:
        # Megatron-Core's tensor- and context-parallel overlap relies on kernels starting in the order of their launch.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = parent.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return env


def visible_devices(gpus: Sequence[int], parent: Mapping[str, str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` for slots ``gpus``: the parent's own list, where it has one, is what slots count in.

    Raises:
        UserError: a slot beyond the GPUs that this process may use.
    """
    allowed = parent.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return ",".join(map(str, gpus))
    names = [name for name in allowed.split(",") if name]
    if gpus and max(gpus) >= len(names):
        raise UserError(
            f"GPU slot {max(gpus)} is needed, but CUDA_VISIBLE_DEVICES={allowed} allows {len(names)}: slots 0 to {len(names) - 1}"
        )
    return ",".join(names[gpu] for gpu in gpus)


def python_path(parent: Mapping[str, str]) -> str:
    """``PYTHONPATH`` for our own processes: this one's import path beyond the installation, so that they find a user's workflow too.

    Not for SGLang and vLLM, whose interpreter may be another one.
    """
    paths = sysconfig.get_paths()
    installed = [os.path.realpath(paths[kind]) for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    mine = [os.path.abspath(path) for path in sys.path if os.path.isdir(path or ".")]
    extra = [path for path in mine if not any(f"{os.path.realpath(path)}/".startswith(f"{root}/") for root in installed)]
    given = [path for path in parent.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys([*extra, *given]))


def _sglang_argv(recipe: Recipe, strategy: ParallelStrategy, model_path: str, device: Device) -> list[str]:
    argv = [recipe.rollout.python or sys.executable, "-m", "sglang.launch_server", f"--model-path={model_path}"]
    argv += [f"--dtype={_DTYPES[recipe.rollout.dtype]}", f"--random-seed={recipe.run.seed}"]
    sizes = {"--tp-size": strategy.tp, "--pp-size": strategy.pp, "--ep-size": strategy.ep}
    argv += [f"{flag}={size}" for flag, size in sizes.items() if size > 1]
    return argv + ["--device=cpu"] * (device == "cpu")


def _vllm_argv(recipe: Recipe, strategy: ParallelStrategy, model_path: str, device: Device) -> list[str]:
    # Not `vllm serve`: some builds of vLLM for CPUs have no such program.
    argv = [recipe.rollout.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model_path}"]
    argv += [f"--dtype={_DTYPES[recipe.rollout.dtype]}", f"--seed={recipe.run.seed}"]
    sizes = {"--tensor-parallel-size": strategy.tp, "--pipeline-parallel-size": strategy.pp}
    argv += [f"{flag}={size}" for flag, size in sizes.items() if size > 1]
    argv += ["--enable-expert-parallel"] * (strategy.ep > 1)
    plug_in = [f"--worker-extension-cls={vllm_plugin.EXTENSION}", f'--weight-transfer-config={{"backend": "{vllm_plugin.BACKEND}"}}']
    return [*argv, "--enable-scale-out", "--logprobs-mode=processed_logprobs", *plug_in]


def _vllm_env(device: Device, parent: Mapping[str, str]) -> dict[str, str]:
    """Pauses and weight transfer are in vLLM's routes for developers. Its interpreter sees the plug-in, and nothing else of ours."""
    paths = [str(vllm_plugin.FOLDER), *filter(None, [parent.get("PYTHONPATH")])]
    env = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(paths), "VLLM_NO_USAGE_STATS": parent.get("VLLM_NO_USAGE_STATS", "1")}
    if device == "cpu":
        # The launcher pins processes and counts their threads; left to itself, vLLM takes half of the cores that it may use.
        env["VLLM_CPU_OMP_THREADS_BIND"] = parent.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return env


def _embedded_argv(recipe: Recipe, strategy: ParallelStrategy, model_path: str, device: Device) -> list[str]:
    timeout_s = recipe.sync.timeout_s + GRACE_S
    return [*_OUR_PYTHON, "areal_mega.serving", model_path, f"--dtype={_DTYPES[recipe.rollout.dtype]}", f"--dist-timeout={timeout_s:g}"]


_SERVERS = {"sglang": _sglang_argv, "vllm": _vllm_argv, "embedded": _embedded_argv}


def _cpus(role: str, recipe: Recipe) -> tuple[int, ...]:
    return tuple(recipe.launch.train_cpus if role == "train" else recipe.launch.rollout_cpus)
