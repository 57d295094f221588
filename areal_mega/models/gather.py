"""From the shards of all train ranks back to whole HF tensors, on one rank, a bounded number of bytes at a time.

The plan is pure and equal on every rank: which rank sends which part of which parameter, in *parcels* of a bounded size. For each parcel
a rank packs its parts into one flat buffer and sends that: one message per rank and parcel, however many experts there are. The root
posts the next parcel's receives before it unpacks the present one. Two buffers per pair of ranks serve a whole stream in turn.

A gatherer may be limited to a share of the parameters and of the ranks. Nobody else takes part then, and the gatherers of shares without
a common rank work side by side.

Where the root's memory is all ranks' own, there is nothing to send: every rank ``lay``s its parts where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig
from areal_mega.models.hf_io import HFTensorSpec
from areal_mega.models.ownership import Ownership, Share
from areal_mega.models.proof import prove_model, prove_table
from areal_mega.models.table import LOCAL, HFTensor, Naming, Param, Shape, TableMismatch
from areal_mega.parallel.layout import RankLayout

PARCEL_BYTES = 64 * 1024**2
_ALIGN = 16  # bytes: every part of a buffer can then be viewed as any dtype


Place = Callable[[HFTensor], Tensor]
"""Where the root wants a tensor assembled: contiguous, of its shape and the stream's dtype."""


class Pending(Protocol):
    """A transfer under way; its buffer may be reused after ``wait``."""

    def wait(self) -> Any: ...


class Transport(Protocol):
    """Moves flat uint8 buffers between two ranks of the layout, in order."""

    def send(self, buffer: Tensor, to: int) -> Pending: ...

    def receive(self, buffer: Tensor, source: int) -> Pending: ...


class DistributedTransport:
    """Point-to-point over a torch.distributed group (gloo or NCCL) whose ranks are the layout's."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def send(self, buffer: Tensor, to: int) -> Pending:
        work = dist.isend(buffer, group=self._group, group_dst=to)
        assert work is not None
        return work

    def receive(self, buffer: Tensor, source: int) -> Pending:
        work = dist.irecv(buffer, group=self._group, group_src=source)
        assert work is not None
        return work


@dataclass(frozen=True, slots=True)
class _Part:
    """Part ``part`` of parameter ``param``, in rank ``rank``'s buffer from byte ``offset`` on."""

    param: Param
    part: int
    rank: int
    shape: Shape
    dtype: torch.dtype
    offset: int

    def view(self, buffer: Tensor) -> Tensor:
        size = prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset : self.offset + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class _Parcel:
    params: tuple[Param, ...]
    parts: tuple[_Part, ...]
    sizes: Mapping[int, int]
    """Bytes of every sending rank's buffer, the root's own included."""


class HFGatherer:
    """Gathers a sharded model as HuggingFace tensors.

    Args:
        named: this rank's live tensors by global name; looked up anew at every stream, so a re-assigned entry is seen.
        layout: how the model is split over the ranks of ``group``; ``rank`` is this one's.
        group: torch.distributed group of exactly the layout's ranks, in order; None: the default group.
        root: the rank that receives everything, from all ranks.
        share: what is gathered instead of everything, from which ranks, and to which.
        transport: replaces torch.distributed (for shards that all live in one process).

    Raises:
        TableMismatch: the model and the family's table disagree.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        family: Family,
        hf_config: HFConfig,
        layout: RankLayout,
        rank: int,
        group: dist.ProcessGroup | None = None,
        root: int = 0,
        *,
        share: Share | None = None,
        naming: Naming = LOCAL,
        transport: Transport | None = None,
        parcel_bytes: int = PARCEL_BYTES,
    ) -> None:
        self._named, self._naming, self.rank = named, naming, rank
        self.root = root if share is None else share.root
        self.ranks = tuple(range(layout.world_size)) if share is None else share.ranks
        self.transport = transport or DistributedTransport(group)
        self._parcel_bytes = parcel_bytes
        table = family.table(hf_config)
        self._ownership = Ownership(table, layout)
        prove_table(table, self._ownership)
        prove_model(((name, tuple(tensor.shape)) for name, tensor in named.items()), self._ownership, rank, naming)
        self._params = tuple(p for p in table.exported if share is None or any(hf.name in share.names for hf in p.hf))
        self._by_name = {hf.name: (number, param) for number, param in enumerate(self._params) for hf in param.hf}
        self._sources: dict[int, tuple[int, ...]] = {}
        self._dtype = self._common_dtype()
        self._kept: dict[tuple[int, int], Tensor] = {}

    def _common_dtype(self) -> torch.dtype:
        """The training dtype: that of every parameter but fp32 islands, so that ranks agree on it without talking."""
        seen: dict[torch.dtype, str] = {}
        for shard in self._ownership.shards(self.rank):
            name = self._naming.name(shard.param)
            dtype = self._named[name].dtype
            if not shard.param.fp32:
                seen.setdefault(dtype, name)
            elif dtype != torch.float32:
                raise TableMismatch(f"{name} must stay fp32 but the model has it in {dtype}")
        if len(seen) != 1:
            raise TableMismatch(f"rank {self.rank}: parameters of several dtypes: {', '.join(f'{n} {d}' for d, n in seen.items())}")
        return next(iter(seen))

    @property
    def plan(self) -> tuple[HFTensorSpec, ...]:
        """What ``stream(None)`` yields: the training dtype, fp32 islands apart. Equal on every rank."""
        return self.plan_as(None)

    def plan_as(self, dtype: torch.dtype | None) -> tuple[HFTensorSpec, ...]:
        """What ``stream(dtype)`` yields, in its order."""
        return tuple(HFTensorSpec(t.name, t.shape, self._wire(p, dtype)) for p in self._params for t in p.hf)

    def _wire(self, param: Param, dtype: torch.dtype | None) -> torch.dtype:
        return torch.float32 if param.fp32 else dtype or self._dtype

    def stream(
        self, dtype: torch.dtype | None = None, *, only: Container[str] | None = None, place: Place | None = None
    ) -> Iterator[tuple[str, Tensor] | None]:
        """Collective: every rank of the layout (of the stage) iterates it to the end, with the same ``dtype`` and ``only``. A rank that
        stops early leaves the others waiting until the group's own time-out.

        On the root each item is ``(name, tensor)``: a whole HF tensor in ``dtype`` (None: the training dtype), without vocabulary padding,
        in plan order. On other ranks the same number of items are None.

        Args:
            only: names of HF tensors: gather the parameters that have one of them, whole.
            place: called on the root for each tensor before it is assembled; None: each one is a new tensor.
        """
        parcels = self._parcels(dtype, only)
        if parcels:
            yield from self._collect(parcels, place) if self.rank == self.root else self._contribute(parcels)

    def own_parts(self, dtype: torch.dtype | None = None) -> Iterator[tuple[dict[str, Tensor | None], Tensor]]:
        """What this rank contributes to the stream: the HF tensors that a part belongs to, and the part as it would travel. Where the part
        is all there is of them, each tensor is given too."""
        for parcel in self._parcels(dtype, None):
            for part in parcel.parts:
                if part.rank == self.rank:
                    shard = self._shard(part.param).to(part.dtype)
                    alone = len(self._givers(part.param)) == 1
                    yield {hf.name: self._unfused(part.param, n, shard) if alone else None for n, hf in enumerate(part.param.hf)}, shard

    def _unfused(self, param: Param, source: int, whole: Tensor) -> Tensor:
        """HF tensor number ``source`` of a parameter."""
        dim, pieces = param.mapping.dim, param.pieces(self._ownership.parts(param), 0)
        found = [whole.narrow(dim, piece.at, piece.length) for piece in pieces if piece.source == source]
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def _parcels(self, dtype: torch.dtype | None, only: Container[str] | None) -> list[_Parcel]:
        parcels: list[_Parcel] = []
        params: list[Param] = []
        used = 0
        for param in self._params:
            if only is not None and not any(tensor.name in only for tensor in param.hf):
                continue
            size = sum(prod(shape) for shape in param.shapes) * self._wire(param, dtype).itemsize
            if params and used + size > self._parcel_bytes:
                parcels.append(self._parcel(params, dtype))
                params, used = [], 0
            params.append(param)
            used += size
        return [*parcels, self._parcel(params, dtype)] if params else parcels

    def _parcel(self, params: list[Param], dtype: torch.dtype | None) -> _Parcel:
        parts: list[_Part] = []
        sizes: dict[int, int] = {}
        for param in params:
            wire, split = self._wire(param, dtype), self._ownership.parts(param)
            for part, rank in enumerate(self._givers(param)):
                shape, offset = param.shard_shape(split, part), sizes.get(rank, 0)
                parts.append(_Part(param, part, rank, shape, wire, offset))
                sizes[rank] = offset + -(-prod(shape) * wire.itemsize // _ALIGN) * _ALIGN
        return _Parcel(tuple(params), tuple(parts), sizes)

    def _givers(self, param: Param) -> tuple[int, ...]:
        """Which rank each part comes from."""
        number, _ = self._by_name[param.hf[0].name]
        if number not in self._sources:
            found = []
            for part in range(self._ownership.sources(param)):
                holders = [rank for rank in self._ownership.holders(param, part) if rank in self.ranks]
                assert holders, f"{param.hf[0].name}: ranks {self.ranks} do not hold part {part}"
                # The root's own copy costs no message; otherwise any replica has the same bytes.
                found.append(self.root if self.root in holders else holders[0])
            self._sources[number] = tuple(found)
        return self._sources[number]

    def givers(self, names: Iterable[str]) -> frozenset[int]:
        """Ranks that parts of these HF tensors come from."""
        return frozenset(rank for _, param in self._chosen(names) for rank in self._givers(param))

    def _chosen(self, names: Iterable[str]) -> list[tuple[int, Param]]:
        return list({number: (number, param) for number, param in map(self._by_name.__getitem__, names)}.values())

    def lay(self, names: Iterable[str], places: Mapping[str, Tensor]) -> Iterator[tuple[str, ...]]:
        """Put this rank's parts of HF tensors where they belong: no message, and nobody waits. Yields, one parameter after the other, the
        names of its tensors once this rank's parts of them are there.

        Args:
            names: all tensors of every parameter that has one of them.
            places: where each whole tensor is assembled, by all ranks.
        """
        for _, param in self._chosen(names):
            whole = [places[hf.name] for hf in param.hf]
            for part, rank in enumerate(self._givers(param)):
                if rank == self.rank:
                    self._put(param, part, self._shard(param), whole)
            yield tuple(hf.name for hf in param.hf)

    def _put(self, param: Param, part: int, shard: Tensor, whole: list[Tensor]) -> None:
        dim = param.mapping.dim
        for piece in param.pieces(self._ownership.parts(param), part):
            if piece.source is not None:
                whole[piece.source].narrow(dim, piece.start, piece.length).copy_(shard.narrow(dim, piece.at, piece.length))

    def _contribute(self, parcels: list[_Parcel]) -> Iterator[None]:
        """A sender's side: a parcel is packed while the one before travels."""
        buffers = _Buffers(parcels, self._device, self._kept)
        under_way: Pending | None = None
        sent = 0
        for parcel in parcels:
            if self.rank in parcel.sizes:
                buffer = buffers.take(self.rank, sent, parcel)
                self._pack(parcel, buffer)
                if under_way is not None:
                    under_way.wait()
                under_way, sent = self.transport.send(buffer, self.root), sent + 1
            yield from (None for param in parcel.params for _ in param.hf)
        if under_way is not None:
            under_way.wait()

    def _pack(self, parcel: _Parcel, buffer: Tensor) -> None:
        for part in parcel.parts:
            if part.rank == self.rank:
                part.view(buffer).copy_(self._shard(part.param))

    def _shard(self, param: Param) -> Tensor:
        return self._named[self._naming.name(param)].detach()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._named.values())).device

    def _collect(self, parcels: list[_Parcel], place: Place | None) -> Iterator[tuple[str, Tensor]]:
        """The root's side: receive the next parcel while this one is unpacked."""
        buffers = _Buffers(parcels, self._device, self._kept)
        following = self._post(parcels, 0, buffers)
        for number, parcel in enumerate(parcels):
            received, pending = following
            if number + 1 < len(parcels):
                following = self._post(parcels, number + 1, buffers)
            for transfer in pending:
                transfer.wait()
            by_param: dict[int, list[_Part]] = {}
            for part in parcel.parts:
                by_param.setdefault(id(part.param), []).append(part)
            for param in parcel.params:
                yield from self._assemble(param, by_param[id(param)], received, place)

    def _post(self, parcels: list[_Parcel], number: int, buffers: _Buffers) -> tuple[dict[int, Tensor], list[Pending]]:
        received = {rank: buffers.take(rank, number, parcels[number]) for rank in parcels[number].sizes if rank != self.root}
        return received, [self.transport.receive(buffer, rank) for rank, buffer in received.items()]

    def _assemble(
        self, param: Param, parts: list[_Part], received: Mapping[int, Tensor], place: Place | None
    ) -> Iterator[tuple[str, Tensor]]:
        whole = [place(hf) if place else torch.empty(hf.shape, dtype=parts[0].dtype, device=self._device) for hf in param.hf]
        for part in parts:
            own = part.rank == self.root
            self._put(param, part.part, self._shard(param) if own else part.view(received[part.rank]), whole)
        yield from zip((tensor.name for tensor in param.hf), whole, strict=True)


class _Buffers:
    """Two buffers per rank, taken in turn: fresh memory for every parcel would cost as much as copying it once more.

    On a CPU they are kept for the next stream, for the same reason. On a GPU torch's allocator keeps the memory, for whoever needs it.
    """

    def __init__(self, parcels: list[_Parcel], device: torch.device, kept: dict[tuple[int, int], Tensor]) -> None:
        self._parcels, self._device = parcels, device
        self._made = kept if device.type == "cpu" else {}

    def take(self, rank: int, turn: int, parcel: _Parcel) -> Tensor:
        """A buffer for ``rank``'s part of ``parcel``; the one taken two turns ago must be done with."""
        key = rank, turn % 2
        if key not in self._made or len(self._made[key]) < parcel.sizes[rank]:
            largest = max(p.sizes.get(rank, 0) for p in self._parcels)
            self._made[key] = torch.empty(largest, dtype=torch.uint8, device=self._device)
        return self._made[key][: parcel.sizes[rank]]
