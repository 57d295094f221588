"""Writing answers: what came out of a sequence, in SGLang's form."""

from __future__ import annotations

import base64
import math
import time
from typing import Any

import numpy as np

from areal_mega.serving.sequence import Sequence
from areal_mega.serving.text import Text


def finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: null, as SGLang answers."""
    return value if value is not None and math.isfinite(value) else None


def generation(sequence: Sequence, text: Text, version: str) -> dict[str, Any]:
    """The answer of ``/generate`` for one sequence, finished or (streaming) not."""
    ids = sequence.output_ids.tolist()
    return {"text": output_text(sequence, text, ids), "output_ids": ids, "meta_info": _meta(sequence, text, ids, version)}


def output_text(sequence: Sequence, text: Text, ids: list[int]) -> str:
    """Without the stop token, and cut at the stop string (unless ``no_stop_trim``)."""
    finish, params = sequence.finish or {}, sequence.params
    matched = finish.get("matched") if finish.get("type") == "stop" else None
    if isinstance(matched, int) and not params.no_stop_trim and ids and ids[-1] == matched:
        ids = ids[:-1]
    decoded = text.decode(ids, params.skip_special_tokens)
    if sequence.trim and not params.no_stop_trim and sequence.trim in decoded:
        decoded = decoded[: decoded.rindex(sequence.trim)]
    return decoded


def _meta(sequence: Sequence, text: Text, ids: list[int], version: str) -> dict[str, Any]:
    done, wanted = sequence.finish is not None, sequence.wanted
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": sequence.spans[-1][0] if sequence.spans else version,
        "num_retractions": sequence.retractions,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": sequence.admitted,
        "prefill_finished_time": sequence.first_token,
        "queue_time": max(0.0, sequence.admitted - sequence.received),
    }
    if wanted.logprobs:
        meta |= _logprobs(sequence, text, ids)
    meta |= {"reasoning_tokens": 0, "completion_tokens": len(ids), "cached_tokens": sequence.cached_tokens}
    if done:
        meta["weight_versions"] = sequence.version_spans()
    meta["cached_tokens_details"] = {"device": sequence.cached_tokens, "host": 0} if sequence.cached_tokens else None
    if done and wanted.routed_experts:
        meta["routed_experts"] = routed_experts(sequence)
    meta["dp_rank"] = None
    if done:
        took = max(sequence.finished - sequence.received, 1e-9)
        meta |= {
            "e2e_latency": took,
            "request_received_ts": sequence.received,
            "first_token_latency": max(0.0, sequence.first_token - sequence.received),
            "api_server_dispatch_finish_ts": sequence.received,
            "request_finished_ts": sequence.finished,
            "decode_throughput": len(ids) / took,
        }
    meta["response_sent_to_client_ts"] = time.time()
    return meta


def _logprobs(sequence: Sequence, text: Text, ids: list[int]) -> dict[str, Any]:
    named = text.piece if sequence.wanted.text_in_logprobs else (lambda _: None)
    start = max(sequence.wanted.logprob_start, 0)
    out: dict[str, Any] = {
        "input_token_logprobs": [
            [finite(lp), int(token), named(int(token))]
            for lp, token in zip(sequence.prompt_logprobs, sequence.prompt[start:], strict=False)
        ],
        "output_token_logprobs": [
            [finite(lp), token, named(token)] for lp, token in zip(sequence.output_logprobs.tolist(), ids, strict=True)
        ],
        "output_token_logprobs_length": len(ids),
    }
    if sequence.wanted.top_logprobs:
        out["output_top_logprobs"] = [[[finite(lp), token, named(token)] for lp, token in top] for top in sequence.top_logprobs[: len(ids)]]
    return out


def routed_experts(sequence: Sequence) -> str:
    """base64 of little-endian int32 [prompt + output - 1 - start, layers, top_k]; the newest token has not been through the model."""
    kept = sequence.routed if sequence.routed is not None else np.zeros((0, 0, 0), np.int32)
    count = max(len(sequence.prompt) + len(sequence.output_ids) - 1, 0)
    rows = kept[sequence.wanted.routed_start : count]
    return base64.b64encode(np.ascontiguousarray(rows, dtype="<i4").tobytes()).decode()
