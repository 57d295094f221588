"""Save a model's shards as a checkpoint, and load a checkpoint into the shards of any strategy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_mega.checkpoint.arrays import DTYPE_NAMES, DTYPES, ArraySpec, ArrayStore
from areal_mega.checkpoint.canonical import Span, array_name, logical_arrays, region_start, spans
from areal_mega.checkpoint.collective import Ranks
from areal_mega.checkpoint.location import Location, publish
from areal_mega.checkpoint.manifest import FILES, MANIFEST, Manifest, begin, check_present, read_stamped_manifest, write_files
from areal_mega.checkpoint.pool import run_units
from areal_mega.core.errors import UserError
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig
from areal_mega.models.hf_io import model_files
from areal_mega.models.ownership import Ownership, Shard
from areal_mega.models.proof import prove_model, prove_table
from areal_mega.models.registry import family_for
from areal_mega.models.table import LOCAL, Naming, Param, Table, TableMismatch
from areal_mega.parallel.layout import RankLayout

WRITERS = 4
"""Shards of one rank under way at once: enough to hide the waits for storage."""


class Checkpoint:
    """A complete model checkpoint, open for reading; needs no process group.

    Raises:
        UserError: there is none at ``place``, it is not complete, or not of this version.
    """

    def __init__(self, place: str | Path, *, check: bool = True) -> None:
        self.place = Location.parse(place)
        self.manifest, self.stamp = read_stamped_manifest(self.place, "model")
        if check:
            check_present(self.place, self.manifest)
        self.store = ArrayStore(self.place)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Config, tokenizer and chat template as they were copied."""
        return {name: self.file(name) for name in self.manifest.files}

    def file(self, name: str) -> bytes:
        content = self.place.read(FILES + name)
        if content is None or len(content) != self.manifest.files[name]:
            raise UserError(f"{self.place}: {FILES}{name} is missing or has another size; take another copy of the checkpoint")
        return content

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.file("config.json")))
        except (KeyError, ValueError) as error:
            raise UserError(f"{self.place}: {FILES}config.json is missing or no JSON ({error}); take another copy") from None

    @cached_property
    def family(self) -> Family:
        return family_for(self.hf_config)

    @cached_property
    def table(self) -> Table:
        return self.family.table(self.hf_config)

    def check_arrays(self, table: Table) -> None:
        """The checkpoint holds exactly the arrays of ``table``.

        Raises:
            UserError: naming an array that is missing, left over or of another shape.
        """
        expected = {name: array.shape for name, array in logical_arrays(table).items()}
        present = {name: spec.shape for name, spec in self.manifest.arrays.items()}
        for name in [*expected, *present]:
            if expected.get(name) != present.get(name):
                raise UserError(
                    f"{self.place}: array {name} has shape {_shape(present.get(name))} where the model's config gives "
                    f"{_shape(expected.get(name))}; they are of different models"
                )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none (absent)" if shape is None else str(list(shape))


def save(
    named: Mapping[str, Tensor],
    place: str | Path,
    *,
    family: Family,
    hf_config: HFConfig,
    layout: RankLayout,
    rank: int,
    source: str | Path,
    group: dist.ProcessGroup | None = None,
    naming: Naming = LOCAL,
) -> None:
    """Write a model checkpoint; every rank of the layout calls it with the same arguments but ``named`` and ``rank``.

    Each rank writes only shards it owns; replicas are written once, by ranks in turn. Nothing has the checkpoint's name before all of it
    is stored (an object store has no renames: there ``checkpoint.json``, written last, commits).

    Args:
        named: this rank's live tensors by global name.
        place: folder on storage that all ranks share, or URL.
        source: the HuggingFace folder whose config, tokenizer and chat template are copied.
        group: torch.distributed group of exactly the layout's ranks, in order; None: the default group.

    Raises:
        UserError: ``place`` is taken or cannot be written (on every rank).
        TableMismatch: the model and the family's table disagree.
    """
    table = family.table(hf_config)
    ownership = Ownership(table, layout)
    prove_table(table, ownership)
    prove_model(((name, tuple(tensor.shape)) for name, tensor in named.items()), ownership, rank, naming)
    device = next(iter(named.values())).device
    ranks = Ranks(group, device if device.type == "cuda" else "cpu")
    assert (ranks.rank, ranks.size) == (rank, layout.world_size), f"rank {ranks.rank} of {ranks.size} saves for {layout.strategy}"
    target = Location.parse(place)
    specs = _common_specs(named, ownership, rank, naming, ranks)
    store = ArrayStore(target.aside)
    files: dict[str, bytes] = {}
    with ranks.together("make room for the checkpoint"):
        if rank == 0:
            begin(target)
            files = model_files(source)
            write_files(target.aside, files)
            for spec in specs.values():
                store.create(spec)
    with ranks.together("write its shards"):
        mine = [
            (shard, named[naming.name(shard.param)].detach())
            for number, shard in enumerate(owned_candidates(ownership))
            if turn(ownership, shard, number) == rank
        ]
        work = partial(write_shard, store, specs)
        run_units(mine, work, workers=WRITERS, cost=lambda item: item[1].nbytes)
        target.aside.sync()
    with ranks.together("complete the checkpoint"):
        if rank == 0:
            about = {"family": hf_config["model_type"], "strategy": str(layout.strategy)}
            manifest = Manifest("model", specs, {name: len(content) for name, content in files.items()}, about)
            target.aside.write(MANIFEST, manifest.to_json())
            publish(target.aside, target)


def owned_candidates(ownership: Ownership) -> list[Shard]:
    """Every part of every array, once."""
    return [Shard(param, ownership.parts(param), part) for param in ownership.table.exported for part in range(ownership.sources(param))]


def turn(ownership: Ownership, shard: Shard, number: int) -> int:
    """The rank that writes a part: holders of the same bytes take turns."""
    holders = ownership.holders(shard.param, shard.rank)
    return holders[number % len(holders)]


def _common_specs(named: Mapping[str, Tensor], ownership: Ownership, rank: int, naming: Naming, ranks: Ranks) -> dict[str, ArraySpec]:
    """All arrays with the dtype that the ranks hold them in."""
    mine = {array_name(s.param): DTYPE_NAMES[named[naming.name(s.param)].dtype] for s in ownership.shards(rank) if not s.param.copy}
    dtypes: dict[str, str] = {}
    for number, theirs in enumerate(ranks.gather(mine)):
        for name, dtype in theirs.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise TableMismatch(f"rank {number} holds {name} in {dtype}, another in {dtypes[name]}")
    arrays = logical_arrays(ownership.table)
    for name, array in arrays.items():
        if array.fp32 and dtypes[name] != "float32":
            raise TableMismatch(f"{name} must stay fp32 but the model has it in {dtypes[name]}")
    return {name: array.spec(DTYPES[dtypes[name]], ownership) for name, array in arrays.items()}


def write_shard(store: ArrayStore, specs: Mapping[str, ArraySpec], item: tuple[Shard, Tensor]) -> None:
    shard, tensor = item
    param, dim = shard.param, shard.param.mapping.dim
    values = tensor.cpu()
    for span in spans(param, shard.size, shard.rank):
        if span.start is not None:
            part = values.narrow(dim, span.at, span.length)
            store.write(specs[array_name(param)], region_start(param, span.start), part if param.expert is None else part.unsqueeze(0))


def load(
    named: Mapping[str, Tensor],
    place: str | Path,
    *,
    family: Family,
    hf_config: HFConfig,
    layout: RankLayout,
    rank: int,
    naming: Naming = LOCAL,
) -> None:
    """Fill every parameter and persistent buffer of one rank from a checkpoint that any strategy wrote, reading only its own slices.

    Shards are poisoned with NaN first and finite afterwards; padding rows of the vocabulary are zero. Values are converted to each
    shard's dtype. Not collective: ranks need not wait for each other.

    Raises:
        UserError: no complete checkpoint is there, it is of another model, or a value is not finite.
        TableMismatch: the model and the family's table disagree.
    """
    table = family.table(hf_config)
    ownership = Ownership(table, layout)
    prove_table(table, ownership)
    prove_model(((name, tuple(tensor.shape)) for name, tensor in named.items()), ownership, rank, naming)
    checkpoint = Checkpoint(place, check=False)  # a missing chunk is an error when it is read: no need for every rank to list them
    checkpoint.check_arrays(table)
    owners = {param.hf: param for param in table.exported}
    with torch.no_grad():
        for tensor in named.values():
            tensor.fill_(float("nan"))
    shards = list(ownership.shards(rank))

    def fill(shard: Shard) -> None:
        name = naming.name(shard.param)
        target = named[name].detach()
        if shard.param.fp32 and target.dtype != torch.float32:
            raise TableMismatch(f"{name} must stay fp32 but the model has it in {target.dtype}")
        owner = owners[shard.param.hf]
        assert owner.mapping == shard.param.mapping, f"{name} is a copy that is split otherwise than its owner"
        fill_shard(checkpoint, owner, spans(owner, shard.size, shard.rank), target)

    run_units(shards, fill, workers=WRITERS, cost=lambda shard: named[naming.name(shard.param)].nbytes)
    for name, tensor in named.items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{checkpoint.place}: {name} holds NaN or infinity; take another copy of the checkpoint")


def fill_shard(checkpoint: Checkpoint, param: Param, wanted: tuple[Span, ...], target: Tensor) -> None:
    """Read the spans of one shard into ``target``, in its dtype and on its device; padding becomes zero."""
    spec, dim = checkpoint.manifest.arrays[array_name(param)], param.mapping.dim
    for span in wanted:
        part = target.narrow(dim, span.at, span.length)
        if span.start is None:
            part.zero_()
            continue
        direct = part.device.type == "cpu" and part.dtype == spec.dtype
        values = part if direct else torch.empty(part.shape, dtype=spec.dtype)
        checkpoint.store.read_into(spec, region_start(param, span.start), values if param.expert is None else values.unsqueeze(0))
        if not direct:
            part.copy_(values)
