"""What the inference servers of a run can do: what is refused at the start, and the one line that says what will be used. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.rollout.inference import Capabilities


def check_context(capabilities: Sequence[Capabilities], recipe: Recipe) -> None:
    """Refuse a recipe whose longest sample no server could take: it would be found out in the middle of the run, prompt by prompt.

    Raises:
        UserError: with the arithmetic.
    """
    prompt = recipe.data.max_prompt_tokens
    answers = {"rollout.max_new_tokens": recipe.rollout.max_new_tokens}
    if recipe.data.valid is not None and recipe.eval.max_new_tokens is not None:
        answers["eval.max_new_tokens"] = recipe.eval.max_new_tokens
    for rank, able in enumerate(capabilities):
        for setting, answer in answers.items():
            if able.max_context is not None and prompt + answer > able.max_context:
                raise UserError(
                    f"data.max_prompt_tokens {prompt} + {setting} {answer} = {prompt + answer} tokens, but server rank {rank} "
                    f"({able.engine} {able.version}) takes {able.max_context} of prompt and answer together: shorten either by "
                    f"{prompt + answer - able.max_context}, or give it a longer context or a larger cache (rollout.server_args)"
                )


def describe(capabilities: Sequence[Capabilities], recipe: Recipe) -> str:
    """What the servers are, and what of it is used, in one line."""
    kinds = list(dict.fromkeys(f"{able.engine} {able.version}" for able in capabilities))
    parts = [f"inference servers: {len(capabilities)} x {' and '.join(kinds)}"]
    contexts = [able.max_context for able in capabilities if able.max_context is not None]
    if contexts:
        needed = recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens
        parts.append(f"context {min(contexts)} tokens (needed: {needed})")
    parts.append(_weights(capabilities, recipe))
    spans = all(able.version_spans for able in capabilities)
    parts.append("versions per token" if spans else "versions per request (of a request under two, the older counts)")
    parts.append(_verified(capabilities))
    if all(able.routed_experts for able in capabilities):
        parts.append("routed experts reported")
    if not all(able.seeds for able in capabilities):
        parts.append("seeds of samples have no effect")
    return "; ".join(parts)


def _weights(capabilities: Sequence[Capabilities], recipe: Recipe) -> str:
    if recipe.sync.transport == "disk":
        return "weights through a folder"
    sessions = all(able.update_sessions for able in capabilities)
    return "weights by group, in update sessions" if sessions else "weights by group, without update sessions"


def _verified(capabilities: Sequence[Capabilities]) -> str:
    if all(able.hf_digests for able in capabilities):
        return "verified by digest"
    if len(capabilities) > 1 and all(able.checksums for able in capabilities):
        return "verified by version, and replicas by each other's checksums"
    return "verified by version alone"


def warnings(capabilities: Sequence[Capabilities]) -> list[str]:
    """What a user might not expect of these servers, with the remedy."""
    lines = []
    if not all(able.seeds for able in capabilities):
        lines.append(
            "the servers do not look at a sample's seed: two runs of this recipe sample differently; SGLang does with "
            "--enable-deterministic-inference in rollout.server_args"
        )
    return lines
