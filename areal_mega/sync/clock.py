"""What one sync costs a sender, and the digests that it makes on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_mega.sync.digest import tensor_digests, with_sampled

if TYPE_CHECKING:
    import torch

    from areal_mega.sync.digest import DigestKind

Digests = dict["DigestKind", dict[str, str]]
"""By kind and HF name."""


class Span:
    """Adds up the seconds within."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds += time.perf_counter() - self._start


@dataclass
class Clock:
    """
    Args:
        kind: of the digests that are wanted; None: none.
        digests: those that are known already.
    """

    kind: DigestKind | None
    digests: Digests
    gather: Span = field(default_factory=Span)
    digest: Span = field(default_factory=Span)
    transfer: Span = field(default_factory=Span)
    nbytes: int = 0

    def gathered[T](self, stream: Iterator[T | None]) -> Iterator[T]:
        """Drive a stream to its end, on the gather's time; its items, where there are any."""
        while True:
            with self.gather:
                item = next(stream, _END)
            if isinstance(item, _End):
                return
            if item is not None:
                yield item

    def digest_of(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Digests of tensors in a bucket: of the very bytes that travel, except those that are known of the shards themselves."""
        if self.kind is None:
            return
        with self.digest:
            for kind in with_sampled(self.kind):
                known = self.digests.setdefault(kind, {})
                known |= tensor_digests({name: tensor for name, tensor in tensors.items() if name not in known}, kind)


class _End:
    pass


_END = _End()
