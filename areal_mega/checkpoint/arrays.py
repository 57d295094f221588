"""Named global arrays of a checkpoint: zarr3 through tensorstore, uncompressed, one chunk per shard.

Weights in bf16 do not compress, and plain little-endian chunks can be read by anything. A chunk never belongs to two ranks, so that no
writer waits for another, and a chunk that is missing is an error, not zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any
from urllib.parse import quote

import tensorstore as ts
import torch
from torch import Tensor

from areal_mega.checkpoint.location import CONTEXT, Location, storage

CHUNK_BYTES = 32 * 1024**2
"""Above it a shard is cut further: a reader of another strategy then reads little that it does not need."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PREFIX = "arrays/"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A global array: logical name, shape, dtype, and the shape of its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def chunk_keys(self) -> Iterable[str]:
        """Keys of all chunks, below the checkpoint's place."""
        counts = [range(-(-size // chunk)) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        return ("/".join([f"{PREFIX}{self.name}/c", *map(str, index)]) for index in product(*counts))

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype], "chunks": list(self.chunks)}

    @classmethod
    def from_json(cls, name: str, value: dict[str, Any]) -> ArraySpec:
        return cls(name, tuple(value["shape"]), DTYPES[value["dtype"]], tuple(value["chunks"]))


def common_cut(boundaries: Iterable[int], extent: int) -> int:
    """The largest chunk along one dimension that has a chunk boundary wherever a shard begins or ends (the array's own end apart)."""
    cut = gcd(*(boundary for boundary in boundaries if boundary != extent))
    return cut or max(extent, 1)


def fit_chunks(shape: Sequence[int], cuts: Sequence[int], itemsize: int, limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Chunk shape of at most about ``limit`` bytes whose boundaries include those of ``cuts``, cut along the first dimensions first."""
    chunks = list(cuts)
    for dim, cut in enumerate(cuts):
        rest = prod(chunks) // chunks[dim] * itemsize
        most = max(1, limit // max(rest, 1))
        if cut <= most:
            continue
        if cut >= shape[dim]:  # one writer along here: any size is aligned
            chunks[dim] = -(-cut // -(-cut // most))
        else:
            divisors = [d for d in range(1, cut + 1) if cut % d == 0]
            below = max(d for d in divisors if d <= most)
            # Where a size has no good divisor, a chunk too large is better than thousands of small ones.
            chunks[dim] = below if 4 * below >= most else min(d for d in divisors if d > most)
    return tuple(chunks)


class ArrayStore:
    """Reads and writes the arrays of one checkpoint. Thread-safe; handles are kept open."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._open: dict[str, Any] = {}

    def _description(self, spec: ArraySpec) -> dict[str, Any]:
        return {
            "driver": "zarr3",
            "kvstore": f"{self._place.url}{PREFIX}{quote(spec.name)}/",
            "metadata": {
                "shape": list(spec.shape),
                "data_type": DTYPE_NAMES[spec.dtype],
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.chunks)}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}} if spec.dtype.itemsize > 1 else {"name": "bytes"}],
                "fill_value": False if spec.dtype == torch.bool else 0.0 if spec.dtype.is_floating_point else 0,
            },
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }

    def create(self, spec: ArraySpec) -> None:
        """Write an array's metadata; one rank does it for all. An array that exists stays as it is."""
        with storage(f"cannot create array {spec.name} in {self._place}"):
            self._open[spec.name] = ts.open(self._description(spec), create=True, open=True, context=CONTEXT).result()

    def _handle(self, spec: ArraySpec) -> Any:
        handle = self._open.get(spec.name)
        if handle is None:
            # The manifest (or the plan) has the metadata already: ten thousand ranks need not read it again.
            with storage(f"cannot open array {spec.name} in {self._place}"):
                handle = ts.open(self._description(spec), open=True, assume_metadata=True, context=CONTEXT).result()
            self._open[spec.name] = handle
        return handle

    def write(self, spec: ArraySpec, start: Sequence[int], values: Tensor) -> None:
        """Store ``values`` (a CPU tensor of the array's dtype and rank) from index ``start`` on; durable after the place's ``sync``."""
        assert values.dtype == spec.dtype, f"{spec.name}: {values.dtype} into an array of {spec.dtype}"
        region = tuple(slice(at, at + size) for at, size in zip(start, values.shape, strict=True))
        with storage(f"cannot write {spec.name} in {self._place}"):
            self._handle(spec)[region].write(_numpy(values), can_reference_source_data_indefinitely=True).result()

    def read_into(self, spec: ArraySpec, start: Sequence[int], out: Tensor) -> None:
        """Fill ``out`` (a CPU tensor of the array's dtype and rank, any strides) with what lies from index ``start`` on."""
        assert out.dtype == spec.dtype, f"{spec.name}: an array of {spec.dtype} into {out.dtype}"
        region = tuple(slice(at, at + size) for at, size in zip(start, out.shape, strict=True))
        with storage(f"cannot read {spec.name} in {self._place}"):
            ts.array(_numpy(out), copy=False).write(self._handle(spec)[region]).result()


def _numpy(tensor: Tensor) -> Any:
    """The same memory as a numpy array of the same dtype (numpy itself knows no bf16 or fp8)."""
    name = DTYPE_NAMES[tensor.dtype]
    return tensor.detach().view(_VIEWS[tensor.dtype.itemsize]).numpy().view(ts.dtype(name).numpy_dtype)
