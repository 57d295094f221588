"""Client of vLLM's HTTP interface: token in, token out, with the plug-in of `areal_mega.sync.vllm_plugin` for weights."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from areal_mega.rollout.continuation import Partial, readable, segment, spanned
from areal_mega.rollout.generation import Generator
from areal_mega.rollout.inference import (
    Capabilities,
    GenerateRequest,
    Generation,
    PauseMode,
    Run,
    Segment,
    ServerDigest,
    ServerFault,
    one_by_one,
    parse_version,
)
from areal_mega.rollout.transport import Transport
from areal_mega.sync.digest import DigestKind

__all__ = ["VLLMClient", "checked", "sampling_params"]

_GENERATE = "/inference/v1/generate"
_FLOOR = -9999.0
"""What vLLM sends for a log-probability that is NaN or minus infinity: its JSON can say neither."""
_PAUSE: Mapping[PauseMode, str] = {
    "retract": "mode=keep&clear_cache=true",
    "in_place": "mode=keep&clear_cache=false",
    "abort": "mode=abort&clear_cache=true",
}
"""``keep`` holds requests back; with the cache cleared they are preempted, and their prefix is computed anew when they go on."""
_DIGESTS: DigestKind = "sums"
"""What the plug-in computes, as buckets come."""
_NO_BYTES = hashlib.sha256(b"").hexdigest()
_PROBE = (1, 2, 3)
"""Every vocabulary has these tokens; 0 alone may be padding, which says the same of all tokens."""
_FLAT = 2.0
"""vLLM's highest temperature, at which no token is likely to have all of the probability."""


class VLLMClient:
    """One vLLM server; see `rollout.inference.InferenceServer`.

    Args:
        base_url: ``http://host:port``.
        timeout_s: deadline of one HTTP request, generation included (and of every admin call).
        retries: times that a failed generation request is sent again; admin calls are never repeated.
    """

    def __init__(self, base_url: str, *, timeout_s: float, retries: int) -> None:
        self._transport = Transport(base_url, timeout_s)
        self.base_url = self._transport.base_url
        self._generator = Generator(self.base_url, ask=self._ask, decode=self._decode, retries=retries)
        self._spans = True
        self._whole = True
        """Log-probabilities are those before top-k and top-p."""
        self._group = ""
        self._loading = False
        self._version = 0
        self._sent: int | None = None
        """Version of the weights of the open update, once all of them have been sent."""

    # Generation.

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See `rollout.generation.Generator.generate`."""
        return await self._generator.generate(requests)

    async def _ask(self, pending: Sequence[Partial]) -> list[Segment]:
        """One HTTP request each: vLLM gives the members of a request no seeds of their own. They share the prompt in its prefix cache."""
        if not self._spans:
            await self.weight_version()  # others change the weights: the answer will not say under which ones it began
        tasks = [asyncio.create_task(self._ask_one(partial)) for partial in pending]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _ask_one(self, partial: Partial) -> Segment:
        self._check(partial.request)
        body = {"request_id": partial.next_rid(), "token_ids": partial.context, "output_mode": "text"}
        before = self._version
        answer = await self._transport.request("POST", _GENERATE, body | {"sampling_params": sampling_params(partial)})
        bound = before if self._spans else min(before, await self.weight_version())
        return checked(self.base_url, partial, answer, bound if not self._spans else None)

    def _check(self, request: GenerateRequest) -> None:
        if request.routed_experts:
            raise ServerFault(self.base_url, "routed experts were asked for, and areal-mega does not read vLLM's; use sglang", status=400)
        if not self._whole and request.temperature > 0 and (request.top_p < 1 or request.top_k > 0):
            cut = f"top_p {request.top_p:g} and top_k {request.top_k}"
            raise ServerFault(self.base_url, f"its log-probabilities are those after {cut}, which cannot be trained on", status=400)

    async def _decode(self, ids: Sequence[int]) -> str | None:
        try:
            answer = await self._transport.request("POST", "/detokenize", {"tokens": list(ids)})
        except ServerFault as fault:
            if fault.is_refusal:  # a server without a tokenizer
                return None
            raise
        with readable(self.base_url, "/detokenize", answer):
            return str(answer["prompt"])

    async def abort_all(self) -> None:
        """End every request on the server, of whatever client; those of this client come back with ``abort``."""
        self._generator.note_abort()
        await self._transport.request("POST", "/abort_requests", {})

    # State.

    async def wait_healthy(self, deadline_s: float) -> None:
        """Wait until the server answers; `DeadlineExceeded` says what it did last."""
        await self._transport.wait_healthy(deadline_s)

    async def weight_version(self) -> int:
        """Version of the weights that it generates with. Answers within moments, paused or not."""
        if self._loading:
            # The engine waits for the sender's bytes and answers nothing else meanwhile; that its process lives is all there is to learn.
            await self._transport.request("GET", "/health", plain=True)
            return self._version
        info = await self._transport.request("GET", "/weight_info")
        with readable(self.base_url, "/weight_info", info):
            self._version = parse_version(self.base_url, str(info["weight_version"]))
        return self._version

    async def probe(self) -> Capabilities:
        """Find out what the server can do; generates a few tokens, so it must not be paused.

        Raises:
            ServerFault: it lacks what cannot be done without: the routes for weights, or log-probabilities at the sampling temperature.
        """
        answer = await self._transport.request("GET", "/version")
        with readable(self.base_url, "/version", answer):
            version = str(answer["version"])
        if not await self._has_route("/start_weight_update"):
            raise ServerFault(self.base_url, f"vLLM {version} has no /start_weight_update; start it with VLLM_SERVER_DEV_MODE=1")
        models = await self._transport.request("GET", "/v1/models")
        with readable(self.base_url, "/v1/models", models):
            context = models["data"][0].get("max_model_len")
        held = await self.weight_version()
        flat, sharp, cut = [await self._first_token(t, k) for t, k in ((_FLAT, -1), (1.0, -1), (_FLAT, 1))]
        self._spans = all("weight_versions" in choice for choice in (flat, sharp, cut))
        with readable(self.base_url, _GENERATE, flat):
            most = [_likeliest(choice) for choice in (flat, sharp, cut)]
        if math.isclose(most[0], most[1], abs_tol=1e-6):
            remedy = "start vLLM with --logprobs-mode=processed_logprobs"
            raise ServerFault(self.base_url, f"its log-probabilities are not at the sampling temperature; {remedy}")
        # Of the one token that top-k 1 leaves: 0 after the cut, as likely as without it before.
        self._whole = math.isclose(most[2], most[0], abs_tol=0.1)
        return Capabilities(
            engine="vllm",
            version=version,
            weight_version=str(held),
            max_context=context,
            update_sessions=True,
            version_spans=self._spans,
            hf_digests=_DIGESTS if await self._plugged_in() else None,
            routed_experts=False,
            checksums=await self._has_route("/weight_checker"),
            seeds=True,
            several_groups=False,
        )

    async def _first_token(self, temperature: float, top_k: int) -> dict[str, Any]:
        """The choice of a one-token answer, with the likeliest tokens' log-probabilities."""
        params = {"max_tokens": 1, "temperature": temperature, "top_k": top_k, "logprobs": 2, "seed": 0}
        answer = await self._transport.request("POST", _GENERATE, {"token_ids": list(_PROBE), "sampling_params": params})
        with readable(self.base_url, _GENERATE, answer):
            return dict(answer["choices"][0])

    async def _plugged_in(self) -> bool:
        """Whether the workers run the plug-in. A method that they do not have is 500."""
        try:
            await self._call_workers("areal_mega_digests")
        except ServerFault as fault:
            if fault.status != 500:
                raise
            return False
        return True

    async def _has_route(self, path: str) -> bool:
        """A GET on a route that takes POST is 405 where it exists and 404 where not: asks without doing anything."""
        try:
            await self._transport.request("GET", path)
        except ServerFault as fault:
            if fault.status not in (404, 405):
                raise
            return fault.status == 405
        return True

    async def pause(self, mode: PauseMode) -> None:
        await self._transport.request("POST", f"/pause?{_PAUSE[mode]}", {})

    async def resume(self) -> None:
        await self._transport.request("POST", "/resume", {})

    # Weights.

    async def init_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Make the server join a weight-sync group; returns when the group is complete, so run it beside the other members' joins."""
        info = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
            "timeout_s": self._transport.timeout_s,
        }
        await self._waiting("/init_weight_transfer_engine", {"init_info": info})
        self._group = group_name

    async def destroy_group(self, group_name: str) -> None:
        self._check_group(group_name)
        await self._transport.request("POST", "/shutdown_weight_transfer_engine", {})
        self._group = ""

    async def begin_update(self) -> None:
        self._sent = None
        await self._transport.request("POST", "/start_weight_update", {})

    async def end_update(self) -> None:
        """Make the weights that were sent the ones that are computed with; their version is that of the last bucket."""
        body = {} if self._sent is None else {"weight_version": str(self._sent)}
        await self._transport.request("POST", "/finish_weight_update", body)
        self._version, self._sent = self._version if self._sent is None else self._sent, None

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
            version: becomes the server's weight version with ``end_update``; give it with the last bucket only.
            flush_cache: preempt what is running, and forget every prefix.
            flattened: the bucket comes as one uint8 buffer; else tensor by tensor.
        """
        self._check_group(group_name)
        info = {"names": list(names), "dtype_names": list(dtypes), "shapes": [list(s) for s in shapes], "flattened": flattened}
        await self._waiting("/update_weights", {"update_info": info})
        if flush_cache:
            await self._transport.request("POST", "/reset_prefix_cache?reset_running_requests=true", {})
        self._sent = version

    async def update_run(self, buckets: Run, *, version: int, flush_cache: bool) -> None:
        await one_by_one(self, buckets, version=version, flush_cache=flush_cache)

    async def update_from_disk(self, path: str, version: int) -> None:
        """Load a HuggingFace folder that the server can read."""
        await self.begin_update()
        await self._waiting("/update_weights", {"update_info": {"folder": path}})
        self._sent = version
        await self.end_update()

    async def digests(self, kind: DigestKind) -> ServerDigest:
        """Digests of the tensors that the last update brought to every worker. Their packed copies are the server's own affair.

        Args:
            kind: the plug-in's, which has one only.

        Raises:
            ServerFault: it does not run the plug-in (``Capabilities.hf_digests``), or its workers differ.
        """
        from areal_mega.sync.digest import combine

        assert kind == _DIGESTS, "the plug-in computes no other kind"
        answers = await self._call_workers("areal_mega_digests")
        with readable(self.base_url, "/collective_rpc", answers):
            tensors = {str(name): str(value) for name, value in answers[0]["digests"].items()}
            differ = any(answer["digests"] != tensors for answer in answers)
        if differ:
            raise ServerFault(self.base_url, f"its {len(answers)} workers received different weights")
        return ServerDigest(weight_version=await self.weight_version(), combined=combine(tensors), tensors=tensors)

    async def checksums(self) -> dict[str, str]:
        """Checksums of the server's own (fused) parameters: equal weights, equal checksums, on servers of one kind.

        Those that a CPU has packed away are left out: all of them have the checksum of no bytes.
        """
        answer = await self._transport.request("POST", "/weight_checker", {"action": "checksum"})
        with readable(self.base_url, "/weight_checker", answer):
            return {str(name): str(value) for name, value in answer["checksums"].items() if value != _NO_BYTES}

    async def _call_workers(self, method: str) -> list[dict[str, Any]]:
        answer = await self._transport.request("POST", "/collective_rpc", {"method": method})
        with readable(self.base_url, "/collective_rpc", answer):
            return list(answer["results"])

    async def _waiting(self, path: str, body: Mapping[str, Any]) -> None:
        """A call in which the whole engine waits for other members of the group."""
        self._loading = True
        try:
            await self._transport.request("POST", path, body)
        finally:
            self._loading = False

    def _check_group(self, name: str) -> None:
        if name != self._group:
            raise ServerFault(self.base_url, f"it is not in the weight-sync group {name!r} (it is in {self._group!r})", status=400)

    async def close(self) -> None:
        await self._transport.close()


# vLLM's form of requests and answers.


def sampling_params(partial: Partial) -> dict[str, Any]:
    r = partial.request
    params: dict[str, Any] = {"max_tokens": partial.left, "temperature": r.temperature, "top_p": r.top_p, "top_k": r.top_k, "logprobs": 0}
    if r.stop:
        params["stop"] = list(r.stop)
    if r.stop_token_ids:
        params["stop_token_ids"] = list(r.stop_token_ids)
    if r.seed is not None:
        params["seed"] = _seed(r.seed, len(partial.output_ids))
    return params


def _seed(seed: int, done: int) -> int:
    """Seed of the request that goes on after ``done`` tokens. vLLM starts its generator with each request: under the same seed the noise
    that made the first tokens would make the next ones."""
    if done == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{done}".encode(), digest_size=8).digest(), "big") & 0x7FFF_FFFF


def checked(base_url: str, partial: Partial, answer: Any, version_bound: int | None = None) -> Segment:
    """An answer of vLLM's, if it can be believed.

    Args:
        version_bound: version of all tokens, for a server that reports no spans; None: it reports them.

    Raises:
        ServerFault: a missing part or one of another kind; see also ``segment``.
    """
    with readable(base_url, _GENERATE, answer):
        with readable(base_url, _GENERATE, answer, parts=True):
            [choice] = answer["choices"]
            ids, kind, reason = list(choice["token_ids"]), choice["finish_reason"], choice["stop_reason"]
            logprobs, text = [entry["logprob"] for entry in choice["logprobs"]["content"]], str(choice["text"])
        if kind == "stop" and reason is None and ids:
            reason = ids[-1]  # the model's own end-of-sequence token is not named
        spans = choice.get("weight_versions") or []
        return segment(
            base_url,
            _GENERATE,
            partial,
            ids=ids,
            logprobs=[None if lp is None or lp <= _FLOOR else lp for lp in logprobs],
            versions=spanned(base_url, spans, len(ids)) if version_bound is None else [version_bound] * len(ids),
            kind=kind,
            matched=reason,
            text=text,
        )


def _likeliest(choice: Mapping[str, Any]) -> float:
    """Log-probability of the likeliest token of a one-token answer."""
    [position] = choice["logprobs"]["content"]
    return float(next(entry["logprob"] for entry in position["top_logprobs"] if entry["rank"] == 1))
