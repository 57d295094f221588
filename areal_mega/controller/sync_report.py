"""What the senders of a weight sync report together, and what a server that holds something else is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_mega.core import metrics as m
from areal_mega.core.metrics import Metrics

_NAMED = 5
"""Tensors named where many differ."""


@dataclass(frozen=True)
class Sent:
    """What all senders report together. They work side by side: of each time, the longest."""

    digests: Mapping[str, str]
    totals: Mapping[str, int]
    longest: Mapping[str, float]

    def metrics(self) -> Metrics:
        return {name: m.total(value) for name, value in (*self.totals.items(), *self.longest.items())}


def sent_by(answers: Mapping[str, Any], load_s: float) -> Sent:
    """The reports of the train ranks that sent; the others have none."""
    reports = [report for report in answers.values() if report is not None]
    digests = {name: digest for report in reports for name, digest in report["digests"].items()}
    assert len(digests) == sum(len(report["digests"]) for report in reports), "two senders sent one tensor"
    totals = {"sync/bytes": sum(r["nbytes"] for r in reports), "sync/saved_bytes": sum(r["saved_bytes"] for r in reports)}
    longest = {
        "sync/gather_s": max(r["gather_s"] for r in reports),
        "sync/digest_s": max(r["digest_s"] for r in reports),
        "sync/transfer_s": max(r["transfer_s"] for r in reports),
        "sync/load_s": load_s,
    }
    return Sent(digests, totals, longest)


def mismatch(who: str, held: Mapping[str, str], sent: Mapping[str, str]) -> str:
    """Which tensors of a server are not what was sent."""
    unlike = [name for name in sent if held.get(name) != sent[name]] + [f"{name} (never sent)" for name in held if name not in sent]
    named = ", ".join(unlike[:_NAMED]) + f" and {len(unlike) - _NAMED} more" * (len(unlike) > _NAMED)
    return f"{who} holds other weights than the trainer sent: {len(unlike)} of {len(sent)} tensors differ: {named}"
