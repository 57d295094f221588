"""Command lines and environments, without starting anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_children import make_run

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.launch.commands import process_env, python_path, server_spec, visible_devices, worker_spec
from areal_mega.launch.local import ProcessSpec
from areal_mega.parallel.strategy import parse
from areal_mega.sync import vllm_plugin


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"run": {"name": "one", "steps": 1, "seed": 9}, "model": {"path": "m"}} | sections)


def server(strategy: str = "sglang:d2t2", device: Any = "cuda", gpus: tuple[int, ...] = (4, 5), **rollout: Any) -> ProcessSpec:
    return server_spec(
        1,
        recipe=recipe(rollout={"strategy": strategy} | rollout),
        strategy=parse(strategy),
        model_path="/models/m",
        host="127.0.0.1",
        port=8000,
        device=device,
        gpus=gpus,
    )


def test_a_worker_knows_its_run_and_attempt(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    settings = recipe(launch={"train_cpus": [0], "rollout_cpus": [1], "threads": 3})
    spec = worker_spec("train", 2, run_dir=run_dir, recipe=settings, device="cpu", env={"A": "b"})
    assert spec.key == ("train", 2) and spec.cpus == (0,)
    assert list(spec.argv) == [
        sys.executable,
        *("-P", "-m", "areal_mega.launch.worker", "train", "--rank=2"),
        *(f"--run-dir={run_dir.path}", f"--attempt={run_dir.attempt}"),
    ]
    assert spec.env["OMP_NUM_THREADS"] == "3" and spec.env["CUDA_VISIBLE_DEVICES"] == "" and spec.env["A"] == "b"
    assert worker_spec("rollout", 0, run_dir=run_dir, recipe=settings, device="cpu").cpus == (1,)


def test_sglang_gets_its_part_of_the_strategy_and_the_users_flags_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = server(server_args=["--mem-fraction-static", "0.8"], python="/opt/sglang/bin/python", dtype="fp32")
    assert list(spec.argv) == [
        *("/opt/sglang/bin/python", "-m", "sglang.launch_server", "--model-path=/models/m", "--dtype=float32", "--random-seed=9"),
        *("--tp-size=2", "--host=127.0.0.1", "--port=8000", "--mem-fraction-static", "0.8"),
    ]
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "4,5" and "OMP_NUM_THREADS" not in spec.env and "PYTHONPATH" not in spec.env
    assert spec.key == ("server", 1)


def test_sglang_on_a_cpu() -> None:
    spec = server("sglang:d1", device="cpu", gpus=())
    assert spec.argv[0] == sys.executable and "--device=cpu" in spec.argv and "--tp-size=1" not in spec.argv
    assert spec.env["SGLANG_USE_CPU_ENGINE"] == "1" and spec.env["CUDA_VISIBLE_DEVICES"] == ""


def test_vllm_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/given")
    spec = server("vllm:d2t2p2e2", gpus=(4, 5, 6, 7), python="/opt/vllm/bin/python", server_args=["--max-model-len=512"])
    assert list(spec.argv) == [
        *("/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model=/models/m", "--dtype=bfloat16", "--seed=9"),
        *("--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--enable-expert-parallel", "--enable-scale-out"),
        *("--logprobs-mode=processed_logprobs", "--worker-extension-cls=areal_mega_vllm.Extension"),
        *('--weight-transfer-config={"backend": "areal_mega"}', "--host=127.0.0.1", "--port=8000", "--max-model-len=512"),
    ]
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7" and spec.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert spec.env["PYTHONPATH"] == f"{vllm_plugin.FOLDER}{os.pathsep}/given" and "VLLM_CPU_OMP_THREADS_BIND" not in spec.env


def test_vllm_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    spec = server("vllm:d1", device="cpu", gpus=())
    assert spec.argv[0] == sys.executable and "--tensor-parallel-size=1" not in spec.argv
    assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and spec.env["CUDA_VISIBLE_DEVICES"] == ""
    assert os.listdir(spec.env["PYTHONPATH"]) and "SGLANG_USE_CPU_ENGINE" not in spec.env
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    assert server("vllm:d1", device="cpu", gpus=()).env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_the_embedded_server() -> None:
    spec = server("embedded:d2", device="cpu", gpus=(), server_args=["--context-length=512"])
    assert list(spec.argv) == [
        *(sys.executable, "-P", "-m", "areal_mega.serving", "/models/m", "--dtype=bfloat16", "--dist-timeout=615"),
        *("--host=127.0.0.1", "--port=8000", "--context-length=512"),
    ]


@pytest.mark.parametrize("arg", ["--port", "--port=1", "--tp-size", "--tensor-parallel-size=4", "--dtype", "--model-path"])
def test_flags_that_the_recipe_sets_elsewhere_are_refused(arg: str) -> None:
    with pytest.raises(UserError, match=rf"rollout.server_args has {arg.partition('=')[0]}, which .*; remove it") as caught:
        server(server_args=["--enable-metrics", arg, "7"])
    assert "\n" not in str(caught.value)


def test_an_engine_without_a_server_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.strategy names the engine megatron; inference servers are: embedded, sglang, vllm"):
        server("megatron:d1")


@pytest.mark.parametrize(
    ("allowed", "gpus", "expected"),
    [
        (None, (), ""),
        (None, (0, 3), "0,3"),
        ("", (), ""),
        ("4,5,6,7", (), ""),
        ("4,5,6,7", (0, 3), "4,7"),
        ("GPU-aa,GPU-bb", (1,), "GPU-bb"),
    ],
)
def test_slots_count_among_the_gpus_that_the_launcher_may_use(allowed: str | None, gpus: tuple[int, ...], expected: str) -> None:
    assert visible_devices(gpus, {} if allowed is None else {"CUDA_VISIBLE_DEVICES": allowed}) == expected


@pytest.mark.parametrize("allowed", ["4,5", ""])
def test_a_slot_beyond_them_is_refused_with_the_count(allowed: str) -> None:
    count = len(allowed.split(",")) if allowed else 0
    with pytest.raises(UserError, match=rf"GPU slot 2 is needed, but CUDA_VISIBLE_DEVICES={allowed} allows {count}"):
        visible_devices((0, 2), {"CUDA_VISIBLE_DEVICES": allowed})


def test_a_users_own_folders_are_importable_in_workers_and_the_installation_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *sys.path])
    paths = python_path({"PYTHONPATH": f"/given{os.pathsep}{tmp_path}"}).split(os.pathsep)
    assert paths[:2] == [str(tmp_path), os.getcwd()] and paths[-1] == "/given"
    assert len(paths) == len(set(paths)) and not any("site-packages" in path or path.endswith("bin") for path in paths)


def test_a_gpu_process_keeps_the_users_connection_limit() -> None:
    env = process_env(recipe(), device="cuda", gpus=(0,), parent={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert process_env(recipe(), device="cuda", gpus=(0,), parent={})["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
