"""The completeness proof: every HF tensor and every Megatron parameter is consumed exactly once, or what is left over is named."""

from __future__ import annotations

from collections.abc import Iterable

from areal_mega.core.errors import UserError
from areal_mega.models.ownership import Ownership
from areal_mega.models.table import Mapping, Naming, Param, Shape, Table, TableMismatch


def prove_table(table: Table, ownership: Ownership) -> None:
    """Prove, by intervals alone, that the parts of every parameter tile its shards and its HF tensors exactly once, and that each part
    has a rank to hold it.

    Raises:
        TableMismatch: naming the parameter and the HF tensor.
        UserError: where the layout cannot split a tensor.
    """
    seen: dict[str, Param] = {}
    proved: set[tuple[Mapping, tuple[Shape, ...], int]] = set()
    for param in table.exported:
        for tensor in param.hf:
            if tensor.name in seen:
                raise TableMismatch(f"HF tensor {tensor.name} is consumed twice: by {seen[tensor.name].role} and by {param.role}")
            if tensor.name in table.ignorable:
                raise TableMismatch(f"HF tensor {tensor.name} is both consumed and ignorable")
            seen[tensor.name] = param
    for param in ownership.params:
        if param.copy:
            lost = [tensor.name for tensor in param.hf if tensor.name not in seen]
            if lost:
                raise TableMismatch(f"{param.role} is a copy of {lost[0]}, which no parameter owns")
        size = ownership.sources(param)
        key = (param.mapping, param.shapes, size)
        if key not in proved:
            _prove_tiling(param, size)
            proved.add(key)
        for part in range(size):
            if not ownership.holders(param, part):
                raise TableMismatch(f"no rank holds part {part} of {param.role} (layer {param.layer}, expert {param.expert})")


def _prove_tiling(param: Param, size: int) -> None:
    covered: list[list[tuple[int, int]]] = [[] for _ in param.hf]
    for rank in range(size):
        pieces, end = param.pieces(size, rank), 0
        for piece in pieces:
            if piece.at != end or piece.length <= 0:
                raise TableMismatch(f"{param.role}: shard {rank} of {size} has a hole or an overlap at {end}")
            end += piece.length
            if piece.source is not None:
                covered[piece.source].append((piece.start, piece.start + piece.length))
    dim = param.mapping.dim
    for tensor, ranges in zip(param.hf, covered, strict=True):
        end = 0
        for start, stop in sorted(ranges):
            if start != end:
                raise TableMismatch(f"{param.role}: {tensor.name} is {'consumed twice' if start < end else 'not consumed'} at {start}")
            end = stop
        if end != tensor.shape[dim]:
            raise TableMismatch(f"{param.role}: {tensor.name} has {tensor.shape[dim]} along dimension {dim}, of which {end} are consumed")
        others = {t.shape[:dim] + t.shape[dim + 1 :] for t in param.hf}
        if len(others) != 1:
            raise TableMismatch(f"{param.role}: its HF tensors have shapes that do not stack: {[t.shape for t in param.hf]}")


def prove_model(present: Iterable[tuple[str, Shape]], ownership: Ownership, rank: int, naming: Naming) -> None:
    """Prove that a rank's model has exactly the parameters that the table gives it, in the right shapes.

    Raises:
        TableMismatch: naming what is missing, left over or of another shape.
    """
    shapes = dict(present)
    expected = {naming.name(s.param): s.param.shard_shape(s.size, s.rank) for s in ownership.shards(rank)}
    missing, extra = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing or extra:
        parts = [f"the table expects {_some(missing)}, which the model lacks"] if missing else []
        parts += [f"the model has {_some(extra)}, which the table does not know"] if extra else []
        raise TableMismatch(f"rank {rank}: " + "; ".join(parts))
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise TableMismatch(f"rank {rank}: {name} has shape {tuple(shapes[name])}; the table gives {shape}")


def prove_source(names: Iterable[str], table: Table, where: str) -> None:
    """Prove that HF files hold exactly the tensors of the table, besides ignorable ones.

    Raises:
        UserError: naming what is missing or unexpected, and where.
    """
    present, expected = set(names), {tensor.name for tensor in table.hf_tensors}
    missing = sorted(expected - present)
    if missing:
        raise UserError(f"{where}: tensor {_some(missing)} is missing; the files do not match config.json or are incomplete")
    unexpected = sorted(present - expected - table.ignorable)
    if unexpected:
        raise UserError(f"{where}: tensor {_some(unexpected)} belongs to no parameter of this architecture; config.json and files disagree")


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" (and {len(names) - limit} more)" if len(names) > limit else "")
