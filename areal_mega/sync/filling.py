"""Buckets of whole tensors, filled from the shards of the ranks of a share.

On one machine's CPUs a bucket is memory that all ranks of the share have in common (`sync.memory`): each one copies its parts to where they
belong in it, and no shard is ever sent. Between machines, and on GPUs, shards are sent to the sender, which assembles them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from areal_mega.sync.memory import common_buffer
from areal_mega.sync.plan import Bucket, WireSpec, elements, plan_buckets

if TYPE_CHECKING:
    import torch

    from areal_mega.models.gather import HFGatherer
    from areal_mega.models.table import HFTensor
    from areal_mega.sync.clock import Clock

AHEAD = 2
"""Buckets that can be full at once."""
_ALIGNED = 64
"""Bytes: the second buffer lies behind the first one, and items of any dtype stand in it; a cache line is of so many, too."""

Filled = tuple[Bucket, "torch.Tensor"]
"""A bucket and its bytes."""


class Filling:
    """Fills the buckets of one share, in two buffers in turn.

    Args:
        gatherer: of this rank's share; its root is the sender.
        specs: everything that the share has, in its order.
        dtype: of what is gathered, fp32 islands apart.
        device: where buckets live.

    The ranks of a share make these at once: they find out whether they have memory in common.
    """

    def __init__(
        self, gatherer: HFGatherer, specs: Sequence[WireSpec], dtype: torch.dtype, bucket_bytes: int, device: torch.device
    ) -> None:
        import torch

        self._gatherer, self._specs, self._dtype, self._bucket_bytes, self._device = gatherer, specs, dtype, bucket_bytes, device
        self.is_root = gatherer.rank == gatherer.root
        self.buffers: list[torch.Tensor] = []
        """Kept from sync to sync on a CPU, where fresh memory costs as much as a copy; a GPU's is kept by torch's allocator."""
        self._tick, self._tock = (torch.zeros(1, dtype=torch.uint8) for _ in range(2))
        self.in_common = device.type == "cpu" and self._have_common_buffers()
        """All ranks of the share write into the buffers."""

    def _have_common_buffers(self) -> bool:
        whole = sum(spec.nbytes for spec in self._specs)
        if not whole:
            return False
        # Of any choice of tensors, the largest bucket is no larger.
        largest = max(min(self._bucket_bytes, whole), *(bucket.nbytes for bucket in plan_buckets(self._specs, self._bucket_bytes)))
        largest = -(-largest // _ALIGNED) * _ALIGNED
        gatherer = self._gatherer
        both = common_buffer(gatherer.transport, gatherer.rank, gatherer.root, gatherer.ranks, AHEAD * largest)
        if both is not None:
            self.buffers = list(both.split(largest))
        return both is not None

    def filled(self, clock: Clock, only: Container[str] | None) -> Iterator[Filled | None]:
        """Collective over the share: one item for each bucket, on the sender the bucket, on the other ranks None.

        Who asks for the next bucket is done with the last but one.

        Args:
            only: names of the tensors wanted; None: all.
        """
        plan = plan_buckets((spec for spec in self._specs if only is None or spec.name in only), self._bucket_bytes)
        if plan:
            yield from self._laid(clock, plan) if self.in_common else self._streamed(clock, plan, only)

    def _laid(self, clock: Clock, plan: Sequence[Bucket]) -> Iterator[Filled | None]:
        """Every rank copies its parts into the bucket."""
        gatherer, tick, move = self._gatherer, self._tick, self._gatherer.transport
        for number, bucket in enumerate(plan):
            flat = self.buffers[number % AHEAD][: bucket.nbytes]
            places, others = _views(bucket, flat), gatherer.givers(bucket.names) - {gatherer.root}
            if self.is_root:
                # Its own parts come last: a digest then reads what is still in the cache.
                with clock.gather:
                    begun = [move.send(tick, other) for other in others]
                    for pending in (*begun, *[move.receive(self._tock, other) for other in others]):
                        pending.wait()
                for names in clock.gathered(gatherer.lay(bucket.names, places)):
                    clock.digest_of({name: places[name] for name in names})
            elif gatherer.rank in others:
                move.receive(self._tock, gatherer.root).wait()
                for _ in gatherer.lay(bucket.names, places):
                    pass
                move.send(tick, gatherer.root).wait()
            yield (bucket, flat) if self.is_root else None

    def _streamed(self, clock: Clock, plan: Sequence[Bucket], only: Container[str] | None) -> Iterator[Filled | None]:
        """Drive the collective stream of shards, in step: every rank has come to the same tensor when a bucket is yielded."""
        buffers, places = self._room(plan), dict[str, "torch.Tensor"]()
        home = {name: number for number, bucket in enumerate(plan) for name in bucket.names}

        def place(tensor: HFTensor) -> torch.Tensor:
            nonlocal places
            number = home[tensor.name]
            if tensor.name == plan[number].names[0]:
                places = _views(plan[number], buffers[number % AHEAD][: plan[number].nbytes])
            return places[tensor.name]

        stream = self._gatherer.stream(self._dtype, only=only, place=place)
        for number, bucket in enumerate(plan):
            for expected in bucket.names:
                with clock.gather:
                    item = next(stream)
                assert item is None or item[0] == expected, f"gathered {item and item[0]} where the plan has {expected}"
            if number + 1 == len(plan):
                with clock.gather:  # what is under way from a rank that sends must arrive
                    assert next(stream, None) is None, "more was gathered than the plan has"
            flat = buffers[number % AHEAD][: bucket.nbytes]
            if self.is_root:
                clock.digest_of(_views(bucket, flat))
            yield (bucket, flat) if self.is_root else None

    def _room(self, plan: Sequence[Bucket]) -> list[torch.Tensor]:
        """A buffer for each bucket that can be full at once."""
        import torch

        largest = max(bucket.nbytes for bucket in plan)
        buffers = self.buffers if self._device.type == "cpu" else []
        if len(buffers) < len(plan[:AHEAD]) or len(buffers[0]) < largest:
            buffers[:] = [torch.empty(largest if self.is_root else 0, dtype=torch.uint8, device=self._device) for _ in plan[:AHEAD]]
        return buffers


def _views(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, in its bytes."""
    import torch

    dtype: torch.dtype = getattr(torch, bucket.dtype)
    parts = flat.view(dtype).split([elements(shape) for shape in bucket.shapes])
    return {name: part.view(shape) for name, part, shape in zip(bucket.names, parts, bucket.shapes, strict=True)}
