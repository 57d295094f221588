"""Do two models hold the same? Tensor by tensor, config field by field, file by file, for HuggingFace folders and checkpoints alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_mega.checkpoint.arrays import DTYPE_NAMES
from areal_mega.checkpoint.canonical import array_name
from areal_mega.checkpoint.convert import Meter, Silent, default_workers, extract, read_checkpoint, read_hf
from areal_mega.checkpoint.location import Location, refuse_unfinished
from areal_mega.checkpoint.manifest import MANIFEST
from areal_mega.checkpoint.model import Checkpoint
from areal_mega.checkpoint.pool import run_units
from areal_mega.models.hf_io import HFSource, HFTensorSpec, model_files
from areal_mega.models.registry import family_for, load_hf_config
from areal_mega.models.table import Param, Table

NOT_COMPARED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""Fields of config.json that say who wrote it; the tensors' own dtypes are compared."""
BY_MEANING = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "num_experts", "num_local_experts"})
"""Fields that are spelled in several ways: what they come to in the model is compared."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Side(ABC):
    """One of the two models."""

    def __init__(self, label: str, hf_config: Mapping[str, Any]) -> None:
        self.label, self.hf_config = label, hf_config
        self.family = family_for(hf_config)
        self.table: Table = self.family.table(hf_config)
        self.owners = {tensor.name: (param, number) for param in self.table.exported for number, tensor in enumerate(param.hf)}

    @cached_property
    def specs(self) -> dict[str, HFTensorSpec]:
        """Every HF tensor that is there."""
        return self.find_specs()

    @cached_property
    def readable(self) -> set[str]:
        """Tensors of parameters that are there whole, in the shapes that the config gives."""
        whole = (p for p in self.table.exported if all(t.name in self.specs and self.specs[t.name].shape == t.shape for t in p.hf))
        return {tensor.name for param in whole for tensor in param.hf}

    @abstractmethod
    def find_specs(self) -> dict[str, HFTensorSpec]: ...

    @abstractmethod
    def files(self) -> Mapping[str, bytes]:
        """Config, tokenizer and chat template."""

    @abstractmethod
    def read(self, param: Param) -> Tensor:
        """A whole parameter."""

    def close(self) -> None:
        return None


class FolderSide(Side):
    """A HuggingFace folder or hub name."""

    def __init__(self, model: str) -> None:
        super().__init__(model, load_hf_config(model))
        self._source = HFSource(model)

    def find_specs(self) -> dict[str, HFTensorSpec]:
        return {name: self._source.spec(name) for name in self._source.names() if name not in self.table.ignorable}

    def files(self) -> Mapping[str, bytes]:
        return model_files(self._source.folder)

    def read(self, param: Param) -> Tensor:
        return read_hf(self._source, param)

    def close(self) -> None:
        self._source.close()


class CheckpointSide(Side):
    """A checkpoint's folder or URL."""

    def __init__(self, place: str) -> None:
        self._checkpoint = Checkpoint(place)
        super().__init__(str(self._checkpoint.place), self._checkpoint.hf_config)
        self._checkpoint.check_arrays(self.table)

    def find_specs(self) -> dict[str, HFTensorSpec]:
        arrays = self._checkpoint.manifest.arrays
        return {t.name: HFTensorSpec(t.name, t.shape, arrays[array_name(p)].dtype) for p in self.table.exported for t in p.hf}

    def files(self) -> Mapping[str, bytes]:
        return self._checkpoint.files

    def read(self, param: Param) -> Tensor:
        return read_checkpoint(self._checkpoint, param)


def open_side(text: str | Path) -> Side:
    """A checkpoint where there is a manifest or a URL of a store, else a HuggingFace model.

    Raises:
        UserError: it is neither.
    """
    place = Location.parse(text)
    if place.path is None or (place.path / MANIFEST).is_file():
        return CheckpointSide(str(text))
    refuse_unfinished(place)
    return FolderSide(str(place.path) if "://" in str(text) else str(text))


def verify(a: str | Path, b: str | Path, *, workers: int | None = None, meter: Meter | None = None) -> list[str]:
    """What differs between two models, one line each; empty where they are the same, bit by bit.

    Raises:
        UserError: one of them cannot be read.
    """
    with ExitStack() as stack:
        one = open_side(a)
        stack.callback(one.close)
        two = open_side(b)
        stack.callback(two.close)
        lines = [*compare_configs(one, two), *_compare_files(one, two), *_compare_specs(one, two)]
        return lines + _compare_values(one, two, workers or default_workers(), meter or Silent())


# --- configs and files


def compare_configs(one: Side, two: Side) -> Iterator[str]:
    """Fields of ``config.json`` as the model gets them, then the others as they are written."""
    built = [{**s.family.transformer_config(s.hf_config), **s.family.config_attributes(s.hf_config), **s.family.gpt_kwargs(s.hf_config)}
             for s in (one, two)]  # fmt: skip
    for name, left, right in _unequal(*built):
        yield f"config: {name} comes to {left} in {one.label} and {right} in {two.label}"
    # A field that is null says what one that is absent says.
    raw = [{k: v for k, v in s.hf_config.items() if k not in NOT_COMPARED | BY_MEANING and v is not None} for s in (one, two)]
    for name, left, right in _unequal(*raw):
        yield f"config.json: {name} is {left} in {one.label} and {right} in {two.label}"


_ABSENT = object()


def _unequal(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in sorted(left.keys() | right.keys()):
        values = left.get(name, _ABSENT), right.get(name, _ABSENT)
        if values[0] != values[1]:
            yield name, _short(values[0]), _short(values[1])


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _compare_files(one: Side, two: Side) -> Iterator[str]:
    left, right = one.files(), two.files()
    for name in sorted((left.keys() | right.keys()) - {"config.json"}):
        if name not in left or name not in right:
            yield f"file {name} is only in {one.label if name in left else two.label}"
        elif left[name] != right[name]:
            yield f"file {name} differs"


# --- tensors


def _compare_specs(one: Side, two: Side) -> Iterator[str]:
    for side in (one, two):
        for tensor in side.table.hf_tensors:
            if tensor.name in side.specs and side.specs[tensor.name].shape != tensor.shape:
                have, want = list(side.specs[tensor.name].shape), list(tensor.shape)
                yield f"tensor {tensor.name} has shape {have} in {side.label}, whose own config gives {want}"
    for name in sorted(one.specs.keys() | two.specs.keys()):
        left, right = one.specs.get(name), two.specs.get(name)
        if left is None or right is None:
            yield f"tensor {name} is only in {two.label if left is None else one.label}"
        elif left.shape != right.shape:
            yield f"tensor {name} has shape {list(left.shape)} in {one.label} and {list(right.shape)} in {two.label}"
        elif left.dtype != right.dtype:
            names = DTYPE_NAMES[left.dtype], DTYPE_NAMES[right.dtype]
            yield f"tensor {name} is {names[0]} in {one.label} and {names[1]} in {two.label}"


def _compare_values(one: Side, two: Side, workers: int, meter: Meter) -> list[str]:
    """Values of the tensors that both have in one shape, in the order of the first's table."""
    both = {name for name in one.readable & two.readable if one.specs[name].shape == two.specs[name].shape}
    units = [param for param in one.table.exported if any(tensor.name in both for tensor in param.hf)]
    found: dict[str, str] = {}

    def size(param: Param) -> int:
        return sum(one.specs[tensor.name].nbytes for tensor in param.hf)

    def work(param: Param) -> None:
        found.update(_compare_param(one, two, param, both))

    meter.begin(sum(size(param) for param in units), 0)
    run_units(units, work, workers=workers, cost=lambda param: 2 * size(param), done=lambda param: meter.advance(size(param)))
    return [found[tensor.name] for param in units for tensor in param.hf if tensor.name in found]


def _compare_param(one: Side, two: Side, param: Param, both: set[str]) -> Iterator[tuple[str, str]]:
    left = one.read(param)
    others = {two.owners[tensor.name][0] for tensor in param.hf if tensor.name in both}
    read = {other: two.read(other) for other in others}
    if len(read) == 1 and (other := next(iter(read))) == param and _same_bits(left, read[other]):
        return
    for number, tensor in enumerate(param.hf):
        if tensor.name in both:
            other, place = two.owners[tensor.name]
            difference = _difference(extract(param, number, left), extract(other, place, read[other]))
            if difference:
                yield tensor.name, f"tensor {tensor.name}: {difference}"


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype:
        return False
    wide = left.nbytes % 8 == 0 and left.is_contiguous() and right.is_contiguous() and not (left.data_ptr() | right.data_ptr()) % 8
    if wide and left.shape == right.shape:  # whole words compare four times as fast
        return torch.equal(left.reshape(-1).view(torch.int64), right.reshape(-1).view(torch.int64))
    kind = _BITS[left.dtype.itemsize]
    return torch.equal(left.view(kind), right.view(kind))


def _difference(left: Tensor, right: Tensor) -> str | None:
    if _same_bits(left, right):
        return None
    gap = (left.double() - right.double()).abs()
    unequal = int((gap != 0).sum())
    if not unequal:
        # The same numbers in another dtype (said where dtypes are compared), or zeros of another sign.
        return None if left.dtype != right.dtype else "zeros differ in sign"
    return f"{unequal} of {left.numel()} values differ, by at most {float(gap.max()):.3g}"
