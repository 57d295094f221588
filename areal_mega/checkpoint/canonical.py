"""The arrays of a model: what they are called, what they hold, and which part of them is one rank's shard. Pure, from the table alone.

An array holds a parameter as one unsharded Megatron process would have it, without padding: gate rows, then up rows; query, key and value
rows interleaved per group; the vocabulary's real rows. That is the same under every strategy, whereas the concatenation of shards is not.

A layer's experts are one array with the expert as its first index. A layer of 384 experts would else be 768 arrays, each with metadata of
its own to create, list and open, for the same chunks: a chunk holds one expert's shard either way, so that expert-parallel ranks write and
read nothing but their own, and grouped and single experts (Megatron's two namings) read the same array.
"""

from __future__ import annotations

from collections.abc import Mapping as Dict
from dataclasses import dataclass
from functools import lru_cache

import torch

from areal_mega.checkpoint.arrays import ArraySpec, common_cut, fit_chunks
from areal_mega.models.ownership import Ownership
from areal_mega.models.table import Mapping, Param, Shape, Table, TableMismatch


@dataclass(frozen=True, slots=True)
class Span:
    """``[start, start + length)`` of the array is ``[at, at + length)`` of the shard, along the mapping's dimension.

    ``start`` is None for padding, which the array does not hold.
    """

    start: int | None
    at: int
    length: int


@dataclass(frozen=True, slots=True)
class Place:
    """HF tensor number ``source``: its rows (or columns) ``[start, start + length)`` are ``[at, at + length)`` of the array."""

    source: int
    start: int
    at: int
    length: int


@lru_cache(maxsize=4096)
def _places(mapping: Mapping, shapes: tuple[Shape, ...]) -> tuple[Place, ...]:
    out, end = [], 0
    for piece in mapping.pieces(shapes, 1, 0):
        if piece.source is not None:
            out.append(Place(piece.source, piece.start, end, piece.length))
            end += piece.length
    return tuple(out)


@lru_cache(maxsize=65536)
def _spans(mapping: Mapping, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Span, ...]:
    places = _places(mapping, shapes)
    out: list[Span] = []
    for piece in mapping.pieces(shapes, size, rank):
        if piece.source is None:
            out.append(Span(None, piece.at, piece.length))
            continue
        end = piece.start + piece.length
        for place in places:
            low, high = max(piece.start, place.start), min(end, place.start + place.length)
            if place.source == piece.source and low < high:
                out.append(Span(place.at + low - place.start, piece.at + low - piece.start, high - low))
    joined: list[Span] = []
    for span in sorted(out, key=lambda s: s.at):
        last = joined[-1] if joined else None
        if (
            last
            and last.start is not None
            and span.start is not None
            and (last.start + last.length, last.at + last.length) == (span.start, span.at)
        ):
            joined[-1] = Span(last.start, last.at, last.length + span.length)
        else:
            joined.append(span)
    return tuple(joined)


def places(param: Param) -> tuple[Place, ...]:
    """Where each HF tensor's rows lie in the parameter's array, ascending in ``at``."""
    return _places(param.mapping, param.shapes)


def spans(param: Param, size: int, rank: int) -> tuple[Span, ...]:
    """Where shard ``rank`` of ``size`` lies in the parameter's array, ascending in ``at``, neighbours joined."""
    param.pieces(size, rank)  # the error that names the HF tensors, where the split is impossible
    return _spans(param.mapping, param.shapes, size, rank)


def whole_shape(param: Param) -> Shape:
    """Shape of the unsharded, unpadded parameter."""
    first, dim = param.hf[0].shape, param.mapping.dim
    return (*first[:dim], sum(place.length for place in places(param)), *first[dim + 1 :])


def array_name(param: Param) -> str:
    """The logical name: Megatron-Core's path with global layer numbers, norms by themselves, experts without a number."""
    if param.layer is None:
        return param.role
    return f"decoder.layers.{param.layer}.{'' if param.expert is None else 'mlp.experts.'}{param.role}"


@dataclass(frozen=True)
class LogicalArray:
    """One array and the parameters in it: one, or a layer's experts in their order."""

    name: str
    params: tuple[Param, ...]

    @property
    def stacked(self) -> bool:
        return self.params[0].expert is not None

    @property
    def fp32(self) -> bool:
        return self.params[0].fp32

    @property
    def shape(self) -> Shape:
        shape = whole_shape(self.params[0])
        return (len(self.params), *shape) if self.stacked else shape

    def spec(self, dtype: torch.dtype, ownership: Ownership) -> ArraySpec:
        """The array in ``dtype`` with chunks that are the shards of ``ownership``, or parts of them."""
        param = self.params[0]
        shape, size = whole_shape(param), ownership.sources(param)
        extent = shape[param.mapping.dim]
        real = [span for part in range(size) for span in spans(param, size, part) if span.start is not None]
        ends = {end for span in real for end in (span.start or 0, (span.start or 0) + span.length)}
        cuts = [max(1, n) for n in shape]
        cuts[param.mapping.dim] = common_cut(ends, extent)
        if self.stacked:
            return ArraySpec(self.name, self.shape, dtype, (1, *fit_chunks(shape, cuts, dtype.itemsize)))
        return ArraySpec(self.name, shape, dtype, fit_chunks(shape, cuts, dtype.itemsize))


def region_start(param: Param, along: int) -> tuple[int, ...]:
    """Index in the array where the parameter begins, ``along`` rows (or columns) in."""
    start = [0] * len(param.hf[0].shape)
    start[param.mapping.dim] = along
    return tuple(start) if param.expert is None else (param.expert, *start)


def logical_arrays(table: Table) -> Dict[str, LogicalArray]:
    """All arrays of a model, in export order, by name. A copy of other weights (a tied output layer) has none.

    Raises:
        TableMismatch: experts of a layer that cannot be stacked, or two parameters of one name.
    """
    members: dict[str, list[Param]] = {}
    for param in table.exported:
        members.setdefault(array_name(param), []).append(param)
    out: dict[str, LogicalArray] = {}
    for name, params in members.items():
        if params[0].expert is None and len(params) > 1:
            raise TableMismatch(f"{name} is the name of {len(params)} parameters")
        ordered = tuple(sorted(params, key=lambda p: p.expert or 0))
        first = ordered[0]
        for number, param in enumerate(ordered):
            if first.expert is not None and param.expert != number:
                raise TableMismatch(f"{name}: expert {number} is missing or there twice")
            if (param.mapping, param.shapes, param.fp32) != (first.mapping, first.shapes, first.fp32):
                raise TableMismatch(f"{name}: experts 0 and {number} differ in shape or split")
        out[name] = LogicalArray(name, ordered)
    return out
