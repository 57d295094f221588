"""The training side of weight sync: whole tensors of several ranks' shards, HF names, digests, and out through one transport.

Every train rank calls the same method with the same arguments. A sender alone holds full tensors, a bucket at a time, and is rank 0 of a
weight-sync group of its own. Who sends what, and from whom it gathers that, says `sync.shares`; for servers that know one group only
rank 0 sends all.

On one machine's CPUs the bucket is memory that all ranks of a share have in common (`sync.memory`): each one copies its parts to where they
belong in it, and no shard is ever sent. Between machines, and on GPUs, shards are sent to the sender, which assembles them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from areal_mega.core import points
from areal_mega.sync.memory import common_buffer
from areal_mega.sync.plan import Bucket, WireSpec, elements, plan_buckets

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from areal_mega.models.gather import HFGatherer
    from areal_mega.models.table import HFTensor
    from areal_mega.sync.digest import DigestKind

Filled = tuple[Bucket, "torch.Tensor"]
"""A bucket and its bytes."""

_ALIGNED = 64
"""Bytes: the second buffer lies behind the first one, and items of any dtype stand in it; a cache line is of so many, too."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """One sync as a sender saw it. The seconds are those of its thread: they do not overlap, and what another one hides is not in them."""

    version: int
    digests: dict[str, str]
    """By HF name, of all that this sender is responsible for, sent this time or not; none where they were not wanted."""
    nbytes: int
    saved_bytes: int
    """Of tensors that were not sent because every server has them."""
    gather_s: float
    digest_s: float
    transfer_s: float


class WeightSender:
    """Sends the engine's live weights.

    Args:
        gatherer: of this rank's share; its root is the sender.
        dtype: torch dtype name that the servers hold, e.g. ``bfloat16``; fp32 islands stay fp32.
        bucket_bytes: bytes broadcast at once.
        device: where buckets live, the device of the collective's backend.
        overlap: gather a bucket while the one before travels.

    The ranks of a share make their senders at once: they find out whether they have memory in common.
    """

    def __init__(self, gatherer: HFGatherer, *, dtype: str, bucket_bytes: int, device: torch.device, overlap: bool = True) -> None:
        import torch

        self._gatherer, self._device, self._bucket_bytes = gatherer, device, bucket_bytes
        self._loop = self._overlapped if overlap else self._plain
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._hf_specs = gatherer.plan_as(self._dtype)
        self.specs = tuple(WireSpec(s.name, tuple(s.shape), str(s.dtype).removeprefix("torch.")) for s in self._hf_specs)
        self.sends = gatherer.rank == gatherer.root and bool(self.specs)
        self.group: dist.ProcessGroup | None = None
        self._store: dist.TCPStore | None = None
        self._parts: tuple[int, dict[int, str]] | None = None
        """Digests of this rank's own parts, and the version that they are of."""
        self._whole: tuple[int, DigestKind, dict[str, str]] | None = None
        """Digests of the tensors that this rank alone has whole, with their version and kind: these need not be computed again."""
        self._digests: dict[str, str] = {}
        self._buffers: list[torch.Tensor] = []
        """Kept from sync to sync on a CPU, where fresh memory costs as much as a copy; a GPU's is kept by torch's allocator."""
        self._tick, self._tock = (torch.zeros(1, dtype=torch.uint8) for _ in range(2))
        self._common = device.type == "cpu" and self._have_common_buffers()
        """All ranks of the share write into the buffers."""

    def _have_common_buffers(self) -> bool:
        whole = sum(spec.nbytes for spec in self.specs)
        if not whole:
            return False
        # Of any choice of tensors, the largest bucket is no larger.
        largest = max(min(self._bucket_bytes, whole), *(bucket.nbytes for bucket in plan_buckets(self.specs, self._bucket_bytes)))
        largest = -(-largest // _ALIGNED) * _ALIGNED
        gatherer = self._gatherer
        both = common_buffer(gatherer.transport, gatherer.rank, gatherer.root, gatherer.ranks, 2 * largest)
        if both is not None:
            self._buffers = list(both.split(largest))
        return both is not None

    def host(self, address: str, timeout_s: float) -> int:
        """Listen for the members of this sender's weight-sync group; on which port."""
        assert self.sends, "only senders have a group"
        from areal_mega.sync.group import host_store

        self._store = host_store(address, timeout_s)
        return int(self._store.port)

    def join(self, *, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Create this sender's weight-sync group, whose rank 0 it is and whose store it hosts."""
        from areal_mega.sync.group import create_group

        assert self.sends and self._store is not None, "a sender hosts its group's store first"
        self.group = create_group(
            address=address, port=port, rank=0, world_size=world_size, name=name, backend=backend, timeout_s=timeout_s, store=self._store
        )

    def leave(self) -> None:
        if self.group is not None:
            from areal_mega.sync.group import destroy_group

            destroy_group(self.group)
            self.group = None

    # --- what has changed

    def changed(self, version: int, base: int | None) -> list[str] | None:
        """HF tensors of which this rank's part is not, bit for bit, what it was in version ``base``; None: that is not known.

        Looks at this rank's own shards, so it costs no message. All ranks' answers together cover every tensor. The parts are
        remembered as those of ``version``.
        """
        from areal_mega.sync.digest import combine, kind_for, tensor_digest, tensor_digests

        kind = kind_for(self._device)
        before = self._parts[1] if self._parts is not None and self._parts[0] == base else None
        names: list[str] = []
        now: dict[int, str] = {}
        whole: dict[str, str] = {}
        for number, (hf, part) in enumerate(self._gatherer.own_parts(self._dtype)):
            tensors = {name: tensor for name, tensor in hf.items() if tensor is not None}
            found = tensor_digests(tensors, kind)
            whole |= found
            now[number] = combine(found) if found else tensor_digest(part, kind)
            if before is not None and before[number] != now[number]:
                names += hf
        self._parts, self._whole = (version, now), (version, kind, whole)
        return None if before is None else names

    # --- out

    def broadcast(
        self, version: int, timeout_s: float, only: Container[str] | None = None, *, digests: DigestKind | None = "sums"
    ) -> SendReport | None:
        """Send every bucket over the group, in plan order. Returns the report on senders, None elsewhere.

        Args:
            only: names of the tensors to send; None: all. The other ones must be as they were when this sender sent them last.
            digests: compute them, of this kind; None where no server has any to compare them with.
        """
        import torch.distributed as dist

        def send(flat: torch.Tensor) -> Callable[[], object]:
            points.reach("sync.bucket")
            # NCCL works on a stream of its own that waits for the present one, gloo on a thread of its own: both return at once. The
            # wait has a time-out, which makes it one of this thread, not of a stream: the buffer may then be written again.
            work = dist.broadcast(flat, src=0, group=self.group, async_op=True)
            assert work is not None
            return lambda: work.wait(timedelta(seconds=timeout_s))

        clock = _Clock(digests)
        if self._whole is not None and self._whole[:2] == (version, digests):
            clock.digests = {name: digest for name, digest in self._whole[2].items() if self.sends}
        self._loop(self._filled(clock, only), send, clock)
        return self._report(version, clock)

    @staticmethod
    def _plain(buckets: Iterator[Filled], send: Callable[[torch.Tensor], Callable[[], object]], clock: _Clock) -> None:
        for bucket, flat in buckets:
            wait = send(flat)
            clock.nbytes += bucket.nbytes
            with clock.transfer:
                wait()

    @staticmethod
    def _overlapped(buckets: Iterator[Filled], send: Callable[[torch.Tensor], Callable[[], object]], clock: _Clock) -> None:
        """While a bucket travels the next one is filled. Two buckets exist at a time."""
        wait: Callable[[], object] | None = None
        for bucket, flat in buckets:
            if wait is not None:
                with clock.transfer:
                    wait()
            wait = send(flat)
            clock.nbytes += bucket.nbytes
        if wait is not None:
            with clock.transfer:
                wait()

    def write(self, version: int, folder: Path, source: str, *, digests: DigestKind | None = "sums") -> SendReport | None:
        """Disk transport: a whole HuggingFace folder in the servers' dtype, renamed into place when complete.

        Args:
            source: model folder whose config and tokenizer are copied.
            digests: as in ``broadcast``.
        """
        from areal_mega.models.hf_io import HFWriter
        from areal_mega.sync.digest import tensor_digest

        clock = _Clock(digests)
        with ExitStack() as stack:
            writer = stack.enter_context(HFWriter(folder, self._hf_specs, source=source)) if self.sends else None
            for item in clock.gathered(self._gatherer.stream(self._dtype)):
                assert writer is not None
                name, tensor = item
                if digests is not None:
                    with clock.digest:
                        clock.digests[name] = tensor_digest(tensor, digests)
                with clock.transfer:
                    writer.write(name, tensor)
                clock.nbytes += tensor.numel() * tensor.element_size()
        return self._report(version, clock)

    def _filled(self, clock: _Clock, only: Container[str] | None) -> Iterator[Filled]:
        """On a sender every bucket, assembled in one of two buffers in turn; nothing on the ranks that have a part in it."""
        plan = plan_buckets((spec for spec in self.specs if only is None or spec.name in only), self._bucket_bytes)
        if plan:
            yield from self._laid(clock, plan) if self._common else self._streamed(clock, plan, only)

    def _laid(self, clock: _Clock, plan: Sequence[Bucket]) -> Iterator[Filled]:
        """Every rank copies its parts into the bucket. Who asks for the next bucket is done with the last but one."""
        gatherer, tick, move = self._gatherer, self._tick, self._gatherer.transport
        for number, bucket in enumerate(plan):
            flat = self._buffers[number % 2][: bucket.nbytes]
            places, others = _views(bucket, flat), gatherer.givers(bucket.names) - {gatherer.root}
            if self.sends:
                # Its own parts come last: a digest then reads what is still in the cache.
                with clock.gather:
                    begun = [move.send(tick, other) for other in others]
                    for pending in (*begun, *[move.receive(self._tock, other) for other in others]):
                        pending.wait()
                for names in clock.gathered(gatherer.lay(bucket.names, places)):
                    clock.digest_of({name: places[name] for name in names})
                yield bucket, flat
            elif gatherer.rank in others:
                move.receive(self._tock, gatherer.root).wait()
                for _ in gatherer.lay(bucket.names, places):
                    pass
                move.send(tick, gatherer.root).wait()

    def _streamed(self, clock: _Clock, plan: Sequence[Bucket], only: Container[str] | None) -> Iterator[Filled]:
        """Drive the collective stream of shards."""
        import torch

        home = {name: number for number, bucket in enumerate(plan) for name in bucket.names}
        largest = max(bucket.nbytes for bucket in plan)
        buffers = self._buffers if self._device.type == "cpu" else []
        if len(buffers) < len(plan[:2]) or len(buffers[0]) < largest:
            buffers[:] = [torch.empty(largest if self.sends else 0, dtype=torch.uint8, device=self._device) for _ in plan[:2]]
        places: dict[str, torch.Tensor] = {}

        def place(tensor: HFTensor) -> torch.Tensor:
            nonlocal places
            bucket, buffer = plan[home[tensor.name]], buffers[home[tensor.name] % 2]
            places = _views(bucket, buffer[: bucket.nbytes]) if tensor.name == bucket.names[0] else places
            return places[tensor.name]

        at, filled = 0, 0
        for name, _ in clock.gathered(self._gatherer.stream(self._dtype, only=only, place=place)):
            bucket = plan[at]
            assert bucket.names[filled] == name, f"gathered {name} where the plan has {bucket.names[filled]}"
            filled += 1
            if filled == len(bucket.names):
                clock.digest_of(_views(bucket, buffers[at % 2][: bucket.nbytes]))
                yield bucket, buffers[at % 2][: bucket.nbytes]
                at, filled = at + 1, 0
        assert not self.sends or at == len(plan), "a bucket was not filled"

    def _report(self, version: int, clock: _Clock) -> SendReport | None:
        if not self.sends:
            return None
        self._digests |= clock.digests
        known = dict(self._digests) if clock.kind else {}
        assert not clock.kind or known.keys() == {spec.name for spec in self.specs}, "a tensor was never sent"
        return SendReport(
            version=version,
            digests=known,
            nbytes=clock.nbytes,
            saved_bytes=sum(spec.nbytes for spec in self.specs) - clock.nbytes,
            gather_s=clock.gather.seconds,
            digest_s=clock.digest.seconds,
            transfer_s=clock.transfer.seconds,
        )


class _Span:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds += time.perf_counter() - self._start


@dataclass
class _Clock:
    kind: DigestKind | None
    gather: _Span = field(default_factory=_Span)
    digest: _Span = field(default_factory=_Span)
    transfer: _Span = field(default_factory=_Span)
    digests: dict[str, str] = field(default_factory=dict)
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
        from areal_mega.sync.digest import tensor_digests

        if self.kind is not None:
            with self.digest:
                self.digests |= tensor_digests({name: t for name, t in tensors.items() if name not in self.digests}, self.kind)


def _views(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, in its bytes."""
    import torch

    dtype: torch.dtype = getattr(torch, bucket.dtype)
    parts = flat.view(dtype).split([elements(shape) for shape in bucket.shapes])
    return {name: part.view(shape) for name, part, shape in zip(bucket.names, parts, bucket.shapes, strict=True)}


class _End:
    pass


_END = _End()
