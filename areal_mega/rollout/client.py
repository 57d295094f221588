"""Client of an inference server: SGLang and the embedded server alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

PauseMode = Literal["in_place", "retract", "abort"]


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
    """What was generated: ``output_ids``, ``logprobs``, ``versions`` have one entry per new token."""

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
