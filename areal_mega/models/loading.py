"""From HF files into the shards that a rank's model has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_mega.core.errors import UserError
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig
from areal_mega.models.hf_io import HFSource
from areal_mega.models.ownership import Ownership, Shard
from areal_mega.models.proof import prove_model, prove_source, prove_table
from areal_mega.models.table import LOCAL, HFTensor, Naming, Table, TableMismatch
from areal_mega.parallel.layout import RankLayout

_READABLE = (torch.float32, torch.bfloat16, torch.float16)


def load_hf_weights(
    named: Mapping[str, Tensor],
    source: HFSource,
    family: Family,
    hf_config: HFConfig,
    layout: RankLayout,
    rank: int,
    *,
    naming: Naming = LOCAL,
) -> None:
    """Fill every parameter and persistent buffer of one rank from HF files, or fail naming what does not match.

    Shards are poisoned with NaN first and finite afterwards; padding rows of the vocabulary are zero. Values are converted to each
    shard's dtype.

    Args:
        named: this rank's live tensors by global name (all virtual stages together).
        source: the HF files.
        layout: how the model is split; ``rank`` is a rank of it.
        naming: how the built model spells its parameters.

    Raises:
        UserError: a tensor of the files is missing, unexpected, of another shape, or not finite.
        TableMismatch: the model and the family's table disagree.
    """
    table = family.table(hf_config)
    ownership = Ownership(table, layout)
    prove_table(table, ownership)
    prove_model(((name, tuple(tensor.shape)) for name, tensor in named.items()), ownership, rank, naming)
    prove_source(source.names(), table, str(source.folder))
    check_specs(source, table)
    with torch.no_grad():
        for tensor in named.values():
            tensor.fill_(float("nan"))
        for shard in ownership.shards(rank):
            target = named[naming.name(shard.param)]
            if shard.param.fp32 and target.dtype != torch.float32:
                raise TableMismatch(f"{naming.name(shard.param)} must stay fp32 but the model has it in {target.dtype}")
            fill_shard(target, shard, source)
    for name, tensor in named.items():
        if not bool(torch.isfinite(tensor).all()):
            raise TableMismatch(f"rank {rank}: {name} is not finite after the load")


def fill_shard(target: Tensor, shard: Shard, source: HFSource) -> None:
    """Copy the pieces of one shard from the files, reading only their rows."""
    param, dim = shard.param, shard.param.mapping.dim
    pieces = param.pieces(shard.size, shard.rank)
    for number, tensor in enumerate(param.hf):
        mine = [piece for piece in pieces if piece.source == number]
        if not mine:
            continue
        low, high = min(p.start for p in mine), max(p.start + p.length for p in mine)
        values = source.read_slice(tensor.name, dim, low, high)
        _check_finite(values, tensor, source)
        for piece in mine:
            target.narrow(dim, piece.at, piece.length).copy_(values.narrow(dim, piece.start - low, piece.length))
    for piece in pieces:
        if piece.source is None:
            target.narrow(dim, piece.at, piece.length).zero_()


def check_specs(source: HFSource, table: Table) -> None:
    for tensor in table.hf_tensors:
        spec = source.spec(tensor.name)
        if spec.shape != tensor.shape:
            raise UserError(
                f"{source.folder}: tensor {tensor.name} has shape {list(spec.shape)} where config.json gives {list(tensor.shape)}; "
                "they are of different models"
            )
        if spec.dtype not in _READABLE:
            raise UserError(
                f"{source.folder}: tensor {tensor.name} is stored as {str(spec.dtype).removeprefix('torch.')}; "
                "quantised weights are not trained: save the model in bf16 or fp32"
            )


def _check_finite(values: Tensor, tensor: HFTensor, source: HFSource) -> None:
    if not bool(torch.isfinite(values).all()):
        raise UserError(f"{source.folder}: tensor {tensor.name} holds NaN or infinity; fetch the model again")
