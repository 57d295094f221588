"""Client of an inference server: SGLang and the embedded server alike."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import aiohttp

from areal_mega.core.errors import DeadlineExceeded
from areal_mega.rollout.continuation import Partial, ServerFault, parse_version

__all__ = ["Capabilities", "GenerateRequest", "Generation", "InferenceClient", "PauseMode", "ServerDigest", "ServerFault"]

T = TypeVar("T")
PauseMode = Literal["in_place", "retract", "abort"]
_PROBE_S = 60.0
_RETRY_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sample to generate. ``temperature`` 0 is greedy; ``top_k`` -1 is off; ``rid`` empty: the client makes one."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    rid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was generated: ``output_ids``, ``logprobs``, ``versions`` have one entry per new token.

    ``logprobs`` are of log_softmax(logits / temperature), before top-k and top-p. The stop token, if any, is the last of ``output_ids``
    and not in ``text``. ``abort`` means that ``abort_all`` of this client ended it.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort"]
    prompt_tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do, as probed."""

    engine: str
    version: str
    weight_version: str
    max_context: int | None
    update_sessions: bool
    """Has begin_weight_update / end_weight_update (mandatory where present)."""
    version_spans: bool
    """Reports which weight version made which tokens of a request."""
    hf_digests: bool
    """Reports digests per HuggingFace tensor."""
    routed_experts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDigest:
    """Digests of the weights that a server holds: ``combined`` over ``tensors`` by HF name."""

    weight_version: int
    combined: str
    tensors: Mapping[str, str] = field(default_factory=dict)


class InferenceClient:
    """One inference server.

    Args:
        base_url: ``http://host:port``.
        timeout_s: deadline of one HTTP request, generation included (and of every admin call).
        retries: times that a failed generation request is sent again; admin calls are never repeated.
    """

    def __init__(self, base_url: str, *, timeout_s: float, retries: int) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s, self._retries = timeout_s, retries
        self._session: aiohttp.ClientSession | None = None
        self._sessions_known: bool | None = None
        self._spans = True
        self._paused: PauseMode | None = None
        self._aborts = 0
        self._version = 0

    # Generation.

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate all; answers stand in the order of the requests.

        Requests with the same prompt travel in one HTTP call, so that the server computes the prompt once. A request that the server
        ends with ``abort`` because of a weight update goes on with its tokens so far and the rest of its budget.

        Raises:
            ServerFault: the server failed, or answered nonsense, ``retries`` + 1 times.
            DeadlineExceeded: no answer within ``timeout_s``, as often.
        """
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_prompt.setdefault(request.input_ids, []).append(index)
        partials = [Partial(request, self.base_url) for request in requests]
        tasks = [asyncio.create_task(self._complete([partials[i] for i in members])) for members in by_prompt.values()]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [
            Generation(
                output_ids=tuple(p.output_ids),
                logprobs=tuple(p.logprobs),
                versions=tuple(p.versions),
                finish_reason=p.finish_reason,
                prompt_tokens=len(p.request.input_ids),
                text=p.text,
            )
            for p in partials
        ]

    async def _complete(self, members: Sequence[Partial]) -> None:
        """Drive samples of one prompt to their ends."""
        pending = list(members)
        while pending:
            aborts = self._aborts
            answers = await self._generate_once(pending)
            for partial, answer in zip(pending, answers, strict=True):
                partial.absorb(answer, stopped_by_us=self._aborts != aborts)
            pending = [p for p in pending if not p.done]
        for partial in members:
            if partial.segments > 1:
                partial.text = await self._joined_text(partial)

    async def _generate_once(self, pending: Sequence[Partial]) -> list[dict[str, Any]]:
        """One answer per sample; validated whole, so that a bad answer is asked for again and nothing of it kept."""
        for attempt in range(self._retries + 1):
            body = {
                "input_ids": [p.context for p in pending],
                "sampling_params": [p.sampling_params() for p in pending],
                "rid": [p.next_rid() for p in pending],
                "return_logprob": True,
            }
            try:
                if not self._spans:
                    await self.model_info()  # others change the weights: the answer will not say under which ones it began
                version = self._version
                answer = await self._request("POST", "/generate", body)
                answers = answer if isinstance(answer, list) else [answer]
                if len(answers) != len(pending):
                    raise ServerFault(self.base_url, f"/generate answered {len(answers)} samples where {len(pending)} were asked for")
                return [p.checked(a, version) for p, a in zip(pending, answers, strict=True)]
            except (ServerFault, DeadlineExceeded) as error:
                if attempt == self._retries or (isinstance(error, ServerFault) and error.is_refusal):
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _joined_text(self, partial: Partial) -> str:
        """Text of a sample made in several requests: decoded whole, for a token may be part of a character."""
        try:
            answer = await self._request("POST", "/detokenize", {"model": "", "tokens": partial.text_ids})
        except ServerFault as fault:
            if fault.is_refusal:  # a server without a tokenizer
                return partial.text
            raise
        text = str(answer["text"])
        return text[: text.rindex(partial.matched)] if partial.matched and partial.matched in text else text

    async def abort_all(self) -> None:
        """End every request on the server, of whatever client; those of this client come back with ``abort``."""
        self._aborts += 1
        await self._request("POST", "/abort_request", {"abort_all": True})

    # State.

    async def wait_healthy(self, deadline_s: float) -> None:
        """Wait until the server answers.

        Raises:
            DeadlineExceeded: it did not; says what it did last.
        """
        end, last = time.monotonic() + deadline_s, "no connection was possible"
        while time.monotonic() < end:
            try:
                await self._request("GET", "/health", timeout_s=min(10.0, deadline_s))
                return
            except (ServerFault, DeadlineExceeded) as error:
                last = str(error)
            await asyncio.sleep(0.2)
        raise DeadlineExceeded(f"inference server {self.base_url} was not healthy within {deadline_s:g} s; last: {last}")

    async def model_info(self) -> dict[str, Any]:
        info = await self._request("GET", "/model_info", fallback="/get_model_info")
        self._version = parse_version(self.base_url, info["weight_version"])
        return dict(info)

    async def probe(self) -> Capabilities:
        """Find out what the server can do; generates one token, so it must not be paused."""
        info = await self.model_info()
        server = await self._request("GET", "/server_info", fallback="/get_server_info")
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True}
        sample = await self._request("POST", "/generate", body, timeout_s=_PROBE_S)
        self._spans = "weight_versions" in sample["meta_info"]
        return Capabilities(
            engine=str(server.get("engine", "sglang")),
            version=str(server.get("version", "unknown")),
            weight_version=str(info["weight_version"]),
            max_context=server.get("context_length"),
            update_sessions=await self._has_sessions(),
            version_spans=self._spans,
            hf_digests=bool(server.get("hf_digests", False)),
            routed_experts=bool(server.get("enable_return_routed_experts", False)),
        )

    async def _has_sessions(self) -> bool:
        """A GET on a route that takes POST is 405 where it exists and 404 where not: asks without opening a session."""
        if self._sessions_known is None:
            try:
                await self._request("GET", "/begin_weight_update")
                self._sessions_known = True
            except ServerFault as fault:
                if fault.status not in (404, 405):
                    raise
                self._sessions_known = fault.status == 405
        return self._sessions_known

    async def pause(self, mode: PauseMode) -> None:
        await self._request("POST", "/pause_generation", {"mode": mode})
        self._paused = mode

    async def resume(self) -> None:
        await self._request("POST", "/continue_generation", {})
        self._paused = None

    # Weights.

    async def init_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Make the server join a weight-sync group; returns when the group is complete, so run it beside the other members' joins."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._success("/init_weights_update_group", body)

    async def destroy_group(self, group_name: str) -> None:
        await self._success("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_update(self) -> None:
        """Open an update session; nothing on an old server, which has none."""
        if await self._has_sessions():
            await self._success("/begin_weight_update", {})

    async def end_update(self) -> None:
        if await self._has_sessions():
            await self._success("/end_weight_update", {})

    async def update_bucket(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: int | None = None,
        flush_cache: bool = False,
        flattened: bool = True,
    ) -> None:
        """Make the server receive one bucket; returns when it is loaded, so run it beside the sender's broadcast.

        Args:
            dtypes: torch's names without the module, e.g. ``bfloat16``.
            version: becomes the server's weight version; give it with the last bucket only.
            flattened: the bucket comes as one uint8 buffer; else tensor by tensor.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        if flattened:
            body["load_format"] = "flattened_bucket"
        if version is not None:
            body["weight_version"] = str(version)
        await self._success("/update_weights_from_distributed", body)
        self._version = self._version if version is None else version

    async def update_from_disk(self, path: str, version: int) -> None:
        """Load a HuggingFace folder that the server can read."""
        # Requests frozen in place keep their cache; a flush would be refused although the weights had changed.
        body = {"model_path": path, "weight_version": str(version), "flush_cache": self._paused != "in_place", "abort_all_requests": False}
        await self._success("/update_weights_from_disk", body)
        self._version = version

    async def digests(self) -> ServerDigest:
        """Digests of the weights that the server computes with.

        Raises:
            ServerFault: it reports none by HuggingFace name (``Capabilities.hf_digests``).
        """
        answer = await self._request("POST", "/weights_checker", {"action": "checksum"})
        if "hf_digest" not in answer:
            raise ServerFault(self.base_url, "/weights_checker reports no digests by HuggingFace name")
        version = parse_version(self.base_url, answer["weight_version"])
        return ServerDigest(weight_version=version, combined=answer["hf_digest"], tensors=answer["hf_digests"])

    async def _success(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._request("POST", path, body)
        if not answer.get("success"):
            raise ServerFault(self.base_url, f"{path} failed: {answer.get('message')}")

    # Transport.

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None, fallback: str = ""
    ) -> Any:
        """The decoded answer; None for an empty one. ``fallback``: the route's name on other versions, tried on 404."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        if self._session is None:
            # A connection per request: a kept one may be closed by the server just as a call is sent, and admin calls are never repeated.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
            )
        try:
            async with asyncio.timeout(limit), self._session.request(method, self.base_url + path, json=body) as response:
                status, raw = response.status, await response.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"inference server {self.base_url} did not answer {path} within {limit:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFault(self.base_url, f"{path}: connection failed: {error or type(error).__name__}") from error
        if status == 404 and fallback:
            return await self._request(method, fallback, body, timeout_s=timeout_s)
        if status != 200:
            raise ServerFault(self.base_url, f"{path} answered {status}: {raw.decode(errors='replace').strip()[:500]}", status=status)
        if not raw or path == "/health":
            return None
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ServerFault(self.base_url, f"{path} answered malformed JSON: {raw[:100]!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
