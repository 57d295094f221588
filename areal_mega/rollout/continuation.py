"""A sample that may take several requests: what has come so far, what is still to ask, and whether an answer can be believed. Pure."""

from __future__ import annotations

import base64
import binascii
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from areal_mega.rollout.inference import FinishReason, GenerateRequest, Generation, Segment, ServerFault, parse_version

_GENERATE = "/generate"
_MAX_EMPTY = 20
"""Aborts in a row that brought no token, after which the server is taken for broken."""


class Partial:
    """A request with the tokens it has so far."""

    def __init__(self, request: GenerateRequest, base_url: str) -> None:
        self.request, self._base_url = request, base_url
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.text = ""
        self.matched = ""
        """The stop string that ended it."""
        self.finish_reason: FinishReason = "abort"
        self.done = False
        self.segments = 0
        self._experts: list[np.ndarray] = []
        self._stop_token = False
        self._empty = 0
        self._sent = False

    @property
    def context(self) -> list[int]:
        return [*self.request.input_ids, *self.output_ids]

    @property
    def text_ids(self) -> list[int]:
        """Output ids without the stop token."""
        return self.output_ids[:-1] if self._stop_token else self.output_ids

    @property
    def left(self) -> int:
        """Tokens of the budget that are still to come."""
        return self.request.max_new_tokens - len(self.output_ids)

    @property
    def expert_rows(self) -> int:
        """Positions whose routed experts are known already."""
        return sum(len(rows) for rows in self._experts)

    def next_rid(self) -> str:
        """The request's own id at first; then ids of one length, for servers match ids by prefix."""
        rid = self.request.rid if self.request.rid and not self._sent else uuid.uuid4().hex
        self._sent = True
        return rid

    def absorb(self, segment: Segment, *, stopped_by_us: bool) -> None:
        """Take a checked answer in. An abort not of our making means: go on."""
        self.segments += bool(segment.ids) or not self.segments
        self.output_ids += segment.ids
        self.logprobs += segment.logprobs
        self.versions += segment.versions
        self.text += segment.text
        if segment.routed_experts is not None:
            self._experts.append(segment.routed_experts)
        if segment.kind == "abort" and not stopped_by_us:
            self._empty = 0 if segment.ids else self._empty + 1
            if self._empty >= _MAX_EMPTY:
                raise ServerFault(self._base_url, f"a request was aborted {self._empty} times in a row without a token")
            self.finish_reason = "length"
            self.done = not self.left
            return
        self.finish_reason, self.done = segment.kind, True
        matched = segment.matched
        self._stop_token = segment.kind == "stop" and isinstance(matched, int) and bool(segment.ids) and segment.ids[-1] == matched
        self.matched = matched if isinstance(matched, str) else ""

    def generation(self) -> Generation:
        return Generation(
            output_ids=tuple(self.output_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.input_ids),
            text=self.text,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )


# What can be believed, of any engine.


@contextmanager
def readable(base_url: str, path: str, answer: Any, *, parts: bool = False) -> Iterator[None]:
    """Reading ``answer`` of ``path`` within: what is missing or of another kind becomes a ``ServerFault``.

    Args:
        parts: parts are taken out of it: what fails is one that is not there.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = (
            f"answered without {error}" if parts else f"answered what cannot be read ({type(error).__name__}: {error}): {str(answer)[:200]}"
        )
        raise ServerFault(base_url, f"{path} {what}") from error


def segment(
    base_url: str,
    path: str,
    partial: Partial,
    *,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    versions: Sequence[int],
    kind: Any,
    matched: int | str | None,
    text: str,
    routed_experts: np.ndarray | None = None,
) -> Segment:
    """What ``path`` answered for ``partial``; read it within ``readable``.

    Raises:
        ServerFault: arrays of unequal lengths, a log-probability that is no number, more tokens than asked for, an end that is unknown,
            a version older than that of the tokens before.
    """
    if kind not in ("stop", "length", "abort"):
        raise ServerFault(base_url, f"{path} ended with {kind!r}, which is unknown")
    if len(logprobs) != len(ids):
        raise ServerFault(base_url, f"{path} answered {len(ids)} tokens but {len(logprobs)} log-probabilities")
    numbers = [lp for lp in logprobs if lp is not None and math.isfinite(lp)]
    if len(numbers) != len(ids):
        raise ServerFault(base_url, f"{path} answered a log-probability that is not a finite number (NaN in the model?)")
    if len(ids) > partial.left:
        raise ServerFault(base_url, f"{path} answered {len(ids)} tokens, more than asked for")
    for before, after in pairwise([*partial.versions[-1:], *versions]):
        if after < before:
            raise ServerFault(base_url, f"{path} answered tokens of weight version {after} after tokens of version {before}")
    return Segment(
        ids=ids, logprobs=numbers, versions=versions, kind=kind, matched=matched, text=text, routed_experts=routed_experts
    )  # fmt: skip


def spanned(base_url: str, spans: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Weight version of each of ``count`` tokens, from spans that must cover all of them."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ServerFault(base_url, f"weight_versions {spans} leave a gap at token {len(versions)}")
        versions += [parse_version(base_url, span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ServerFault(base_url, f"weight_versions {spans} cover {len(versions)} of {count} tokens")
    return versions


# SGLang's form of requests and answers.


def sampling_params(partial: Partial) -> dict[str, Any]:
    r = partial.request
    params: dict[str, Any] = {"max_new_tokens": partial.left, "temperature": r.temperature, "top_p": r.top_p, "top_k": r.top_k}
    if r.stop:
        params["stop"] = list(r.stop)
    if r.stop_token_ids:
        params["stop_token_ids"] = list(r.stop_token_ids)
    if r.seed is not None:
        params["sampling_seed"] = r.seed
    return params


def checked(base_url: str, partial: Partial, answer: Any, version_when_sent: int, experts_from: int = 0) -> Segment:
    """An answer of SGLang's protocol, if it can be believed.

    Args:
        version_when_sent: of the server, for one that reports no spans.
        experts_from: position of the first row of ``routed_experts``.

    Raises:
        ServerFault: a missing part or one of another kind; see also ``segment``.
    """
    with readable(base_url, _GENERATE, answer):
        with readable(base_url, _GENERATE, answer, parts=True):
            meta, ids = answer["meta_info"], list(answer["output_ids"])
            entries, finish = meta["output_token_logprobs"], meta["finish_reason"]
            kind = finish["type"]
        if kind == "abort" and finish.get("status_code"):
            raise ServerFault(base_url, f"{_GENERATE} was aborted: {finish.get('message')}", status=int(finish["status_code"]))
        if len(entries) != len(ids) or any(entry[1] != token for entry, token in zip(entries, ids, strict=True)):
            raise ServerFault(base_url, f"{_GENERATE} answered {len(ids)} tokens but log-probabilities of {len(entries)} others")
        spans = meta.get("weight_versions")
        # Servers without spans say only which version ended the request: the older bound is taken.
        bound = min(version_when_sent, parse_version(base_url, meta["weight_version"])) if spans is None else 0
        return segment(
            base_url,
            _GENERATE,
            partial,
            ids=ids,
            logprobs=[entry[0] for entry in entries],
            versions=[bound] * len(ids) if spans is None else spanned(base_url, spans, len(ids)),
            kind=kind,
            matched=finish.get("matched"),
            text=str(answer.get("text", "")),
            routed_experts=_experts(base_url, partial, meta, len(ids), experts_from) if partial.request.routed_experts else None,
        )


def _experts(base_url: str, partial: Partial, meta: Mapping[str, Any], count: int, start: int) -> np.ndarray | None:
    """New rows of base64 little-endian int32 [positions, layers * top_k], whose first position is ``start``."""
    encoded = meta.get("routed_experts")
    if not encoded and count == 0:
        return None  # interrupted before its first token: the next answer brings these rows too
    if encoded is None:
        raise ServerFault(base_url, "/generate answered without routed_experts; start the server with --enable-return-routed-experts")
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ServerFault(base_url, f"/generate answered routed_experts that cannot be decoded: {error}") from None
    positions = len(partial.context) + count - 1 - start
    if positions <= 0 or flat.size == 0 or flat.size % positions:
        raise ServerFault(base_url, f"/generate answered {flat.size} routed experts for {positions} positions")
    return flat.reshape(positions, -1)[partial.expert_rows - start :]
