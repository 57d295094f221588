"""Which tensors travel together, and in which order. Pure: the same plan on senders, the controller and (as request bodies) the servers.

Invariants, each with a test: every tensor stands in exactly one bucket and in the plan's order; a bucket holds one dtype (so that
every tensor's offset in the flat buffer is aligned); no bucket is empty; a bucket exceeds the limit only if it is one fused group, which
is sent alone and never split.

Several senders' buckets stand in one total order, in which the controller asks every server for them, each over its sender's own group.
No member can wait for ever. Take the first bucket in that order that some server has not received. Every server has received all before
it, so no server waits for another one, and each comes to ask for it. Its sender has sent all of its own before it, so it waits for no
server, and what it gathers comes from ranks that take part in no other sender's gathers (`sync.shares`) and so wait for this sender alone,
whether they send it messages or write into its buffers. So this bucket is sent, and the same holds for the next.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4}

# Servers fuse these on load, so they must arrive in one update: projections of one attention, and of one MLP or expert.
_FUSED = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|q_a_proj|kv_a_proj_with_mqa|w1|w3)\.(weight|bias)$")


class Named(Protocol):
    @property
    def name(self) -> str: ...


class TensorSpec(Named, Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class WireSpec:
    """A tensor as it travels: the HuggingFace name and shape, in the server's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return elements(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors broadcast as one flat buffer. ``dtype`` is torch's name without the module, e.g. ``bfloat16``."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return sum(elements(shape) for shape in self.shapes) * ITEM_BYTES[self.dtype]


def elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def bucket_bytes(bucket_mb: float) -> int:
    """The limit of a bucket, from ``sync.bucket_mb``: senders and controller must agree on it."""
    return int(bucket_mb * 1024**2)


def fused_groups[T: Named](specs: Iterable[T]) -> list[list[T]]:
    """Neighbours that a server fuses: same parent module, both named in ``_FUSED``."""
    groups: list[list[T]] = []
    key: str | None = None
    for spec in specs:
        match = _FUSED.search(spec.name)
        parent = spec.name[: match.start()] if match else None
        if parent is not None and parent == key:
            groups[-1].append(spec)
        else:
            groups.append([spec])
        key = parent
    return groups


def plan_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> tuple[Bucket, ...]:
    """Cut ``specs`` into buckets of at most ``max_bytes``, never inside a fused group, a new one wherever the dtype changes."""
    buckets: list[list[TensorSpec]] = []
    size, dtype = 0, ""
    for group in fused_groups(specs):
        for run in _by_dtype(group):
            nbytes = sum(elements(s.shape) * ITEM_BYTES[s.dtype] for s in run)
            if not buckets or run[0].dtype != dtype or size + nbytes > max_bytes:
                buckets.append([])
                size, dtype = 0, run[0].dtype
            buckets[-1].extend(run)
            size += nbytes
    return tuple(Bucket(names=tuple(s.name for s in b), shapes=tuple(tuple(s.shape) for s in b), dtype=b[0].dtype) for b in buckets)


def _by_dtype(group: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    runs: list[list[TensorSpec]] = []
    for spec in group:
        if runs and runs[-1][0].dtype == spec.dtype:
            runs[-1].append(spec)
        else:
            runs.append([spec])
    return runs


def with_fused(names: Container[str], specs: Iterable[TensorSpec]) -> frozenset[str]:
    """Names of ``specs`` that are in ``names``, and of those that a server fuses with one of them: they travel together or not at all."""
    groups = fused_groups(specs)
    return frozenset(spec.name for group in groups if any(spec.name in names for spec in group) for spec in group)


def total_order(plans: Sequence[Sequence[Bucket]]) -> list[tuple[int, Bucket]]:
    """Every sender's buckets, each with its sender's number: in turn, so that one sender gathers while the others send."""
    longest = max(map(len, plans), default=0)
    return [(sender, plan[turn]) for turn in range(longest) for sender, plan in enumerate(plans) if turn < len(plan)]
