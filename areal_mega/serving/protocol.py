"""Reading requests: SGLang's fields and defaults, checked. Pure; every refusal is a ``BadRequest`` with the answer to give."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_mega.serving.sequence import SamplingParams, Sequence, Wanted

SAMPLING_FIELDS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed"),
    *("custom_params", "beam_width", "watermark", "choice"),
)
"""What SGLang knows. Those that are not served are accepted at the values below, where they change nothing, and refused otherwise."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop_regex": (None, [], ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None, False),
    "choice": (None, []),
}
_REFUSED = ("lora_path", "session_params", "custom_logit_processor", "image_data", "audio_data", "input_embeds", "return_hidden_states")
"""Top-level fields whose effect would be missing from the answer."""


class BadRequest(Exception):
    """A request that cannot be served. ``body`` is the JSON answer."""

    def __init__(self, body: Mapping[str, Any], status: int = 400) -> None:
        self.status, self.body = status, dict(body)
        super().__init__(str(body))


def refused(message: str) -> BadRequest:
    """In the form that SGLang gives to a request it understood but cannot serve."""
    return BadRequest({"error": {"message": message}})


def unavailable(message: str) -> BadRequest:
    """A right request at a time when it cannot be served: 503."""
    return BadRequest({"error": {"message": message}}, 503)


def malformed(message: str) -> BadRequest:
    """In the form of SGLang's validation of a body."""
    return BadRequest({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """What checking needs to know of the server. ``encode`` is None without a tokenizer."""

    vocab: int
    context_length: int
    routed_experts: bool
    encode: Callable[[str], list[int]] | None
    decode_known: bool


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked request. ``single``: the answer is one object, not a list."""

    sequences: list[Sequence]
    single: bool
    stream: bool


def parse_generate(body: Any, facts: ServingFacts) -> GenerateCall:
    """Make the sequences of a ``/generate`` body: one per prompt and per ``n``.

    Raises:
        BadRequest: for anything that SGLang refuses, and for what is not served here.
    """
    if not isinstance(body, dict):
        raise malformed("the body must be a JSON object")
    for name in _REFUSED:
        if body.get(name):
            raise refused(f"`{name}` is not served by the embedded server")
    prompts, batched = _prompts(body, facts)
    count = len(prompts)
    raw = body.get("sampling_params") or {}
    params = [parse_sampling(p) for p in _spread(raw, count, "sampling_params", isinstance(raw, list))]
    wanted = _wanted(body, count, facts)
    rids = _rids(body.get("rid"), count)
    if len({p.n for p in params}) > 1:
        raise refused("all prompts of one request must have the same n")
    sequences = []
    for prompt, p, w, rid in zip(prompts, params, wanted, rids, strict=True):
        check_length(len(prompt), p.max_new_tokens, facts.context_length)
        if p.stop and not facts.decode_known:
            raise refused("stop strings need a tokenizer, and the server runs without one; use stop_token_ids")
        sequences += [Sequence(rid if p.n == 1 else f"{rid}_{i}", prompt, p, w, member_seed(p.sampling_seed, i, p.n)) for i in range(p.n)]
    stream = bool(body.get("stream"))
    return GenerateCall(sequences, single=not batched and len(sequences) == 1, stream=stream)


def member_seed(seed: int | None, member: int, count: int) -> int:
    """Seed of one of ``count`` samples: the given one, made different per member; random where none is given."""
    if seed is None:
        return int.from_bytes(os.urandom(7), "little")
    return seed if count == 1 else (seed * 1_000_003 + member) & (2**63 - 1)


def check_length(prompt: int, new: int, limit: int) -> None:
    if prompt + new > limit:
        raise refused(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of "
            f"{prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the completion. Please reduce the "
            "number of tokens in the input messages or the completion to fit within the limit."
        )


def _prompts(body: Mapping[str, Any], facts: ServingFacts) -> tuple[list[np.ndarray], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise malformed("give exactly one of input_ids and text")
    if text is not None:
        if facts.encode is None:
            raise refused("the server runs without a tokenizer; send input_ids")
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(t, str) for t in texts):
            raise malformed("text must be a string or a list of strings")
        lists, batched = [facts.encode(t) for t in texts], isinstance(text, list)
    elif isinstance(ids, list):
        batched = bool(ids) and isinstance(ids[0], list)
        lists = ids if batched else [ids]
    else:
        raise malformed("input_ids must be a list of integers or a list of such lists")
    if not lists:
        raise malformed("no prompt was given")
    return [_token_array(tokens, facts.vocab) for tokens in lists], batched


def _token_array(tokens: Any, vocab: int) -> np.ndarray:
    if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
        raise malformed("input_ids must be a list of integers or a list of such lists")
    if not tokens:
        raise refused("a prompt has no tokens; give one at least")
    array = np.array(tokens, dtype=np.int64)
    if array.min() < 0 or array.max() >= vocab:
        raise refused(f"token id {int(array.max() if array.max() >= vocab else array.min())} is not in the vocabulary of {vocab}")
    return array


def _spread(value: Any, count: int, name: str, is_list: bool) -> list[Any]:
    if not is_list:
        return [value] * count
    if len(value) != count:
        raise refused(f"`{name}` has {len(value)} entries for {count} prompts")
    return list(value)


def _rids(rid: Any, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    rids = _spread(rid, count, "rid", isinstance(rid, list))
    if not all(isinstance(r, str) for r in rids):
        raise malformed("rid must be a string or a list of strings")
    return rids


def _wanted(body: Mapping[str, Any], count: int, facts: ServingFacts) -> list[Wanted]:
    def column(name: str, default: Any, kind: type) -> list[Any]:
        value = body.get(name)
        values = _spread(default if value is None else value, count, name, isinstance(value, list))
        if not all(type(v) is kind for v in values):
            raise malformed(f"`{name}` must be a {kind.__name__}")
        return values

    routed = column("return_routed_experts", False, bool)
    if any(routed) and not facts.routed_experts:
        raise refused("routed experts are not recorded; start the server with --enable-return-routed-experts")
    if body.get("token_ids_logprob"):
        raise refused("`token_ids_logprob` is not served by the embedded server")
    columns = (
        column("return_logprob", False, bool),
        column("logprob_start_len", -1, int),
        column("top_logprobs_num", 0, int),
        routed,
        column("routed_experts_start_len", 0, int),
    )
    text_too, stream = bool(body.get("return_text_in_logprobs")), bool(body.get("stream"))
    return [
        Wanted(
            logprobs=logprobs,
            logprob_start=start if logprobs else -1,
            top_logprobs=min(top, facts.vocab) if logprobs else 0,
            text_in_logprobs=text_too,
            routed_experts=experts,
            routed_start=routed_start,
            stream=stream,
        )
        for logprobs, start, top, experts, routed_start in zip(*columns, strict=True)
    ]


def parse_sampling(raw: Any) -> SamplingParams:
    """Check one ``sampling_params`` object.

    Raises:
        BadRequest: unknown field, wrong type, value out of range, or a feature that is not served.
    """
    if not isinstance(raw, dict):
        raise malformed("sampling_params must be an object")
    for name, value in raw.items():
        if name not in SAMPLING_FIELDS:
            known = ", ".join(f"`{f}`" for f in SAMPLING_FIELDS)
            raise BadRequest({"error": f"unknown field `{name}`, expected one of {known}"})
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise refused(f"`{name}` is not served by the embedded server")
    given = {k: v for k, v in raw.items() if v is not None and k not in _NEUTRAL}
    temperature = _number(given, "temperature", 1.0, low=0.0)
    top_k = _integer(given, "top_k", -1)
    if top_k == 0 or top_k < -1:
        raise refused(f"top_k must be -1 (off) or at least 1, got {top_k}")
    top_p, min_p = _number(given, "top_p", 1.0, low=0.0, high=1.0), _number(given, "min_p", 0.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise refused("top_p must be in (0, 1], got 0")
    n = _integer(given, "n", 1)
    if n < 1:
        raise refused(f"n must be at least 1, got {n}")
    most, least = _integer(given, "max_new_tokens", 128), _integer(given, "min_new_tokens", 0)
    if most < 0 or not 0 <= least <= most:
        raise refused(f"min_new_tokens must be in [0, max_new_tokens], got {least} and {most}")
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=least,
        # SGLang's threshold: below it the division overflows and the sample is the likeliest token anyway.
        temperature=0.0 if temperature < 1e-6 else temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=_stop(given.get("stop", ())),
        stop_token_ids=tuple(_stop_ids(given.get("stop_token_ids", ()))),
        ignore_eos=_flag(given, "ignore_eos", False),
        skip_special_tokens=_flag(given, "skip_special_tokens", True),
        no_stop_trim=_flag(given, "no_stop_trim", False),
        n=n,
        sampling_seed=_integer(given, "sampling_seed", 0) if "sampling_seed" in given else None,
    )


def _number(given: Mapping[str, Any], name: str, default: float, *, low: float, high: float = math.inf) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed(f"`{name}` must be a number")
    if not low <= value <= high:
        raise refused(f"{name} must be in [{low:g}, {high:g}], got {value}")
    return float(value)


def _integer(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if type(value) is not int:
        raise malformed(f"`{name}` must be an integer")
    return value


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if type(value) is not bool:
        raise malformed(f"`{name}` must be a boolean")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(s, str) for s in values):
        raise malformed("`stop` must be a string or a list of strings")
    return tuple(s for s in values if s)


def _stop_ids(value: Any) -> list[int]:
    if not all(type(v) is int for v in value):
        raise malformed("`stop_token_ids` must be a list of integers")
    return list(value)
