"""A sample that may take several requests: what has come so far, what is still to ask, and whether an answer can be believed. Pure."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from areal_mega.rollout.client import GenerateRequest

_MAX_EMPTY = 20
"""Aborts in a row that brought no token, after which the server is taken for broken."""


class ServerFault(RuntimeError):
    """An inference server failed or answered nonsense. ``status`` is the HTTP status, 0 where there was no answer or a bad one."""

    def __init__(self, base_url: str, what: str, *, status: int = 0) -> None:
        self.base_url, self.status = base_url, status
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
        self.finish_reason: Literal["stop", "length", "abort"] = "abort"
        self.done = False
        self.segments = 0
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

    def next_rid(self) -> str:
        """The request's own id at first; then ids of one length, for servers match ids by prefix."""
        rid = self.request.rid if self.request.rid and not self._sent else uuid.uuid4().hex
        self._sent = True
        return rid

    def sampling_params(self) -> dict[str, Any]:
        r = self.request
        params: dict[str, Any] = {
            "max_new_tokens": r.max_new_tokens - len(self.output_ids),
            "temperature": r.temperature,
            "top_p": r.top_p,
            "top_k": r.top_k,
        }
        if r.stop:
            params["stop"] = list(r.stop)
        if r.stop_token_ids:
            params["stop_token_ids"] = list(r.stop_token_ids)
        if r.seed is not None:
            params["sampling_seed"] = r.seed
        return params

    def checked(self, answer: Any, version_when_sent: int) -> dict[str, Any]:
        """The parts of an answer that count, as ``absorb`` takes them.

        Raises:
            ServerFault: a missing part, arrays of unequal lengths, a log-probability that is no number, spans that do not cover.
        """
        try:
            meta, ids = answer["meta_info"], list(answer["output_ids"])
            entries, finish = meta["output_token_logprobs"], meta["finish_reason"]
            kind = finish["type"]
        except (KeyError, TypeError) as error:
            raise ServerFault(self._base_url, f"/generate answered without {error}") from None
        if kind not in ("stop", "length", "abort"):
            raise ServerFault(self._base_url, f"/generate ended with {kind!r}, which is unknown")
        if kind == "abort" and finish.get("status_code"):
            raise ServerFault(self._base_url, f"/generate was aborted: {finish.get('message')}", status=int(finish["status_code"]))
        if len(entries) != len(ids) or any(entry[1] != token for entry, token in zip(entries, ids, strict=True)):
            raise ServerFault(self._base_url, f"/generate answered {len(ids)} tokens but log-probabilities of {len(entries)} others")
        logprobs = [entry[0] for entry in entries]
        if any(lp is None or not math.isfinite(lp) for lp in logprobs):
            raise ServerFault(self._base_url, "/generate answered a log-probability that is not a finite number (NaN in the model?)")
        if len(ids) > self.request.max_new_tokens - len(self.output_ids):
            raise ServerFault(self._base_url, f"/generate answered {len(ids)} tokens, more than asked for")
        versions = _versions(self._base_url, meta, len(ids), version_when_sent)
        return {"ids": ids, "logprobs": logprobs, "versions": versions, "finish": finish, "text": str(answer.get("text", ""))}

    def absorb(self, answer: Mapping[str, Any], *, stopped_by_us: bool) -> None:
        """Take a checked answer in. An abort not of our making means: go on."""
        ids, finish = answer["ids"], answer["finish"]
        self.segments += bool(ids) or not self.segments
        self.output_ids += ids
        self.logprobs += answer["logprobs"]
        self.versions += answer["versions"]
        self.text += answer["text"]
        kind = finish["type"]
        if kind == "abort" and not stopped_by_us:
            self._empty = 0 if ids else self._empty + 1
            if self._empty >= _MAX_EMPTY:
                raise ServerFault(self._base_url, f"a request was aborted {self._empty} times in a row without a token")
            self.finish_reason = "length"
            self.done = len(self.output_ids) >= self.request.max_new_tokens
            return
        self.finish_reason, self.done = kind, True
        matched = finish.get("matched")
        self._stop_token = kind == "stop" and isinstance(matched, int) and bool(ids) and ids[-1] == matched
        self.matched = matched if isinstance(matched, str) else ""


def _versions(base_url: str, meta: Mapping[str, Any], count: int, version_when_sent: int) -> list[int]:
    """Weight version of each token. Servers without spans say only which version ended the request: the older bound is taken."""
    spans = meta.get("weight_versions")
    if spans is None:
        return [min(version_when_sent, parse_version(base_url, meta["weight_version"]))] * count
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ServerFault(base_url, f"weight_versions {spans} leave a gap at token {len(versions)}")
        versions += [parse_version(base_url, span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ServerFault(base_url, f"weight_versions {spans} cover {len(versions)} of {count} tokens")
    return versions
