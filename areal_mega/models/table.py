"""The declarative parameter table: which HF tensors make which Megatron parameter, and which rows of them make one rank's shard.

Every mapping says the same thing: *pieces*. A piece copies ``length`` rows (or columns) of one HF tensor to a place in the shard.
Loading copies along the pieces, gathering copies back along them, and the completeness proof is interval arithmetic over them, so that
no direction can disagree with another. Nothing here imports torch: shapes are tuples, and a layout can be checked without weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from areal_mega.core.errors import UserError

Shape = tuple[int, ...]
Stage = Literal["first", "layer", "last"]

VOCAB_MULTIPLE = 128
"""Megatron's own default for make_vocab_size_divisible_by: it keeps the vocabulary GEMM on whole tiles."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, as torch and Megatron-Core call them."""
KINDS = ("weights", *MOMENTS)
"""What a parameter has while it is trained: fp32 weights, and both moments."""


class TableMismatch(RuntimeError):
    """The model that was built and the family's table disagree: a bug in one of them, never a user's mistake."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding that Megatron allocates over all TP ranks: the next multiple of ``128 * tp``.

    Rows from ``vocab_size`` on are padding: zero after a load, never exported. Their logits are not part of the model, so a softmax
    over the vocabulary has to leave them out.
    """
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the HuggingFace files: its name and its shape."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """``[start, start + length)`` of HF tensor number ``source`` is ``[at, at + length)`` of the shard, along the mapping's ``dim``.

    ``source`` is None for padding: that part of the shard is zero and belongs to no HF tensor.
    """

    source: int | None
    start: int
    at: int
    length: int


@dataclass(frozen=True)
class Mapping(ABC):
    """How a parameter's shards are made of its HF tensors. ``dim`` is the dimension that pieces run along."""

    @property
    def dim(self) -> int:
        return 0

    @property
    def replicated(self) -> bool:
        """True where every tensor-parallel rank holds the same, whole tensor."""
        return False

    @abstractmethod
    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        """The pieces of shard ``rank`` of ``size``, ascending in ``at``.

        Raises:
            UserError: if the tensors cannot be split that way.
        """


def _share(total: int, size: int) -> int:
    if total % size:
        legal = [n for n in range(1, total + 1) if total % n == 0 and n <= 2 * size]
        raise UserError(f"{total} rows or columns do not split over {size} ranks; tensor parallelism of {_or(legal)} would")
    return total // size


def _legal_sizes(heads: int, groups: int) -> list[int]:
    """Tensor-parallel sizes that Megatron-Core itself takes for so many attention heads and key-value heads."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]


def _heads_do_not_split(heads: int, groups: int, size: int) -> str:
    return (
        f"{heads} attention heads do not split over {size} ranks ({heads} / {size} = {heads / size:.4g}); "
        f"tensor parallelism of {_or(_legal_sizes(heads, groups))} would"
    )


def _or(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)


@dataclass(frozen=True)
class Replicated(Mapping):
    """The whole tensor on every rank: norms, routers, biases of row-parallel layers."""

    @property
    def replicated(self) -> bool:
        return True

    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        return (Piece(0, 0, 0, shapes[0][0]),)


@dataclass(frozen=True)
class Split(Mapping):
    """Equal shares along one dimension: 0 for a column-parallel layer (its output), 1 for a row-parallel one (its input)."""

    along: int = 0

    @property
    def dim(self) -> int:
        return self.along

    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        share = _share(shapes[0][self.along], size)
        return (Piece(0, rank * share, 0, share),)


@dataclass(frozen=True)
class Heads(Mapping):
    """A column-parallel layer whose rows are those of whole attention heads, one after the other."""

    heads: int

    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        if self.heads % size:
            raise UserError(_heads_do_not_split(self.heads, self.heads, size))
        share = shapes[0][0] // size
        return (Piece(0, rank * share, 0, share),)


@dataclass(frozen=True)
class Stacked(Mapping):
    """Several column-parallel tensors in one: each rank holds its share of the first, then of the second (gate and up)."""

    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        out, at = [], 0
        for source, shape in enumerate(shapes):
            share = _share(shape[0], size)
            out.append(Piece(source, rank * share, at, share))
            at += share
        return tuple(out)


@dataclass(frozen=True)
class Vocabulary(Mapping):
    """Rows of the vocabulary, padded at the end to :func:`padded_vocab_size`."""

    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        vocab = shapes[0][0]
        share = padded_vocab_size(vocab, size) // size
        start = rank * share
        real = max(0, min(vocab - start, share))
        out = [Piece(0, start, 0, real)] if real else []
        if real < share:
            out.append(Piece(None, 0, real, share - real))
        return tuple(out)


@dataclass(frozen=True)
class QKV(Mapping):
    """Query, key and value rows, interleaved per query group: ``q.. k v | q.. k v | ...``, as Megatron's fused projection has them.

    With fewer query groups than ranks Megatron still splits the fused rows evenly (and gathers activations instead), so that a
    shard may be a part of one group; the same interval rule covers both.
    """

    heads: int
    groups: int
    head_dim: int

    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        if self.heads % size:
            raise UserError(_heads_do_not_split(self.heads, self.groups, size))
        if self.groups % size and size % self.groups:
            raise UserError(
                f"{self.groups} key-value heads and tensor parallelism {size}: one must divide the other; "
                f"tensor parallelism of {_or(_legal_sizes(self.heads, self.groups))} would do"
            )
        q_rows = self.heads // self.groups * self.head_dim
        group_rows = q_rows + 2 * self.head_dim
        share = _share(self.groups * group_rows, size)
        begin, end = rank * share, (rank + 1) * share
        out = []
        for group in range(begin // group_rows, -(-end // group_rows)):
            offset = group * group_rows
            for source, rows in enumerate((q_rows, self.head_dim, self.head_dim)):
                low, high = max(begin, offset), min(end, offset + rows)
                if low < high:
                    out.append(Piece(source, group * rows + low - offset, low - begin, high - low))
                offset += rows
        return tuple(out)


@lru_cache(maxsize=65536)
def _pieces(mapping: Mapping, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
    # Thousands of experts share one mapping and one set of shapes; this keeps a plan linear in tensors, not in rows.
    return mapping.pieces(shapes, size, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One Megatron parameter (or persistent buffer), by its logical place and role rather than by a module path.

    ``role`` is the path below the layer in Megatron-Core's own modules (``self_attention.linear_qkv.weight``), below the expert for an
    expert (``linear_fc1.weight``), or the whole path outside layers. ``fused_role`` is its path where norms are fused into the
    projection after them. ``layer`` and ``expert`` are global numbers. ``fp32`` marks an island that no cast may touch. ``copy`` marks a
    second copy of weights that another entry owns (the tied output layer on the last of several stages): loaded, never exported.
    """

    role: str
    mapping: Mapping
    hf: tuple[HFTensor, ...]
    stage: Stage = "layer"
    layer: int | None = None
    expert: int | None = None
    fused_role: str | None = None
    fp32: bool = False
    copy: bool = False

    def __post_init__(self) -> None:
        assert (self.layer is not None) == (self.stage == "layer"), f"{self.role}: a layer's parameter has its number, others have none"
        assert self.expert is None or self.layer is not None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(tensor.shape for tensor in self.hf)

    def pieces(self, size: int, rank: int) -> tuple[Piece, ...]:
        """Pieces of shard ``rank`` of ``size``; errors name the HF tensors."""
        try:
            return _pieces(self.mapping, self.shapes, size, rank)
        except UserError as error:
            raise UserError(f"{' + '.join(t.name for t in self.hf)}: {error}") from None

    def shard_shape(self, size: int, rank: int) -> Shape:
        """Shape of shard ``rank`` of ``size``."""
        first, dim = self.hf[0].shape, self.mapping.dim
        extent = sum(piece.length for piece in self.pieces(size, rank))
        return (*first[:dim], extent, *first[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Naming:
    """How a built model spells its parameters: norms fused into the projection after them or not, experts grouped or one by one."""

    fused_norms: bool
    grouped_experts: bool

    def name(self, param: Param) -> str:
        """The global name: layer and expert numbers of the whole model, no wrapper's prefix."""
        if param.layer is None:
            return param.role
        prefix = f"decoder.layers.{param.layer}."
        if param.expert is None:
            return prefix + (param.fused_role if self.fused_norms and param.fused_role else param.role)
        if self.grouped_experts:
            return f"{prefix}mlp.experts.{param.role}{param.expert}"
        return f"{prefix}mlp.experts.local_experts.{param.expert}.{param.role}"


LOCAL = Naming(fused_norms=False, grouped_experts=False)
"""Megatron-Core's own PyTorch modules: what a CPU builds."""
TRANSFORMER_ENGINE = Naming(fused_norms=True, grouped_experts=True)
"""Transformer Engine's modules with grouped GEMM: what a GPU builds."""


@dataclass(frozen=True)
class Table:
    """Every parameter of a model in export order, and the HF tensors that may be present and are rightly left out."""

    params: tuple[Param, ...]
    ignorable: frozenset[str] = frozenset()

    @property
    def num_layers(self) -> int:
        return 1 + max((p.layer for p in self.params if p.layer is not None), default=-1)

    @property
    def num_experts(self) -> int:
        """Experts per MoE layer; 0 for a dense model."""
        return 1 + max((p.expert for p in self.params if p.expert is not None), default=-1)

    @property
    def exported(self) -> tuple[Param, ...]:
        """Parameters that own their HF tensors, in export order."""
        return tuple(p for p in self.params if not p.copy)

    @property
    def hf_tensors(self) -> tuple[HFTensor, ...]:
        """The HF files' whole content, each tensor once, in export order."""
        return tuple(tensor for param in self.exported for tensor in param.hf)
