"""Changing weights under a running server: groups, sessions, buckets, disk. Everything here runs on the engine's thread except ``join``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_mega.core import points
from areal_mega.core.errors import UserError
from areal_mega.serving.engine import Engine
from areal_mega.serving.loader import Unchanged, check_same_arch, fill_from
from areal_mega.sync.digest import DigestKind, combine
from areal_mega.sync.group import create_group, destroy_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
_WIRE = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
}


class UpdateRefused(Exception):
    """Answered as 400 {success: false, message}."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one ``/update_weights_from_distributed``; ``flat``: they come as one buffer of bytes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group: str
    flat: bool
    version: str | None
    flush: bool
    abort_all: bool


class Updater:
    """Owns the weight-sync groups and the update session of one engine."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self.groups: dict[str, ProcessGroup] = {}
        self._joining: set[str] = set()
        self._flat = torch.empty(0, dtype=torch.uint8)
        """Where buckets of the open session arrive: fresh memory for each would cost as much as another copy."""
        self._open = False
        self._failure = ""
        """Why the weights of the open session cannot be whole."""
        self._came: set[str] = set()
        """Tensors that the open session has replaced, or began to."""
        self._last = False
        """The newest bucket of the open session carried the version, as the last one does."""
        self._lacking: set[str] = set()
        """After a failed update: tensors that must still come, in one session, before anything is computed again."""

    # Groups.

    def join(self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Blocks until the group is complete; on its own thread, so generation goes on."""
        if name in self.groups or name in self._joining:
            raise UpdateRefused(f"The group {name} exists already; destroy it first.")
        self._joining.add(name)
        try:
            self.groups[name] = create_group(
                address=address, port=port, rank=rank, world_size=world_size, name=name, backend=backend, timeout_s=self._timeout_s
            )
        except (UserError, TimeoutError, ValueError) as error:
            raise UpdateRefused(f"Failed to initialize custom process group: {error}") from error
        finally:
            self._joining.discard(name)

    def leave(self, name: str) -> None:
        if name not in self.groups:
            raise UpdateRefused("The group to be destroyed does not exist.")
        group = self.groups.pop(name)
        if self._open and not self._failure:
            # Whoever was sending is gone; a session that another one ends must not pass for complete.
            if self._came:
                self._fail(f"the group {name} was left in the midst of an update")
            else:
                self._open = False  # nothing was changed, and nobody is there to end it
        destroy_group(group)

    def _fail(self, why: str) -> None:
        """From now on requests are refused, until an update is complete. At once, not at a session's end: who died does not end it."""
        self._failure, self._engine.holding = why, True
        self._engine.broken = f"the weights are incomplete: {why}; send all of them again"

    # Sessions.

    def begin(self) -> None:
        if self._open and not self._failure:
            raise UpdateRefused("a weight-update session is already open; call end_weight_update() first")
        self._open, self._failure, self._last = True, "", False
        self._came = set()
        self._flat = torch.empty(0, dtype=torch.uint8)  # a broadcast that failed may still write into the old one
        if self._engine.broken:
            self._lacking = set(self._engine.model.weights.hf)  # which of them were replaced before is not worth trusting

    def end(self) -> None:
        if not self._open:
            raise UpdateRefused("no weight-update session is open; call begin_weight_update() first")
        self._open = False
        self._flat = torch.empty(0, dtype=torch.uint8)
        cut = bool(self._came) and not self._last and len(self._came) < len(self._engine.model.weights.hf)
        if self._failure:
            self._fail(self._failure)
        elif cut:
            self._fail(
                f"the update ended after {len(self._came)} of {len(self._engine.model.weights.hf)} tensors and no bucket with a "
                "weight_version, which the last one carries"
            )
        elif self._lacking:
            some = ", ".join(sorted(self._lacking)[:3])
            self._engine.broken = (
                f"the weights are incomplete: an update failed, and the next one left out {len(self._lacking)} of "
                f"{len(self._engine.model.weights.hf)} tensors ({some}, ...); send all of them again"
            )
        else:
            self._engine.broken = ""
        self._engine.holding = bool(self._engine.broken)
        if self._engine.broken:
            raise UpdateRefused(self._engine.broken)

    # Loading.

    def check(self, bucket: Bucket) -> None:
        """Refuse a request that is wrong before anything waits or is received. Reads only; any thread."""
        if not self._open:
            raise UpdateRefused("update_weights_from_distributed must run between begin_weight_update() and end_weight_update()")
        if bucket.group not in self.groups:
            known = list(self.groups)
            raise UpdateRefused(
                f"Failed to receive weights: Group {bucket.group} not in {known}. Please call `init_weights_update_group` first."
            )
        if not bucket.names:
            raise UpdateRefused("Failed to receive weights: the bucket is empty")
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            if dtype not in _WIRE:
                raise UpdateRefused(f"Failed to receive weights: dtype {dtype} of {name} is unknown; known: {', '.join(_WIRE)}")
            try:
                self._engine.model.weights.check(name, shape)
            except UserError as error:
                raise UpdateRefused(f"Failed to receive weights: {error}") from error

    def receive(self, bucket: Bucket) -> str:
        """Receive a bucket from rank 0 of its group and load it."""
        self.check(bucket)
        weights = self._engine.model.weights
        if bucket.abort_all:
            self._engine.abort(lambda _: True)
        try:
            came = self._arrive(bucket)
        except BaseException as error:
            self._fail(f"Failed to receive weights: {_first_line(error)}")
            weights.unsettle(bucket.names)
            if not isinstance(error, RuntimeError | TimeoutError):
                raise
            log.exception("a bucket was not received")
            raise UpdateRefused(self._failure) from error
        self._engine.holding = True  # until the session ends: the rest of the weights is still of the old version
        self._came.update(bucket.names)
        try:
            points.reach("sync.received")
            for name, tensor in came:
                weights.load(name, tensor)
            weights.refresh(bucket.names)
        except BaseException as error:
            self._fail(f"a bucket was not loaded to its end ({type(error).__name__}: {error})")
            raise
        self._last = bucket.version is not None
        self._lacking.difference_update(bucket.names)
        self._engine.weights_changed(bucket.version)
        self._flush(bucket.flush)
        return _done("Succeeded to update parameter online.", bucket.version)

    def _arrive(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """Receive a bucket; what of it must still be copied: nothing where it came into its place."""
        weights = self._engine.model.weights
        if bucket.flat and (place := weights.settle(bucket.names, [_WIRE[dtype] for dtype in bucket.dtypes])) is not None:
            self._broadcast(place, bucket.group)
            return []
        return list(zip(bucket.names, self._receive_flat(bucket) if bucket.flat else self._receive_each(bucket), strict=True))

    def _receive_flat(self, bucket: Bucket) -> list[Tensor]:
        sizes = [_count(shape) * _WIRE[dtype].itemsize for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True)]
        if len(self._flat) < sum(sizes):
            self._flat = torch.empty(sum(sizes), dtype=torch.uint8)
        flat = self._flat[: sum(sizes)]
        self._broadcast(flat, bucket.group)
        parts = flat.split(sizes)
        return [_as_tensor(part, dtype, shape) for part, dtype, shape in zip(parts, bucket.dtypes, bucket.shapes, strict=True)]

    def _receive_each(self, bucket: Bucket) -> list[Tensor]:
        tensors = []
        for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
            tensors.append(torch.empty(shape, dtype=_WIRE[dtype]))
            self._broadcast(tensors[-1], bucket.group)
        return tensors

    def _broadcast(self, tensor: Tensor, group: str) -> None:
        work = dist.broadcast(tensor, src=0, group=self.groups[group], async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self._timeout_s))

    def from_disk(self, path: str, version: str | None, flush: bool, abort_all: bool) -> str:
        """Load a folder of the same architecture."""
        if abort_all:
            self._engine.abort(lambda _: True)
        weights = self._engine.model.weights
        try:
            hf = check_same_arch(weights.arch, path)
        except UserError as error:
            raise UpdateRefused(f"Failed to update weights: {error}") from error
        before, self._engine.holding = self._engine.holding, True
        try:
            fill_from(weights, path, hf)
        except Unchanged as error:
            self._engine.holding = before
            raise UpdateRefused(f"Failed to update weights: {error}") from error
        except BaseException as error:
            self._fail(f"{path} could not be read to its end ({type(error).__name__}: {error})")
            if isinstance(error, UserError | OSError | RuntimeError):
                raise UpdateRefused(f"Failed to update weights: {error}") from error
            raise
        # A whole model has come.
        self._engine.holding, self._engine.broken, self._failure = False, "", ""
        self._lacking.clear()
        self._came.clear()
        self._engine.weights_changed(version)
        self._flush(flush)
        return _done("Succeeded to update model weights.", version)

    def _flush(self, wanted: bool) -> None:
        if wanted and not self._engine.flush_cache():
            raise UpdateRefused(
                "The weights are updated, but the cache cannot be flushed while requests hold it: "
                "pause with retract, or send flush_cache false with in_place."
            )

    def checksums(self, kind: DigestKind) -> dict[str, Any]:
        digests = self._engine.model.weights.digests(kind)
        return {"hf_digests": digests, "hf_digest": combine(digests), "weight_version": self._engine.version}


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _as_tensor(raw: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes as a tensor; copied where the offset in the bucket is not a multiple of the item's size."""
    if raw.storage_offset() % _WIRE[dtype].itemsize:
        raw = raw.clone()
    return raw.view(_WIRE[dtype]).view(shape)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _done(message: str, version: str | None) -> str:
    return f"{message} Weight version updated to {version}." if version is not None else message
