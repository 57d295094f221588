"""The training side of weight sync: gather over TP/PP/EP, HF names, digest, and out through one transport.

Every train rank calls the same method with the same arguments; rank 0 alone holds full tensors, one fused group at a time, and is
the member of the weight-sync group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from areal_mega.sync.plan import Bucket, plan_buckets

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from areal_mega.models.gather import HFGatherer


@dataclass(frozen=True, slots=True)
class WireSpec:
    """A tensor as it travels: the HuggingFace name and shape, in the server's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SendReport:
    """One sync as the sender saw it. ``gather_s`` and ``transfer_s`` are seconds on rank 0; they do not overlap."""

    version: int
    digest: str
    nbytes: int
    gather_s: float
    digest_s: float
    transfer_s: float


class WeightSender:
    """Sends the engine's live weights.

    Args:
        gatherer: collective stream of HF tensors from all train ranks.
        rank: this rank among the train ranks; 0 sends.
        dtype: torch dtype name that the servers hold, e.g. ``bfloat16``; fp32 islands stay fp32.
        bucket_bytes: bytes broadcast at once.
        device: where buckets live, the device of the collective's backend.
    """

    def __init__(self, gatherer: HFGatherer, *, rank: int, dtype: str, bucket_bytes: int, device: torch.device) -> None:
        import torch

        self._gatherer, self._rank, self._device = gatherer, rank, device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._specs = gatherer.plan_as(self._dtype)
        wire = [WireSpec(spec.name, tuple(spec.shape), str(spec.dtype).removeprefix("torch.")) for spec in self._specs]
        self.buckets: tuple[Bucket, ...] = plan_buckets(wire, bucket_bytes)
        self._group: dist.ProcessGroup | None = None
        self._store: dist.TCPStore | None = None

    def host(self, address: str, timeout_s: float) -> int:
        """Rank 0 listens for the weight-sync group's members, and says on which port; 0 elsewhere."""
        if self._rank != 0:
            return 0
        from areal_mega.sync.group import host_store

        self._store = host_store(address, timeout_s)
        return int(self._store.port)

    def join(self, *, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> None:
        """Create the weight-sync group; rank 0 of the train ranks is its rank 0 and hosts the store."""
        if self._rank != 0:
            return
        from areal_mega.sync.group import create_group

        self._group = create_group(
            address=address, port=port, rank=0, world_size=world_size, name=name, backend=backend, timeout_s=timeout_s, store=self._store
        )

    def leave(self) -> None:
        if self._group is not None:
            from areal_mega.sync.group import destroy_group

            destroy_group(self._group)
            self._group = None

    def broadcast(self, version: int, timeout_s: float) -> SendReport | None:
        """Send every bucket over the group, in plan order. Returns the report on rank 0, None elsewhere."""
        import torch.distributed as dist

        clock = _Clock()
        for bucket, flat in self._flat_buckets(clock):
            with clock.transfer:
                work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
                assert work is not None
                # The buffer is reused by nobody before the send has ended.
                work.wait(timedelta(seconds=timeout_s))
            clock.nbytes += bucket.nbytes
        return self._report(version, clock)

    def write(self, version: int, folder: Path, source: str) -> SendReport | None:
        """Disk transport: a whole HuggingFace folder in the servers' dtype, renamed into place when complete.

        Args:
            source: model folder whose config and tokenizer are copied.
        """
        from areal_mega.models.hf_io import HFWriter

        clock = _Clock()
        with ExitStack() as stack:
            writer = stack.enter_context(HFWriter(folder, self._specs, source=source)) if self._rank == 0 else None
            for name, tensor in self._tensors(clock):
                assert writer is not None
                with clock.transfer:
                    writer.write(name, tensor)
                clock.nbytes += tensor.numel() * tensor.element_size()
        return self._report(version, clock)

    def _tensors(self, clock: _Clock) -> Iterator[tuple[str, torch.Tensor]]:
        """Drive the collective stream; yields on rank 0 only, and only after the tensor's digest is taken."""
        from areal_mega.sync.digest import tensor_digest

        stream = self._gatherer.stream(self._dtype)
        while True:
            with clock.gather:
                item = next(stream, _END)
            if item is _END:
                return
            if item is None:
                continue
            assert isinstance(item, tuple)
            name, tensor = item
            tensor = tensor.to(self._device)
            with clock.digest:
                clock.digests[name] = tensor_digest(tensor)
            yield name, tensor

    def _flat_buckets(self, clock: _Clock) -> Iterator[tuple[Bucket, torch.Tensor]]:
        import torch

        pending = iter(self.buckets)
        bucket: Bucket | None = None
        flat, offset, filled = torch.empty(0, dtype=torch.uint8), 0, 0
        for name, tensor in self._tensors(clock):
            if bucket is None:
                bucket = next(pending)
                flat, offset, filled = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device), 0, 0
            assert bucket.names[filled] == name, f"gathered {name} where the plan has {bucket.names[filled]}"
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            flat[offset : offset + raw.numel()].copy_(raw)
            offset, filled = offset + raw.numel(), filled + 1
            if filled == len(bucket.names):
                yield bucket, flat
                bucket = None
        assert bucket is None, "the last bucket was not filled"
        assert self._rank != 0 or next(pending, None) is None, "buckets were left over"

    def _report(self, version: int, clock: _Clock) -> SendReport | None:
        if self._rank != 0:
            return None
        from areal_mega.sync.digest import combine

        return SendReport(
            version=version,
            digest=combine(clock.digests),
            nbytes=clock.nbytes,
            gather_s=clock.gather.seconds,
            digest_s=clock.digest.seconds,
            transfer_s=clock.transfer.seconds,
        )


_END = object()


class _Span:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds += time.perf_counter() - self._start


class _Clock:
    def __init__(self) -> None:
        self.gather, self.digest, self.transfer = _Span(), _Span(), _Span()
        self.digests: dict[str, str] = {}
        self.nbytes = 0
