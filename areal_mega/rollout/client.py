"""Client of SGLang's protocol: of SGLang and the embedded server alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_mega.rollout.continuation import Partial, checked, readable, sampling_params
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

__all__ = ["InferenceClient"]

_PROBE_S = 60.0


class InferenceClient:
    """One inference server that speaks SGLang's protocol; see `rollout.inference.InferenceServer`.

    Args:
        base_url: ``http://host:port``.
        timeout_s: deadline of one HTTP request, generation included (and of every admin call).
        retries: times that a failed generation request is sent again; admin calls are never repeated.
    """

    def __init__(self, base_url: str, *, timeout_s: float, retries: int) -> None:
        self._transport = Transport(base_url, timeout_s)
        self.base_url = self._transport.base_url
        self._generator = Generator(self.base_url, ask=self._ask, decode=self._decode, retries=retries)
        self._sessions_known: bool | None = None
        self._spans = True
        self._runs = False
        """Takes all buckets of an update by one request."""
        self._paused: PauseMode | None = None
        self._version = 0

    # Generation.

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See `rollout.generation.Generator.generate`."""
        return await self._generator.generate(requests)

    async def _ask(self, pending: Sequence[Partial]) -> list[Segment]:
        body: dict[str, Any] = {
            "input_ids": [p.context for p in pending],
            "sampling_params": [sampling_params(p) for p in pending],
            "rid": [p.next_rid() for p in pending],
            "return_logprob": True,
        }
        if any(p.request.routed_experts for p in pending):
            body["return_routed_experts"] = True
            # One number per request of the batch would be refused: the rows that some know already come again, and are cut off.
            body["routed_experts_start_len"] = start = min(p.expert_rows for p in pending)
        else:
            start = 0
        if not self._spans:
            await self.weight_version()  # others change the weights: the answer will not say under which ones it began
        version = self._version
        answer = await self._transport.request("POST", "/generate", body)
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != len(pending):
            raise ServerFault(self.base_url, f"/generate answered {len(answers)} samples where {len(pending)} were asked for")
        return [checked(self.base_url, p, a, version, experts_from=start) for p, a in zip(pending, answers, strict=True)]

    async def _decode(self, ids: Sequence[int]) -> str | None:
        try:
            answer = await self._transport.request("POST", "/detokenize", {"model": "", "tokens": list(ids)})
        except ServerFault as fault:
            if fault.is_refusal:  # a server without a tokenizer
                return None
            raise
        with readable(self.base_url, "/detokenize", answer):
            return str(answer["text"])

    async def abort_all(self) -> None:
        """End every request on the server, of whatever client; those of this client come back with ``abort``."""
        self._generator.note_abort()
        await self._transport.request("POST", "/abort_request", {"abort_all": True})

    # State.

    async def wait_healthy(self, deadline_s: float) -> None:
        """Wait until the server answers; `DeadlineExceeded` says what it did last."""
        await self._transport.wait_healthy(deadline_s)

    async def weight_version(self) -> int:
        """Version of the weights that it generates with. Answers within moments, paused or not."""
        return parse_version(self.base_url, str((await self._model_info())["weight_version"]))

    async def _model_info(self) -> dict[str, Any]:
        info = await self._transport.request("GET", "/model_info", fallback="/get_model_info")
        if not isinstance(info, dict) or "weight_version" not in info:
            raise ServerFault(self.base_url, f"/model_info answered without weight_version: {str(info)[:100]}")
        self._version = parse_version(self.base_url, str(info["weight_version"]))
        return info

    async def probe(self) -> Capabilities:
        """Find out what the server can do; generates one token, so it must not be paused."""
        info = await self._model_info()
        server = await self._transport.request("GET", "/server_info", fallback="/get_server_info")
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True}
        sample = await self._transport.request("POST", "/generate", body, timeout_s=_PROBE_S)
        with readable(self.base_url, "/generate", sample):
            self._spans = "weight_versions" in sample["meta_info"]
        with readable(self.base_url, "/server_info", server):
            engine = str(server.get("engine", "sglang"))
            self._runs = bool(server.get("bucket_runs", False))
        return Capabilities(
            engine=engine,
            version=str(server.get("version", "unknown")),
            weight_version=str(info["weight_version"]),
            max_context=await self._max_context(server),
            update_sessions=await self._has_sessions(),
            version_spans=self._spans,
            hf_digests=server.get("hf_digests"),
            partial_updates=server.get("hf_digests") is not None,
            routed_experts=bool(server.get("enable_return_routed_experts", False)),
            checksums=await self._has_route("/weights_checker"),
            # SGLang draws from one generator for the whole batch unless it is told to be deterministic; a seed is then not looked at.
            seeds=engine != "sglang" or bool(server.get("enable_deterministic_inference", False)),
        )

    async def _max_context(self, server: Mapping[str, Any]) -> int | None:
        """A server that was given no context length takes the model's, and says so elsewhere; a small cache may hold less.

        SGLang ends an answer two tokens before its context is full, whatever was asked for, and refuses an input beyond
        ``max_req_input_len``: the input of an interrupted sample is all it has so far, so that is the bound.
        """
        length = server.get("context_length")
        if length is None:
            try:
                models = await self._transport.request("GET", "/v1/models")
                with readable(self.base_url, "/v1/models", models):
                    length = models["data"][0].get("max_model_len")
            except ServerFault as fault:
                if fault.status != 404:
                    raise
        with readable(self.base_url, "/server_info", server):
            known = [int(n) for n in (length, server.get("max_total_num_tokens"), server.get("max_req_input_len")) if n is not None]
        return min(known, default=None)

    async def _has_sessions(self) -> bool:
        if self._sessions_known is None:
            self._sessions_known = await self._has_route("/begin_weight_update")
        return self._sessions_known

    async def _has_route(self, path: str) -> bool:
        """OPTIONS is 405 where a route exists and 404 where not: asks without doing anything."""
        try:
            await self._transport.request("OPTIONS", path, plain=True)
        except ServerFault as fault:
            if fault.status not in (404, 405):
                raise
            return fault.status == 405
        return True

    async def pause(self, mode: PauseMode) -> None:
        await self._transport.request("POST", "/pause_generation", {"mode": mode})
        self._paused = mode

    async def resume(self) -> None:
        await self._transport.request("POST", "/continue_generation", {})
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

    async def update_run(self, buckets: Run, *, version: int, flush_cache: bool) -> None:
        """Make the server receive the buckets of a whole update in order; the last one carries the version.

        By one request where the server takes that, so that no bucket waits for a request of its own.
        """
        if not self._runs:
            await one_by_one(self, buckets, version=version, flush_cache=flush_cache)
            return
        body = {
            "buckets": [
                {"names": bucket.names, "dtypes": [bucket.dtype] * len(bucket.names), "shapes": bucket.shapes, "group_name": group}
                for group, bucket in buckets
            ],
            "load_format": "flattened_bucket",
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        await self._success("/update_weights_from_distributed", body)
        self._version = version

    async def update_from_disk(self, path: str, version: int) -> None:
        """Load a HuggingFace folder that the server can read."""
        # Requests frozen in place keep their cache; a flush would be refused although the weights had changed.
        body = {"model_path": path, "weight_version": str(version), "flush_cache": self._paused != "in_place", "abort_all_requests": False}
        await self._success("/update_weights_from_disk", body)
        self._version = version

    async def digests(self, kind: DigestKind) -> ServerDigest:
        """Digests of the weights that the server computes with.

        Raises:
            ServerFault: it reports none by HuggingFace name (``Capabilities.hf_digests``), or none of that kind.
        """
        answer = await self._transport.request("POST", "/weights_checker", {"action": "checksum", "digests": kind})
        with readable(self.base_url, "/weights_checker", answer):
            if "hf_digest" not in answer:
                raise ServerFault(self.base_url, "/weights_checker reports no digests by HuggingFace name")
            version = parse_version(self.base_url, answer["weight_version"])
            return ServerDigest(weight_version=version, combined=answer["hf_digest"], tensors=answer["hf_digests"])

    async def checksums(self) -> dict[str, str]:
        """Checksums of the server's own (fused) parameters, as ``rank/name``: equal weights, equal checksums, on servers of one kind."""
        answer = await self._transport.request("POST", "/weights_checker", {"action": "checksum"})
        with readable(self.base_url, "/weights_checker", answer):
            ranks = answer.get("ranks")
            if not ranks:
                raise ServerFault(self.base_url, f"/weights_checker reports no checksums: {answer.get('message')}")
            return {f"{rank}/{name}": str(value) for rank, part in enumerate(ranks) for name, value in part["checksums"].items()}

    async def _success(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._transport.request("POST", path, body)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise ServerFault(self.base_url, f"{path} failed: {answer.get('message') if isinstance(answer, dict) else str(answer)[:100]}")

    async def close(self) -> None:
        await self._transport.close()
