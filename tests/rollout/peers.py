"""The servers that the client's tests talk to: embedded, a real SGLang, or the recording of one.

A real server runs where ``AREAL_MEGA_SGLANG_ENV`` names an environment that holds SGLang (``scripts/check_sglang.sh`` makes one). What it
answers is kept for machines without one by ``AREAL_MEGA_RECORD=1``: then a proxy writes every exchange of every test into
``tests/data/sglang_suite/<test>.json``, in the order in which they began and ended, and the recording is played back in that order.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from serving_trainer import free_port

DATA = Path(__file__).parent.parent / "data" / "sglang_suite"
ENV = os.environ.get("AREAL_MEGA_SGLANG_ENV", "")
RECORDING = bool(os.environ.get("AREAL_MEGA_RECORD"))
CONTEXT = 1024
GROUP = "weights"
_START_S, _STOP_S, _ORDER_S = 400.0, 5.0, 30.0
_TIMES = ("_time", "_latency", "_duration", "_wait", "_ts")


@dataclass
class Peer:
    """One server as one test sees it. ``live``: it takes part in weight-sync groups."""

    kind: str
    url: str
    live: bool

    @property
    def is_sglang(self) -> bool:
        return self.kind != "embedded"


@contextmanager
def real_sglang(model: Path, *flags: str) -> Iterator[str]:
    """A SGLang server on this machine's CPU, in its own environment; yields its URL, ends the process and its children by their ids."""
    port = free_port()
    argv = [f"{ENV}/bin/python", "-m", "sglang.launch_server", f"--model-path={model}", "--device=cpu", "--host=127.0.0.1"]
    argv += [f"--port={port}", "--attention-backend=torch_native", "--sampling-backend=pytorch", "--grammar-backend=none"]
    argv += ["--skip-server-warmup", "--sleep-on-idle", "--max-total-tokens=16384", *flags]
    own = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(argv, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url
        finally:
            end_session(process)


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process that leads a session, and whatever of that session it leaves behind."""
    from areal_mega.launch.processes import kill_members

    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert not kill_members({process.pid}), "processes of the server survive"


def _wait(url: str, process: subprocess.Popen[Any], log: Any) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    log.seek(0)
    raise AssertionError(f"the server did not start (exit code {process.poll()}): {log.read()[-3000:]}")


# Recording and playing back.


def comparable(path: str, body: Any) -> Any:
    """What of a request must be as recorded: not its random ids, not where this machine keeps models and listens."""
    if not isinstance(body, dict):
        return body
    left = {key: value for key, value in body.items() if key not in ("rid", "master_port")}
    if str(left.get("group_name")).startswith(GROUP):
        left["group_name"] = GROUP
    if "model_path" in left:
        left["model_path"] = Path(left["model_path"]).name
    return left


@dataclass
class Form:
    """How exchanges of one kind of server are kept: where, what of a request must be the same, what of an answer is of use."""

    folder: Path
    same: Callable[[str, Any], Any]
    kept: Callable[[Any], Any]


@asynccontextmanager
async def recorded_through(url: str, name: str, form: Form | None = None) -> AsyncIterator[str]:
    """A proxy before ``url``; on a clean exit it writes what went through it."""
    form = form or SGLANG
    exchanges: list[dict[str, Any]] = []
    clock = iter(range(1 << 30))

    async def forward(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        exchange = {"method": request.method, "path": request.path_qs, "request": form.same(request.path, body), "began": next(clock)}
        exchanges.append(exchange)
        async with aiohttp.ClientSession() as http, http.request(request.method, url + request.path_qs, json=body) as response:
            text = await response.text()
        exchange |= {"status": response.status, "ended": next(clock)} | _answer(text, form)
        return web.Response(status=response.status, text=text)

    async with _serving(forward) as own:
        yield own
    # A request that the client gave up was not answered.
    done = [e for e in exchanges if "ended" in e]
    lines = ",\n".join(json.dumps(e, separators=(",", ":")) for e in done)
    form.folder.mkdir(parents=True, exist_ok=True)
    (form.folder / f"{name}.json").write_text(f"[\n{lines}\n]\n")


def _answer(text: str, form: Form) -> dict[str, Any]:
    try:
        return {"answer": form.kept(json.loads(text))}
    except ValueError:
        return {"text": text}


def _timeless(value: Any) -> Any:
    """Times are of no use in a recording, and what a server says of its whole machine is long."""
    if isinstance(value, dict) and "internal_states" in value:
        kept = (
            "version",
            "context_length",
            "max_total_num_tokens",
            "max_req_input_len",
            "enable_return_routed_experts",
            "enable_deterministic_inference",
            "weight_version",
        )
        return {key: value[key] for key in kept if key in value}
    if isinstance(value, dict):
        return {key: _timeless(v) for key, v in value.items() if not key.endswith(_TIMES) and key != "model_path"}
    if isinstance(value, list):
        return [_timeless(v) for v in value]
    return Path(value).name if isinstance(value, str) and value.startswith(tempfile.gettempdir()) else value


SGLANG = Form(DATA, comparable, _timeless)


@asynccontextmanager
async def played_back(name: str, form: Form = SGLANG) -> AsyncIterator[str]:
    """A server that answers as recorded, and no sooner than what was answered before."""
    exchanges: list[dict[str, Any]] = json.loads((form.folder / f"{name}.json").read_text())
    used: set[int] = set()
    done: set[int] = set()
    changed = asyncio.Condition()

    async def answer(request: web.Request) -> web.Response:
        body = form.same(request.path, await request.json() if request.can_read_body else None)
        async with changed:
            same = [i for i, e in enumerate(exchanges) if (e["method"], e["path"], e["request"]) == (request.method, request.path_qs, body)]
            if not (fresh := [i for i in same if i not in used]):
                return web.Response(status=501, text=f"not recorded ({len(same)} times at most): {request.path} {json.dumps(body)[:300]}")
            mine = exchanges[fresh[0]]
            used.add(fresh[0])
            earlier = {i for i, e in enumerate(exchanges) if e["ended"] < mine["ended"]}
            async with asyncio.timeout(_ORDER_S):
                await changed.wait_for(lambda: earlier <= done)
            done.add(fresh[0])
            changed.notify_all()
        if "answer" in mine:
            return web.json_response(mine["answer"], status=mine["status"])
        return web.Response(status=mine["status"], text=mine["text"])

    async with _serving(answer) as url:
        yield url


@asynccontextmanager
async def _serving(handler: Any) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
