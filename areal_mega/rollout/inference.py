"""The small interface of an inference server, whatever engine it runs: what is asked, what comes back, what it can do.

One client per engine satisfies `InferenceServer`: `rollout/client.py` speaks the protocol of SGLang and of the embedded server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from areal_mega.sync.digest import DigestKind
from areal_mega.sync.plan import Bucket

if TYPE_CHECKING:
    import numpy as np

Run = Sequence[tuple[str, Bucket]]
"""Buckets of an update in their order, each with the name of the group that it travels over."""

__all__ = [
    "Capabilities",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "InferenceServer",
    "PauseMode",
    "Segment",
    "ServerDigest",
    "ServerFault",
    "parse_version",
]

PauseMode = Literal["in_place", "retract", "abort"]
FinishReason = Literal["stop", "length", "abort"]


class ServerFault(RuntimeError):
    """An inference server failed or answered nonsense. ``status`` is the HTTP status, 0 where there was no answer or a bad one.

    ``is_unreachable``: there was no connection, or it broke.
    """

    def __init__(self, base_url: str, what: str, *, status: int = 0, is_unreachable: bool = False) -> None:
        self.base_url, self.status, self.is_unreachable = base_url, status, is_unreachable
        super().__init__(f"inference server {base_url}: {what}")

    @property
    def is_refusal(self) -> bool:
        """The request itself was wrong; sending it again would change nothing."""
        return 400 <= self.status < 500


def parse_version(base_url: str, text: str) -> int:
    """A server's weight version as a number. ``default``, its value before anybody set one, is 0.

    Raises:
        ServerFault: another name.
    """
    if text == "default":
        return 0
    try:
        return int(text)
    except ValueError:
        raise ServerFault(base_url, f"weight version {text!r} is not a number; start the server with --weight-version 0") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sample to generate. ``temperature`` 0 is greedy; ``top_k`` -1 is off; ``rid`` empty: the client makes one.

    ``routed_experts`` asks for the experts that each position was routed to, of a server that reports them.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    rid: str = ""
    routed_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was generated: ``output_ids``, ``logprobs``, ``versions`` have one entry per new token.

    ``logprobs`` are of log_softmax(logits / temperature), before top-k and top-p. The stop token, if any, is the last of ``output_ids``
    and not in ``text``. ``abort`` means that ``abort_all`` of this client ended it. ``routed_experts``, where asked for, is int32
    [prompt + output - 1, layers * top_k]: the last token was never an input.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    text: str
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one request brought of a sample, checked and in one form for every engine. See `Generation` for the arrays.

    ``matched`` is the stop token or stop string that ended it. ``routed_experts`` are the rows that earlier segments did not bring.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    kind: FinishReason
    matched: int | str | None
    text: str
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do, as probed."""

    engine: str
    version: str
    weight_version: str
    max_context: int | None
    """Tokens of prompt and answer together; None where the server does not say."""
    update_sessions: bool
    """Has begin_weight_update / end_weight_update (mandatory where present)."""
    version_spans: bool
    """Reports which weight version made which tokens of a request."""
    hf_digests: DigestKind | None
    """The kind of digests that it reports per HuggingFace tensor, and its sampled one, where there is such; None: it reports none."""
    routed_experts: bool
    """Reports the experts of each position."""
    checksums: bool = False
    """Reports checksums of its own parameters: replicas can be compared with each other."""
    seeds: bool = True
    """A request's seed decides what is sampled."""
    several_groups: bool = True
    """Can be in several weight-sync groups at once, by name."""
    partial_updates: bool = False
    """Keeps tensors that an update does not bring, and its digests cover them: those that it has need not be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDigest:
    """Digests of the weights that a server holds: ``combined`` over ``tensors`` by HF name."""

    weight_version: int
    combined: str
    tensors: Mapping[str, str] = field(default_factory=dict)


class InferenceServer(Protocol):
    """A client of one inference server. Every call has a deadline (`DeadlineExceeded`); a failed one is a `ServerFault`."""

    base_url: str

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate all, through pauses and weight updates; answers stand in the order of the requests."""
        ...

    async def abort_all(self) -> None:
        """End every request on the server, of whatever client; those of this client come back with ``abort``."""
        ...

    async def wait_healthy(self, deadline_s: float) -> None:
        """Wait until the server answers; `DeadlineExceeded` says what it did last."""
        ...

    async def probe(self) -> Capabilities:
        """Find out what the server can do."""
        ...

    async def weight_version(self) -> int:
        """Version of the weights that it generates with. Answers within moments, paused or not: a health check too."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def init_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Make the server join a weight-sync group; returns when the group is complete, so run it beside the other members' joins."""
        ...

    async def destroy_group(self, group_name: str) -> None: ...

    async def begin_update(self) -> None:
        """Open an update session; nothing on a server that has none."""
        ...

    async def end_update(self) -> None: ...

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
        """Make the server receive one bucket; returns when it is loaded, so run it beside the sender's broadcast."""
        ...

    async def update_run(self, buckets: Run, *, version: int, flush_cache: bool) -> None:
        """Make the server receive the buckets of a whole update in order; the last one carries the version."""
        ...

    async def update_from_disk(self, path: str, version: int) -> None:
        """Load a HuggingFace folder that the server can read."""
        ...

    async def digests(self, kind: DigestKind) -> ServerDigest:
        """Digests of the weights by HuggingFace name, of a kind that the server has (``Capabilities.hf_digests``)."""
        ...

    async def checksums(self) -> Mapping[str, str]:
        """Checksums of the server's own parameters (``Capabilities.checksums``)."""
        ...

    async def close(self) -> None: ...


async def one_by_one(server: InferenceServer, buckets: Run, *, version: int, flush_cache: bool) -> None:
    """``update_run`` for a server that is asked for every bucket by itself."""
    for number, (group, bucket) in enumerate(buckets, 1):
        last = number == len(buckets)
        await server.update_bucket(
            names=list(bucket.names),
            dtypes=[bucket.dtype] * len(bucket.names),
            shapes=[list(shape) for shape in bucket.shapes],
            group_name=group,
            version=version if last else None,
            flush_cache=last and flush_cache,
        )
