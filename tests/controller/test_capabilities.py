"""What the servers can do, as a run sees it at its start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal_mega.config.schema import Recipe
from areal_mega.controller.capabilities import check_context, describe, warnings
from areal_mega.core.errors import UserError
from areal_mega.rollout.inference import Capabilities

EMBEDDED = Capabilities(
    engine="areal-mega-embedded",
    version="0.1",
    weight_version="0",
    max_context=64,
    update_sessions=True,
    version_spans=True,
    hf_digests="xxh3",
    routed_experts=False,
    checksums=True,
    seeds=True,
)
SGLANG = replace(EMBEDDED, engine="sglang", version="0.5.23", hf_digests=None, routed_experts=True, seeds=False)


def lengths(prompt: int, answer: int, **more: Any) -> Recipe:
    fields: dict[str, Any] = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "p"},
        "data": {"max_prompt_tokens": prompt, "valid": {"loader": "arithmetic"}},
        "rollout": {"max_new_tokens": answer},
    }
    return Recipe.model_validate(fields | more)


def test_a_sample_that_no_server_could_take_is_refused_with_the_arithmetic() -> None:
    check_context([EMBEDDED], lengths(40, 24))
    check_context([replace(EMBEDDED, max_context=None)], lengths(40, 2400))
    with pytest.raises(UserError) as caught:
        check_context([EMBEDDED, replace(SGLANG, max_context=60)], lengths(40, 24))
    assert str(caught.value) == (
        "data.max_prompt_tokens 40 + rollout.max_new_tokens 24 = 64 tokens, but server rank 1 (sglang 0.5.23) takes 60 of prompt and "
        "answer together: shorten either by 4, or give it a longer context or a larger cache (rollout.server_args)"
    )
    with pytest.raises(UserError, match=r"eval\.max_new_tokens 32 = 72"):
        check_context([EMBEDDED], lengths(40, 24, eval={"max_new_tokens": 32}))


def test_one_line_says_what_is_used() -> None:
    assert describe([EMBEDDED], lengths(40, 24)) == (
        "inference servers: 1 x areal-mega-embedded 0.1; context 64 tokens (needed: 64); weights by group, in update sessions; "
        "versions per token; verified by digest"
    )
    old = replace(SGLANG, version="0.4.9", update_sessions=False, version_spans=False, checksums=False, max_context=None)
    assert describe([SGLANG, old], lengths(40, 24, sync={"transport": "disk"})) == (
        "inference servers: 2 x sglang 0.5.23 and sglang 0.4.9; context 64 tokens (needed: 64); weights through a folder; versions per "
        "request (of a request under two, the older counts); verified by version alone; routed experts reported; seeds of samples have "
        "no effect"
    )
    assert "without update sessions" in describe([old], lengths(40, 24))
    assert "verified by version, and replicas by each other's checksums" in describe([SGLANG, SGLANG], lengths(40, 24))


def test_seeds_without_effect_are_told_with_the_remedy() -> None:
    assert warnings([EMBEDDED]) == []
    [line] = warnings([SGLANG])
    assert "--enable-deterministic-inference" in line
