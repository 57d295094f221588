"""HuggingFace folder to checkpoint and back, parameter by parameter, without process group or GPU.

A unit of work is one Megatron parameter (one expert's, where they are many). Units under way are bounded in bytes, so that memory follows
the largest tensor and not the model. Both outputs lie aside until complete, with a journal of what is stored: the same command after an
interruption goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from areal_mega.checkpoint.arrays import DTYPE_NAMES, ArraySpec, ArrayStore
from areal_mega.checkpoint.canonical import LogicalArray, array_name, logical_arrays, places, region_start, whole_shape
from areal_mega.checkpoint.journal import Journal, exclusive
from areal_mega.checkpoint.location import Location, publish, refuse_unfinished, storage
from areal_mega.checkpoint.manifest import JOURNAL, MANIFEST, Manifest, begin, write_files
from areal_mega.checkpoint.model import Checkpoint
from areal_mega.checkpoint.pool import run_units
from areal_mega.core.errors import UserError
from areal_mega.models.hf_io import SHARD_BYTES, HFSource, HFTensorSpec, HFWriter, model_files
from areal_mega.models.loading import check_specs
from areal_mega.models.ownership import Ownership
from areal_mega.models.proof import prove_source, prove_table
from areal_mega.models.registry import family_for, load_hf_config
from areal_mega.models.table import Param
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse


class Meter(Protocol):
    """Shows progress."""

    def begin(self, total: int, done: int) -> None:
        """Bytes in all, and those that an earlier run did."""

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""


class Silent:
    """Shows nothing."""

    def begin(self, total: int, done: int) -> None:
        return None

    def advance(self, nbytes: int) -> None:
        return None


def default_workers() -> int:
    """Threads that read and write at once: more than CPUs, for most of them wait, for storage or for their turn to write to a file."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(16, mine + 6)


# --- from HuggingFace


def from_hf(
    model: str | Path,
    out: str | Path,
    *,
    strategy: str,
    dtype: torch.dtype | None = None,
    workers: int | None = None,
    meter: Meter | None = None,
) -> Manifest:
    """Write a checkpoint with the weights of a HuggingFace folder or hub name.

    Args:
        out: folder or URL; it must not exist.
        strategy: chunks become the shards of this strategy; any other can load them.
        dtype: of the checkpoint, fp32 islands apart (they become fp32). None: every tensor as it is stored.
        workers: threads that read and write at once.

    Raises:
        UserError: the folder is damaged or incomplete, the strategy does not fit, ``out`` is taken or cannot be written.
    """
    refuse_unfinished(Location.of_folder(Path(model)))
    hf_config = load_hf_config(str(model))
    table = family_for(hf_config).table(hf_config)
    layout = RankLayout(parse(strategy))
    ownership = Ownership(table, layout)
    prove_table(table, ownership)
    meter, target = meter or Silent(), Location.parse(out)
    with HFSource(model) as source:
        prove_source(source.names(), table, str(source.folder))
        check_specs(source, table)
        files = model_files(source.folder)
        specs = {n: array.spec(_stored_dtype(array, source, dtype), ownership) for n, array in logical_arrays(table).items()}
        about = {"family": hf_config["model_type"], "strategy": str(layout.strategy)}
        manifest = Manifest("model", specs, {name: len(content) for name, content in files.items()}, about)
        aside = begin(target, go_on=True)
        with exclusive(aside):
            journal = Journal(aside, {"to": "checkpoint", "from": source.stamp(), "manifest": manifest.to_json().decode()})
            left = _unfinished(table.exported, journal)
            _check_space(aside, sum(unit_bytes(param, specs) for param in left))
            write_files(aside, files)
            store = ArrayStore(aside)
            for spec in specs.values():
                store.create(spec)

            def work(param: Param) -> None:
                spec = specs[array_name(param)]
                values = read_hf(source, param).to(spec.dtype)
                store.write(spec, region_start(param, 0), values if param.expert is None else values.unsqueeze(0))

            _run(table.exported, work, journal, specs, workers, meter)
            aside.write(MANIFEST, manifest.to_json())
            publish(aside, target, journal=JOURNAL)
    return manifest


def _stored_dtype(array: LogicalArray, source: HFSource, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return torch.float32 if array.fp32 else dtype
    found = {source.spec(tensor.name).dtype: tensor.name for param in array.params for tensor in param.hf}
    if len(found) > 1:
        (one, first), (other, second), *_ = ((DTYPE_NAMES[d], n) for d, n in found.items())
        raise UserError(f"{source.folder}: {first} is {one} but {second} {other}, and both are parts of {array.name}; give --dtype")
    return next(iter(found))


def read_hf(source: HFSource, param: Param) -> Tensor:
    """A parameter as its array holds it, from the HF files; all values are finite."""
    dim = param.mapping.dim
    out = torch.empty(whole_shape(param), dtype=source.spec(param.hf[0].name).dtype)
    for place in places(param):
        tensor, part = param.hf[place.source], out.narrow(dim, place.at, place.length)
        direct = source.spec(tensor.name).dtype == out.dtype and part.is_contiguous()
        if direct and (dim == 0 or place.length == tensor.shape[dim]):
            source.read_rows(tensor.name, place.start if dim == 0 else 0, part)
        else:
            whole = torch.empty(tensor.shape, dtype=source.spec(tensor.name).dtype)
            source.read_rows(tensor.name, 0, whole)
            out = out.to(torch.promote_types(out.dtype, whole.dtype))
            out.narrow(dim, place.at, place.length).copy_(whole.narrow(dim, place.start, place.length))
    check_finite(out, param, str(source.folder))
    return out


def check_finite(values: Tensor, param: Param, where: str) -> None:
    """Raises UserError where a value is NaN or infinite."""
    if not finite(values):
        raise UserError(f"{where}: {' + '.join(t.name for t in param.hf)} holds NaN or infinity; take another copy of the model")


_LARGEST = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF, torch.float32: 0x7F7FFFFF}
"""Bits of the largest finite value."""


def finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite, at the speed of memory.

    IEEE bits, read as integers, are ordered like the values' sizes: positive ones as signed, negative ones as unsigned integers, so that
    two maxima tell what ``isfinite`` tells at a twentieth of the speed.
    """
    assert values.dtype in _LARGEST, f"weights of {values.dtype} are not read here"
    if not values.numel():
        return True
    largest, wide = _LARGEST[values.dtype], values.dtype.itemsize == 4
    bits = values.contiguous().view(torch.int32 if wide else torch.int16).numpy()
    if int(bits.max()) > largest:
        return False
    return int(bits.view(np.uint32 if wide else np.uint16).max()) <= largest + (1 << (31 if wide else 15))


# --- to HuggingFace


def to_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    meter: Meter | None = None,
) -> tuple[HFTensorSpec, ...]:
    """Write a HuggingFace folder with the weights of a checkpoint, whatever strategy wrote it.

    Args:
        checkpoint: folder or URL.
        out: local folder; it must not exist.
        dtype: of the folder, fp32 islands apart (they stay). None: every tensor as it is stored.
        shard_bytes: largest safetensors file; a bigger tensor has one for itself.

    Raises:
        UserError: there is no complete checkpoint, or ``out`` is taken or cannot be written.
    """
    source, target = Checkpoint(checkpoint), Location.parse(out)
    if target.path is None:
        raise UserError(f"{out}: a HuggingFace folder is written to a local path; give one, and upload it from there")
    if target.occupied():
        raise UserError(f"{target} exists; remove it or choose another place")
    table, specs = source.table, source.manifest.arrays
    source.check_arrays(table)
    prove_table(table, Ownership(table, RankLayout(parse("megatron:d1"))))
    wire = {p: torch.float32 if dtype is not None and p.fp32 else dtype or specs[array_name(p)].dtype for p in table.exported}
    plan = tuple(HFTensorSpec(tensor.name, tensor.shape, wire[param]) for param in table.exported for tensor in param.hf)
    with exclusive(target.aside):
        # The stamp: another checkpoint of the same model may have come to the same place since.
        steps = {"to": "hf", "from": [source.stamp, source.manifest.to_json().decode()], "dtype": str(dtype), "shard_bytes": shard_bytes}
        journal = Journal(target.aside, steps)
        left = {tensor.name for param in _unfinished(table.exported, journal) for tensor in param.hf}
        stored = {spec.name for spec in plan} - left
        _check_space(target.aside, sum(spec.nbytes for spec in plan if spec.name in left))
        with HFWriter(target.path, plan, source=source.files, shard_bytes=shard_bytes, resume=stored, stored=journal.remove) as writer:

            def work(param: Param) -> None:
                write_hf(writer, param, read_checkpoint(source, param).to(wire[param]))

            _run(table.exported, work, journal, specs, workers, meter or Silent())
    return plan


def read_checkpoint(checkpoint: Checkpoint, param: Param) -> Tensor:
    """A parameter as its array holds it; all values are finite."""
    spec = checkpoint.manifest.arrays[array_name(param)]
    out = torch.empty(whole_shape(param), dtype=spec.dtype)
    checkpoint.store.read_into(spec, region_start(param, 0), out if param.expert is None else out.unsqueeze(0))
    check_finite(out, param, str(checkpoint.place))
    return out


def write_hf(writer: HFWriter, param: Param, values: Tensor) -> None:
    """Take a parameter apart into its HF tensors."""
    dim = param.mapping.dim
    if dim == 0:
        for place in places(param):
            writer.write_rows(param.hf[place.source].name, place.start, values.narrow(0, place.at, place.length))
        return
    for number, tensor in enumerate(param.hf):
        writer.write(tensor.name, extract(param, number, values))


def extract(param: Param, number: int, values: Tensor) -> Tensor:
    """HF tensor ``number`` of a parameter, out of its array's content."""
    dim = param.mapping.dim
    mine = sorted((place for place in places(param) if place.source == number), key=lambda place: place.start)
    parts = [values.narrow(dim, place.at, place.length) for place in mine]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# --- both


def unit_name(param: Param) -> str:
    """A parameter's name in the journal: that of its first HF tensor, which no other parameter owns."""
    return param.hf[0].name


def unit_bytes(param: Param, specs: Any) -> int:
    """Bytes of a parameter as it is stored."""
    spec: ArraySpec = specs[array_name(param)]
    return spec.nbytes // (spec.shape[0] if param.expert is not None else 1)


def _unfinished(params: Sequence[Param], journal: Journal) -> list[Param]:
    done = set(journal.done)
    return [param for param in params if unit_name(param) not in done]


def _run(params: Sequence[Param], work: Any, journal: Journal, specs: Any, workers: int | None, meter: Meter) -> None:
    left = _unfinished(params, journal)
    total = sum(unit_bytes(param, specs) for param in params)
    meter.begin(total, total - sum(unit_bytes(param, specs) for param in left))

    def done(param: Param) -> None:
        nbytes = unit_bytes(param, specs)
        journal.add(unit_name(param), nbytes)
        meter.advance(nbytes)

    try:
        # Twice its bytes: as it is read, and as it is written in another dtype.
        run_units(left, work, workers=workers or default_workers(), cost=lambda param: 2 * unit_bytes(param, specs), done=done)
    except KeyboardInterrupt:
        journal.save()
        raise


def _check_space(place: Location, needed: int) -> None:
    """Say before the first hour that a disk is too small, not after it."""
    if place.path is None:
        return
    with storage(f"cannot use {place}"):
        free = shutil.disk_usage(place.path).free
    if needed > free:
        raise UserError(
            f"{place}: {needed / 1e9:.2f} GB are still to be written and {free / 1e9:.2f} GB are free; "
            f"free {(needed - free) / 1e9:.2f} GB, then run the same again"
        )
