"""Command line of the embedded server, and its life: load, listen, serve, stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from areal_mega.core.errors import UserError
from areal_mega.core.memory import keep_freed_memory

log = logging.getLogger(__name__)
_CACHE_SHARE = 0.2
"""Part of the machine's memory that the key-value cache may take unless --max-total-tokens says otherwise."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def parser() -> argparse.ArgumentParser:
    p = _Parser(prog="areal-mega serve", description="Embedded inference server (CPU) speaking SGLang's HTTP protocol.")
    p.add_argument("model", nargs="?", help="HuggingFace folder or hub name")
    p.add_argument("--model-path", help="the same, under SGLang's name")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=30000, help="0: any free one, printed when ready")
    p.add_argument("--dtype", default="auto", help="bfloat16, float32, or auto: as config.json says")
    p.add_argument("--kernels", default="auto", choices=["auto", "native", "torch"], help="native: built by GCC, or an error")
    p.add_argument("--context-length", type=int, help="longest prompt plus answer; default: as config.json says")
    p.add_argument("--max-running-requests", type=int, default=256)
    p.add_argument("--max-total-tokens", type=int, help="limit of running requests x the longest one; default: a fifth of memory")
    p.add_argument("--prefix-cache-tokens", type=int, help="kept for the next turn; default: a quarter of the total; 0: none")
    p.add_argument("--max-queued-requests", type=int, default=4096, help="samples that may wait; one more request is answered with 503")
    p.add_argument("--chunked-prefill-size", type=int, default=2048, help="prompt tokens computed per step")
    p.add_argument("--served-model-name")
    p.add_argument("--weight-version", default="default", help="version of the weights at the start")
    p.add_argument("--enable-return-routed-experts", action="store_true")
    p.add_argument("--skip-tokenizer-init", action="store_true", help="run without a tokenizer: token ids only")
    p.add_argument("--dist-timeout", type=float, default=600.0, help="seconds a weight-sync group or broadcast may take")
    p.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return p


def serve(args: list[str]) -> int:
    """Run the server until SIGTERM or SIGINT. Returns 0 then, 1 if the engine failed.

    Raises:
        UserError: bad flags, missing folder, unknown architecture, port in use.
    """
    options = parser().parse_args(args)
    if (options.model is None) == (options.model_path is None):
        raise UserError("areal-mega serve: give the model once: MODEL, or --model-path MODEL")
    options.model_path = options.model_path or options.model
    for name in ("max_running_requests", "max_queued_requests", "chunked_prefill_size"):
        if getattr(options, name) < 1:
            raise UserError(f"areal-mega serve: --{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keep_freed_memory()
    listener = _bind(options.host, options.port)
    with listener:
        return asyncio.run(_serve(options, listener))


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded: whoever finds it in use should not wait for that. It answers only once listening."""
    if not 0 <= port <= 65535:
        raise UserError(f"areal-mega serve: port {port} is not in 0..65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port") from None
    return listener


async def _serve(options: argparse.Namespace, listener: socket.socket) -> int:
    from aiohttp import web

    from areal_mega.serving.http import MAX_BODY, errors

    frontend, routes = await _assemble(options)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[errors])
    app.add_routes(routes)
    # A client that hangs up aborts its requests: handlers are cancelled then.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        frontend.loop.add_signal_handler(number, stop.set)
    frontend.engine.start()
    await web.SockSite(runner, listener, backlog=1024).start()
    host, port = listener.getsockname()[:2]
    print(f"serving {options.model_path} at http://{host}:{port}", flush=True)
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(frontend.failure.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    frontend.engine.stop()
    await runner.cleanup()
    if frontend.engine.failure is not None:
        print(f"the engine failed: {frontend.engine.failure!r}", file=sys.stderr)
        return 1
    return 0


async def _assemble(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Load the model and wire frontend, engine and routes together."""
    from areal_mega import __version__
    from areal_mega.serving.admin import Admin
    from areal_mega.serving.engine import Engine
    from areal_mega.serving.http import Frontend, ServerInfo
    from areal_mega.serving.loader import stop_tokens
    from areal_mega.serving.openai import OpenAI
    from areal_mega.serving.protocol import ServingFacts
    from areal_mega.serving.text import load_text
    from areal_mega.serving.updates import Updater

    path = options.model_path
    model, hf, limits = load(options)
    weights = model.weights
    text = load_text(path, options.skip_tokenizer_init)
    facts = ServingFacts(
        vocab=weights.arch.vocab,
        context_length=limits.context_length,
        routed_experts=limits.routed_experts,
        encode=text.encode if text.known else None,
        decode_known=text.known,
    )
    chosen = {"context_length": limits.context_length, "kernels": weights.ops.name}
    info = ServerInfo(
        model_path=path,
        served_name=options.served_model_name or path,
        version=__version__,
        dtype=str(weights.dtype).removeprefix("torch."),
        args={k: v for k, v in vars(options).items() if k != "model"} | chosen,
        started=time.time(),
    )
    frontend = Frontend(text, facts, info, options.max_queued_requests)
    frontend.engine = Engine(
        model,
        limits,
        eos=stop_tokens(path, hf),
        version=options.weight_version,
        decode=lambda ids: text.decode(ids, skip_special=False),
        deliver=frontend.deliver,
        on_failure=frontend.failed,
    )
    updater = Updater(frontend.engine, options.dist_timeout)
    return frontend, frontend.routes() + Admin(frontend, updater).routes() + OpenAI(frontend).routes()


def load(options: argparse.Namespace) -> tuple[Any, dict[str, Any], Any]:
    """Model, config.json and limits, made on a thread that ends, so that the engine's has the only team of OpenMP threads in the process.

    With a second team, idle or not, there are more threads than CPUs, and GNU OpenMP then lets all of them sleep between two operations
    instead of spinning: a step took half as long again (docs/LOG.md).
    """
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(_load, options).result()


def _load(options: argparse.Namespace) -> tuple[Any, dict[str, Any], Any]:
    from areal_mega.serving.loader import load_weights
    from areal_mega.serving.model import Model

    weights, hf = load_weights(options.model_path, options.dtype, options.kernels)
    limits = _limits(options, weights)
    return Model(weights, limits.context_length), hf, limits


def _limits(options: argparse.Namespace, weights: Any) -> Any:
    from areal_mega.serving.engine import EngineLimits
    from areal_mega.serving.kv import bytes_per_token

    arch = weights.arch
    context = options.context_length or arch.max_positions
    if not 1 <= context <= arch.max_positions:
        raise UserError(
            f"--context-length {context} is not in 1..{arch.max_positions}, the model's max_position_embeddings in "
            f"{Path(options.model_path) / 'config.json'}"
        )
    each = bytes_per_token(arch, weights.dtype)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = options.max_total_tokens or max(int(memory * _CACHE_SHARE) // each, context)
    if total < context:
        raise UserError(f"--max-total-tokens {total} holds no request of the context length {context}; give at least {context}")
    if options.enable_return_routed_experts and arch.experts is None:
        raise UserError(f"--enable-return-routed-experts: {arch.model_type} has no experts; drop the flag")
    prefixes = total // 4 if options.prefix_cache_tokens is None else options.prefix_cache_tokens
    if prefixes < 0:
        raise UserError(f"--prefix-cache-tokens must be at least 0, got {prefixes}")
    return EngineLimits(
        prefixes=prefixes,
        max_rows=options.max_running_requests,
        max_tokens=total,
        context_length=context,
        chunk=options.chunked_prefill_size,
        routed_experts=options.enable_return_routed_experts,
    )
