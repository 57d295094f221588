"""The HTTP side: routes of SGLang's protocol on aiohttp, and the way between event loop and engine thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from areal_mega.serving import answers
from areal_mega.serving.engine import Engine
from areal_mega.serving.protocol import BadRequest, GenerateCall, ServingFacts, malformed, parse_generate, refused, unavailable
from areal_mega.serving.sequence import Sequence
from areal_mega.serving.text import Text
from areal_mega.serving.weights import DIGESTS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY = 1 << 30
PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the information routes say of this server."""

    model_path: str
    served_name: str
    version: str
    dtype: str
    args: dict[str, Any]
    started: float


class Frontend:
    """Requests of one server. Lives in the event loop; ``deliver`` and ``failed`` are called by the engine's thread.

    ``max_queued``: samples that may wait for a row; a request that would make them more is turned away.
    """

    def __init__(self, text: Text, facts: ServingFacts, info: ServerInfo, max_queued: int) -> None:
        self.text, self.facts, self.info, self.max_queued = text, facts, info, max_queued
        self.engine: Engine  # set by the app before the first request: engine and frontend know each other
        self.loop = asyncio.get_running_loop()
        self.failure = asyncio.Event()
        self._live: dict[str, Sequence] = {}

    # Called on the engine's thread.

    def deliver(self, sequences: list[Sequence]) -> None:
        # A streaming sequence changes while the loop would read it, so its event is written here, between two steps.
        batch = [(s, answers.generation(s, self.text, self.engine.version) if s.wanted.stream else None) for s in sequences]
        self.loop.call_soon_threadsafe(self._progress, batch)

    def failed(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(self.failure.set)

    # In the event loop.

    def _progress(self, batch: list[tuple[Sequence, dict[str, Any] | None]]) -> None:
        for sequence, event in batch:
            if sequence.finish is not None:
                self._live.pop(sequence.rid, None)
            if sequence.on_progress is not None:
                sequence.on_progress(sequence, event)

    def _submit(self, call: GenerateCall) -> None:
        for sequence in call.sequences:
            if sequence.rid in self._live:
                raise refused(f"request id {sequence.rid} is in use")
        if self.engine.broken:
            raise unavailable(f"no generation: {self.engine.broken}")
        # All that have not ended, running or not: counted here, where no step is under way, and so an upper bound of those that wait.
        waiting = len(self._live) + len(call.sequences) - self.engine.limits.max_rows
        if waiting > self.max_queued and self._live:
            raise unavailable(f"The request queue is full: {waiting} samples would wait, {self.max_queued} may; send it again later.")
        self._live.update({s.rid: s for s in call.sequences})
        self.engine.submit(call.sequences)

    async def run(self, call: GenerateCall) -> None:
        """Submit and wait until all sequences have finished; aborts them if the waiting is cancelled."""
        left = len(call.sequences)
        done: asyncio.Future[None] = self.loop.create_future()

        def progress(sequence: Sequence, _: object) -> None:
            nonlocal left
            if sequence.finish is not None:
                left -= 1
                if left == 0 and not done.done():
                    done.set_result(None)

        for sequence in call.sequences:
            sequence.on_progress = progress
        self._submit(call)
        try:
            await done
        except asyncio.CancelledError:
            self.abort({s.rid for s in call.sequences})
            raise

    def abort(self, rids: set[str]) -> None:
        self.engine.call(lambda: self.engine.abort(lambda s: s.rid in rids))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        call = parse_generate(await read_json(request), self.facts)
        if call.stream:
            return await self._stream(request, call)
        await self.run(call)
        results = [answers.generation(s, self.text, self.engine.version) for s in call.sequences]
        return web.json_response(results[0] if call.single else results)

    async def _stream(self, request: web.Request, call: GenerateCall) -> web.StreamResponse:
        """Server-sent events; each holds everything so far."""
        events: asyncio.Queue[tuple[Sequence, dict[str, Any]]] = asyncio.Queue()
        for sequence in call.sequences:
            sequence.on_progress = lambda s, event: events.put_nowait((s, event))
        index = {s.rid: i for i, s in enumerate(call.sequences)}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self._submit(call)
        await response.prepare(request)
        left = len(call.sequences)
        try:
            while left:
                sequence, event = await events.get()
                if not call.single:
                    event = event | {"index": index[sequence.rid]}
                left -= event["meta_info"]["finish_reason"] is not None
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.abort(set(index))
            raise
        await response.write_eof()
        return response

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        rid, everything = body.get("rid"), body.get("abort_all", False)
        if everything:
            await self.command(lambda: self.engine.abort(lambda _: True))
        elif isinstance(rid, str) and rid:
            await self.command(lambda: self.engine.abort(lambda s: s.rid == rid or s.rid.startswith(rid + "_")))
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await read_json(request, optional=True)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise malformed(f"1 validation error: mode: Input should be 'abort', 'retract' or 'in_place', got {mode!r}")
        await self.command(lambda: self.engine.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await self.command(self.engine.resume)
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def command(self, function: Callable[[], Any]) -> Any:
        """Run on the engine's thread between two steps."""
        return await asyncio.wrap_future(self.engine.call(function))

    async def flush_cache(self, request: web.Request) -> web.Response:
        deadline = time.monotonic() + float(request.query.get("timeout", 0))
        while not await self.command(lambda: not self.engine.waiting and self.engine.flush_cache()):
            if time.monotonic() >= deadline:
                return web.Response(status=400, text="Flush cache failed.\n")
            await asyncio.sleep(0.02)
        return web.Response(text="Cache flushed.\n")

    # Information.

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.failure is not None else 200)

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.failure is not None or self.engine.paused or self.engine.broken else 200)

    async def model_info(self, request: web.Request) -> web.Response:
        arch, info = self.engine.model.arch, self.info
        return web.json_response(
            {
                "model_path": info.model_path,
                "served_model_name": info.served_name,
                "tokenizer_path": info.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": arch.model_type,
                "architectures": list(arch.architectures),
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        state = await self.command(self.engine.state)
        facts = {
            "engine": "areal-mega-embedded",
            "version": self.info.version,
            "weight_version": self.engine.version,
            "hf_digests": DIGESTS,
            "bucket_runs": True,
        }
        return web.json_response({**self.info.args, "dtype": self.info.dtype, "internal_states": [state], "frontend": "python", **facts})

    async def metrics(self, request: web.Request) -> web.Response:
        c, state = self.engine.counters, await self.command(self.engine.state)
        values = [
            ("num_running_reqs", "gauge", state["running"]),
            ("num_queue_reqs", "gauge", state["waiting"]),
            ("num_paused_reqs", "gauge", state["running"] if state["paused"] else 0),
            ("num_used_tokens", "gauge", state["cached_tokens"]),
            ("prompt_tokens_total", "counter", c.prompt_tokens),
            ("generation_tokens_total", "counter", c.generated_tokens),
            ("cached_tokens_total", "counter", c.cached_tokens),
            ("num_retractions_total", "counter", c.retractions),
            ("num_requests_total", "counter", c.finished),
        ]
        label = f'{{model_name="{self.info.served_name}"}}'
        lines = [f"# TYPE sglang:{name} {kind}\nsglang:{name}{label} {float(value)}\n" for name, kind, value in values]
        return web.Response(text="".join(lines), content_type="text/plain")

    # Tokenizer.

    async def tokenize(self, request: web.Request) -> web.Response:
        prompt = (await read_json(request)).get("prompt")
        if not isinstance(prompt, str):
            raise malformed("prompt must be a string")
        self.need_tokenizer()
        tokens = self.text.encode(prompt)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.facts.context_length})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < self.facts.vocab for t in tokens):
            raise malformed("tokens must be a list of token ids of the vocabulary")
        self.need_tokenizer()
        return web.json_response({"text": self.text.decode(tokens, body.get("skip_special_tokens", True))})

    def need_tokenizer(self) -> None:
        if not self.text.known:
            raise refused("the server runs without a tokenizer")

    def routes(self) -> list[web.RouteDef]:
        get = {
            "/health": self.health,
            "/health_generate": self.health,
            "/ready": self.ready,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/metrics": self.metrics,
            "/flush_cache": self.flush_cache,
        }
        post: dict[str, Handler] = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": self.flush_cache,
            "/tokenize": self.tokenize,
            "/v1/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/v1/detokenize": self.detokenize,
        }
        return [web.get(path, handler) for path, handler in get.items()] + [web.post(path, handler) for path, handler in post.items()]


async def read_json(request: web.Request, *, optional: bool = False) -> dict[str, Any]:
    """The body as an object; an empty one is {} where ``optional``.

    Raises:
        BadRequest: it is not JSON, or no object.
    """
    raw = await request.read()
    if optional and not raw:
        return {}
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise malformed(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise malformed("the body must be a JSON object")
    return body


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals become their answers."""
    try:
        return await handler(request)
    except BadRequest as refusal:
        # A server that is full or half updated may be asked again; a wrong request may not.
        return web.json_response(refusal.body, status=refusal.status, headers={"Retry-After": "1"} if refusal.status == 503 else None)
