"""The training side of weight sync: whole tensors of several ranks' shards, HF names, digests, and out through one transport.

Every train rank calls the same method with the same arguments. A sender alone holds full tensors, a bucket at a time (`sync.filling`), and
is rank 0 of a weight-sync group of its own. Who sends what, and from whom it gathers that, says `sync.shares`; for servers that know one
group only rank 0 sends all.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal_mega.core import points
from areal_mega.sync.clock import Clock, Digests, Span
from areal_mega.sync.filling import AHEAD, Filled, Filling
from areal_mega.sync.plan import WireSpec

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from areal_mega.models.gather import HFGatherer
    from areal_mega.sync.digest import DigestKind


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
    """Those of buckets that were filled ahead included: what digests cost, whenever."""
    transfer_s: float


class _What(NamedTuple):
    """What one sync sends."""

    version: int
    only: Container[str] | None
    digests: DigestKind | None


@dataclass
class _Ahead:
    """A sync that has begun before the servers paused: its first buckets are full, and the rest is to come."""

    what: _What
    clock: Clock
    first: list[Filled | None]
    rest: Iterator[Filled | None]


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

        self._gatherer, self._device = gatherer, device
        self._loop = self._overlapped if overlap else self._plain
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._hf_specs = gatherer.plan_as(self._dtype)
        self.specs = tuple(WireSpec(s.name, tuple(s.shape), str(s.dtype).removeprefix("torch.")) for s in self._hf_specs)
        self.sends = gatherer.rank == gatherer.root and bool(self.specs)
        self.group: dist.ProcessGroup | None = None
        self._store: dist.TCPStore | None = None
        self._parts: tuple[int, dict[int, str]] | None = None
        """Digests of this rank's own parts, and the version that they are of."""
        self._whole: tuple[int, Digests] | None = None
        """Digests of the tensors that this rank alone has whole, with their version: these need not be computed again."""
        self._digests: Digests = {}
        """Of what this sender sent last."""
        self._filling = Filling(gatherer, self.specs, self._dtype, bucket_bytes, device)
        self._ahead: _Ahead | None = None

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
        from areal_mega.sync.digest import combine, kind_for, tensor_digest, tensor_digests, with_sampled

        kind, *others = with_sampled(kind_for(self._device))
        before = self._parts[1] if self._parts is not None and self._parts[0] == base else None
        names: list[str] = []
        now: dict[int, str] = {}
        whole: Digests = {each: {} for each in (kind, *others)}
        for number, (hf, part) in enumerate(self._gatherer.own_parts(self._dtype)):
            tensors = {name: tensor for name, tensor in hf.items() if tensor is not None}
            found = tensor_digests(tensors, kind)
            whole[kind] |= found
            for other in others:
                whole[other] |= tensor_digests(tensors, other)
            now[number] = combine(found) if found else tensor_digest(part, kind)
            if before is not None and before[number] != now[number]:
                names += hf
        self._parts, self._whole = (version, now), (version, whole)
        return None if before is None else names

    # --- out

    def fill(self, version: int, only: Container[str] | None = None, *, digests: DigestKind | None = "sums") -> None:
        """Fill the first buckets, while servers still generate. ``broadcast`` with the same arguments begins with them.

        The weights must stay as they are until then. Another ``fill`` or ``broadcast`` does not use them.
        """
        self._drop()
        self._ahead = self._begun(_What(version, only, digests))

    def _begun(self, what: _What, ahead: int = AHEAD) -> _Ahead:
        known: Digests = {}
        if self.sends and self._whole is not None and self._whole[0] == what.version:
            known = {kind: dict(found) for kind, found in self._whole[1].items()}
        clock = Clock(what.digests, known)
        buckets = self._filling.filled(clock, what.only)
        return _Ahead(what, clock, list(islice(buckets, ahead)), buckets)

    def _drop(self) -> None:
        """Give up a sync that was begun. What other ranks still send for it must be taken: the next one would read it as its own."""
        if self._ahead is not None:
            for _ in self._ahead.rest:
                pass
            self._ahead = None

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

        what = _What(version, only, digests)
        if self._ahead is None or self._ahead.what != what:
            self._drop()
            self._ahead = self._begun(what, ahead=0)
        begun, self._ahead = self._ahead, None
        begun.clock.gather = Span()  # what was before is not part of the sending
        full = (item for item in chain(begun.first, begun.rest) if item is not None)
        self._loop(full, send, begun.clock)
        return self._report(version, begun.clock)

    @staticmethod
    def _plain(buckets: Iterable[Filled], send: Callable[[torch.Tensor], Callable[[], object]], clock: Clock) -> None:
        for bucket, flat in buckets:
            wait = send(flat)
            clock.nbytes += bucket.nbytes
            with clock.transfer:
                wait()

    @staticmethod
    def _overlapped(buckets: Iterable[Filled], send: Callable[[torch.Tensor], Callable[[], object]], clock: Clock) -> None:
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

        clock = Clock(digests, {})
        with ExitStack() as stack:
            writer = stack.enter_context(HFWriter(folder, self._hf_specs, source=source)) if self.sends else None
            for item in clock.gathered(self._gatherer.stream(self._dtype)):
                assert writer is not None
                name, tensor = item
                clock.digest_of({name: tensor})
                with clock.transfer:
                    writer.write(name, tensor)
                clock.nbytes += tensor.numel() * tensor.element_size()
        return self._report(version, clock)

    def _report(self, version: int, clock: Clock) -> SendReport | None:
        if not self.sends:
            return None
        known: dict[str, str] = {}
        if clock.kind is None:
            self._digests = {}
        else:
            # Of what was sent now, a digest of another kind is of what was sent before.
            new = clock.digests.get(clock.kind, {})
            self._digests = {kind: {n: d for n, d in old.items() if n not in new} for kind, old in self._digests.items()}
            for kind, found in clock.digests.items():
                self._digests.setdefault(kind, {}).update(found)
            known = dict(self._digests.get(clock.kind, {}))
            assert known.keys() == {spec.name for spec in self.specs}, "a tensor was never sent"
        return SendReport(
            version=version,
            digests=known,
            nbytes=clock.nbytes,
            saved_bytes=sum(spec.nbytes for spec in self.specs) - clock.nbytes,
            gather_s=clock.gather.seconds,
            digest_s=clock.digest.seconds,
            transfer_s=clock.transfer.seconds,
        )
