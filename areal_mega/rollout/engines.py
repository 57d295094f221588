"""Which client speaks with which engine's server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_mega.core.errors import UserError
from areal_mega.rollout.client import InferenceClient
from areal_mega.rollout.inference import InferenceServer
from areal_mega.rollout.vllm import VLLMClient

CLIENTS: dict[str, Callable[..., InferenceServer]] = {"embedded": InferenceClient, "sglang": InferenceClient, "vllm": VLLMClient}
"""Engine, as ``rollout.strategy`` names it -> constructor of its client: (base_url, *, timeout_s, retries)."""


def client_for(engine: str, base_url: str, **kwargs: Any) -> InferenceServer:
    """A client of a server of ``engine``; ``kwargs`` as of `InferenceClient`.

    Raises:
        UserError: no client speaks with that engine.
    """
    make = CLIENTS.get(engine)
    if make is None:
        raise UserError(f"rollout.strategy names the engine {engine}; inference servers are: {', '.join(sorted(CLIENTS))}")
    return make(base_url, **kwargs)
