"""The servers that the tests of vLLM's client talk to: a real vLLM, or the recording of one.

A real server runs where ``AREAL_MEGA_VLLM_ENV`` names an environment that holds vLLM (``scripts/check_vllm.sh`` makes one), started with
the very command of a run. ``AREAL_MEGA_RECORD=1`` keeps what it answers in ``tests/data/vllm_suite``: see ``peers``.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers import Form, end_session
from serving_trainer import free_port

from areal_mega.config.schema import Recipe
from areal_mega.launch.commands import server_spec
from areal_mega.parallel.strategy import parse

ENV = os.environ.get("AREAL_MEGA_VLLM_ENV", "")
DATA = Path(__file__).parent.parent / "data" / "vllm_suite"
CONTEXT = 1024
_START_S = 600.0


@contextmanager
def real_vllm(model: Path, *flags: str, python: str = f"{ENV}/bin/python") -> Iterator[str]:
    """A vLLM server on this machine's CPU; yields its URL, ends the process and its children by their ids."""
    port = free_port()
    rollout = {
        "strategy": "vllm:d1",
        "python": python,
        "dtype": "fp32",
        "server_args": [f"--max-model-len={CONTEXT}", "--enforce-eager", "--served-model-name=tiny", *flags],
    }
    recipe = Recipe.model_validate({"run": {"name": "check", "steps": 1}, "model": {"path": str(model)}, "rollout": rollout})
    where: dict[str, Any] = {"host": "127.0.0.1", "port": port, "device": "cpu"}
    spec = server_spec(0, recipe=recipe, strategy=parse("vllm:d1"), model_path=str(model), **where)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **spec.env}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(spec.argv, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url
        finally:
            end_session(process)


def _wait(url: str, process: subprocess.Popen[Any], log: Any) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    log.seek(0)
    raise AssertionError(f"the server did not start (exit code {process.poll()}): {log.read()[-12000:]}")


def _same(path: str, body: Any) -> Any:
    """Requests are compared without their random ids, ports, and this machine's folders."""
    if isinstance(body, dict):
        kept = {key: _same(path, value) for key, value in body.items() if key not in ("request_id", "master_port")}
        return kept | ({"folder": Path(kept["folder"]).name} if "folder" in kept else {})
    return body


def _kept(value: Any) -> Any:
    """Answers are kept without times, folders, ids, fields that say nothing, and the text of single tokens."""
    if isinstance(value, dict):
        dropped = ("request_id", "created", "root", "permission", "token", "bytes", "usage")
        short = {key: _kept(v) for key, v in value.items() if key not in dropped and (v is not None or key == "stop_reason")}
        if "bytes" in value:
            short.pop("top_logprobs", None)
        return short
    return [_kept(v) for v in value] if isinstance(value, list) else value


VLLM = Form(DATA, _same, _kept)
