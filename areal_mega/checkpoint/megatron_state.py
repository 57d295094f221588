"""Megatron-Core's sharded state dicts in our arrays: functions of ours for any place, and strategies for ``dist_checkpointing``.

Each ``ShardedTensor`` key is one global array, cut where its shards are; each ``ShardedObject`` is one key of plain data. The same arrays
load into any other sharding.

Megatron-Core 0.19 has no registry of strategies: ``dist_checkpointing.save`` and ``load`` take one as an argument, and ``save`` replaces
whatever is no ``TorchDistSaveShardedStrategy`` by that class without a word. So ours derive from the two classes, and override every
method that touches storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor

from areal_mega.checkpoint.arrays import DTYPE_NAMES, DTYPES, PREFIX, ArraySpec, ArrayStore, common_cut, fit_chunks
from areal_mega.checkpoint.collective import Ranks
from areal_mega.checkpoint.location import Location, publish
from areal_mega.checkpoint.manifest import MANIFEST, OBJECTS, Manifest, begin, check_present, read_manifest
from areal_mega.checkpoint.plain import from_bytes, to_bytes
from areal_mega.checkpoint.pool import run_units
from areal_mega.core.errors import UserError

BACKEND, VERSION = "areal_mega_zarr3", 1
COMMON = "common_state"
_WRITERS = 4


# --- our own entry points: any place, committed whole, nothing pickled


def save_state(state: dict[str, Any], place: str | Path) -> None:
    """Write a sharded state dict; every rank of the default group calls it.

    Args:
        state: nested dicts and lists of ``ShardedTensor``, ``ShardedObject``, factories, and plain values that are equal on all ranks
            (rank 0's are stored). Like Megatron-Core's own ``save``, this applies the factories in place.
        place: folder on storage that all ranks share, or URL.

    Raises:
        UserError: ``place`` is taken or cannot be written, or an object holds something that is no plain data.
        CheckpointingException: main replicas do not cover a tensor exactly once.
    """
    ranks, target = Ranks(), Location.parse(place)
    sharded, common = save_preprocess(state)
    sharded[COMMON] = ShardedObject(COMMON, common, (1,), (0,), replica_id=ranks.rank)
    with ranks.together("make room for the checkpoint"):
        if ranks.rank == 0:
            begin(target)
    manifest = _write(sharded, target.aside, ranks)
    with ranks.together("complete the checkpoint"):
        if ranks.rank == 0:
            target.aside.write(MANIFEST, manifest.to_json())
            publish(target.aside, target)


def load_state(state: dict[str, Any], place: str | Path) -> dict[str, Any]:
    """Load into a sharded state dict of any sharding; the plain values of the saved one come along. Not collective.

    Returns:
        The same structure with tensors (those of ``state``, filled, where it has some) and objects.

    Raises:
        UserError: no complete checkpoint is there, or it lacks or contradicts what is asked for.
    """
    where = Location.parse(place)
    manifest = read_manifest(where, "state")
    sharded, local, factories = load_preprocess(state)
    common = _read_object(where, ShardedObject(COMMON, None, (1,), (0,)))
    merge(common, local)
    sharded, _ = extract_sharded_base(sharded)
    merge(common, _read(sharded, where, manifest))
    loaded: dict[str, Any] = apply_factory_merges(common, factories)
    return loaded


# --- strategies for megatron.core.dist_checkpointing


class TensorstoreSaveStrategy(TorchDistSaveShardedStrategy):
    """For ``dist_checkpointing.save(state, folder, sharded_strategy=TensorstoreSaveStrategy())``.

    ``load`` of Megatron-Core reads the common part before it asks a strategy, and only from a file of ``torch.save``; so that file is
    written too, and read back at once as weights alone.
    """

    def __init__(self) -> None:
        super().__init__(backend=BACKEND, version=VERSION)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> None:
        ranks, place = Ranks(), Location.parse(Path(checkpoint_dir))
        with ranks.together("clear what an interrupted save left"):
            if ranks.rank == 0:
                for key in place.listing():
                    if key == MANIFEST or key.startswith((PREFIX, OBJECTS)):
                        place.remove(key)
        manifest = _write(sharded_state_dict, place, ranks)
        with ranks.together("complete the checkpoint"):
            if ranks.rank == 0:
                for item in nested_values(sharded_state_dict):
                    if isinstance(item, ShardedObject) and item.key == COMMON:
                        _save_common(item.data, Path(checkpoint_dir) / COMMON_STATE_FNAME)
                place.write(MANIFEST, manifest.to_json())

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str, async_strategy: str = "nvrx") -> AsyncRequest:
        """Everything is stored on return; only Megatron-Core's own finalisation is left to the request."""
        self.save(sharded_state_dict, checkpoint_dir)
        return AsyncRequest(None, (), [])


class TensorstoreLoadStrategy(TorchDistLoadShardedStrategy):
    """For ``dist_checkpointing.load(state, folder, sharded_strategy=TensorstoreLoadStrategy())``."""

    def __init__(self) -> None:
        # Without our streaming it, Megatron-Core replaces quantised destinations by high-precision ones before the load.
        super().__init__(stream_ckpt_dequant=False)

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str, async_strategy: str = "mcore") -> dict[str, Any]:
        place = Location.parse(Path(checkpoint_dir))
        return _read(sharded_state_dict, place, read_manifest(place, "state"))

    def load_tensors_metadata(self, checkpoint_dir: Path | str, metadata: Any = None) -> dict[str, ShardedTensor]:
        manifest = read_manifest(Location.parse(Path(checkpoint_dir)), "state")
        return {
            key: ShardedTensor.from_rank_offsets(key, torch.empty(spec.shape, dtype=spec.dtype, device="meta")).without_data()
            for key, spec in manifest.arrays.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: Path | str) -> dict[str, Any]:
        manifest = read_manifest(Location.parse(Path(checkpoint_dir)), "state")
        objects = {key: ShardedObject.empty_from_unique_key(key) for key in manifest.about["objects"]}
        return {**objects, **self.load_tensors_metadata(checkpoint_dir)}

    def remove_sharded_tensors(self, checkpoint_dir: Path | str, key_prefix: str) -> None:
        place = Location.parse(Path(checkpoint_dir))
        manifest = read_manifest(place, "state")
        kept = {key: spec for key, spec in manifest.arrays.items() if not key.startswith(key_prefix)}
        place.write(MANIFEST, Manifest("state", kept, manifest.files, manifest.about).to_json())
        for key in place.listing():
            if key.startswith(f"{PREFIX}{key_prefix}"):
                place.remove(key)


def _save_common(data: Any, path: Path) -> None:
    torch.save(data, path)
    try:
        torch.load(path, weights_only=True)
    except Exception as error:
        raise UserError(f"the common state holds what weights-only loading refuses ({str(error).splitlines()[0]}); give tensors") from error


# --- both


def _write(sharded: dict[str, Any], place: Location, ranks: Ranks) -> Manifest:
    """Store what this rank is the main replica of; the manifest of all ranks' parts."""
    mine = [item for item in nested_values(sharded) if is_main_replica(item.replica_id)]
    tensors = [item for item in mine if isinstance(item, ShardedTensor)]
    objects = [item for item in mine if isinstance(item, ShardedObject)]
    specs = _specs(ranks.gather([[t.key, DTYPE_NAMES[t.dtype], t.global_shape, _bounds(t)] for t in tensors]))
    names = sorted(name for theirs in ranks.gather([item.unique_key for item in objects]) for name in theirs)
    store = ArrayStore(place)
    with ranks.together("create arrays"):
        if ranks.rank == 0:
            for spec in specs.values():
                store.create(spec)
    with ranks.together("write its shards"):
        for item in objects:
            place.write(OBJECTS + item.unique_key, to_bytes(item.data, item.key))

        def write(tensor: ShardedTensor) -> None:
            assert tensor.data is not None, f"{tensor.key} has no data to save"
            values = dequantize_fp8_tensor(tensor.data) if is_float8tensor(tensor.data) else tensor.data.detach()
            if values.numel():
                spread = values.cpu().reshape((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
                store.write(specs[tensor.key], tensor.global_offset, spread)

        run_units(tensors, write, workers=_WRITERS, cost=lambda tensor: tensor.data.nbytes if tensor.data is not None else 0)
        place.sync()
    return Manifest("state", specs, about={"objects": names})


def _bounds(tensor: ShardedTensor) -> list[list[int]]:
    sizes = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    return [[start, start + size] for start, size in zip(tensor.global_offset, sizes, strict=True)]


def _specs(gathered: Sequence[Any]) -> dict[str, ArraySpec]:
    """One array per key, with a chunk boundary wherever a main replica begins or ends."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    ends: dict[str, list[set[int]]] = {}
    for rank, theirs in enumerate(gathered):
        for key, dtype, shape, bounds in theirs:
            known = shapes.setdefault(key, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                raise UserError(f"{key} is {dtype} of shape {shape} on rank {rank} and {known[0]} of shape {list(known[1])} on another")
            for axis, pair in zip(ends.setdefault(key, [set() for _ in shape]), bounds, strict=True):
                axis.update(pair)
    out = {}
    for key, (dtype, shape) in sorted(shapes.items()):
        cuts = [common_cut(axis, size) for axis, size in zip(ends[key], shape, strict=True)]
        out[key] = ArraySpec(key, shape, DTYPES[dtype], fit_chunks(shape, cuts, DTYPES[dtype].itemsize))
    return out


def _read(sharded: dict[str, Any], place: Location, manifest: Manifest) -> dict[str, Any]:
    """Fill every ``ShardedTensor`` and fetch every ``ShardedObject`` of a state dict."""
    store = ArrayStore(place)
    out: dict[int, Any] = {}

    def fetch(item: ShardedTensor | ShardedObject) -> None:
        if isinstance(item, ShardedObject):
            out[id(item)] = _read_object(place, item)
        else:
            out[id(item)] = _read_tensor(store, manifest, item, str(place))

    items = list(nested_values(sharded))
    run_units(items, fetch, workers=_WRITERS, cost=lambda item: 0 if isinstance(item, ShardedObject) else _nbytes(item))
    loaded: dict[str, Any] = dict_list_map_outplace(lambda item: out[id(item)], sharded)
    return loaded


def _nbytes(tensor: ShardedTensor) -> int:
    count = tensor.dtype.itemsize
    for size in tensor.local_shape:
        count *= size
    return int(count)


def _read_object(place: Location, item: ShardedObject) -> Any:
    content = place.read(OBJECTS + item.unique_key)
    if content is None:
        raise UserError(f"{place} lacks object {item.unique_key}; it was saved from another state")
    return from_bytes(content, f"{place}: {item.unique_key}")


def _read_tensor(store: ArrayStore, manifest: Manifest, item: ShardedTensor, where: str) -> Tensor:
    spec = manifest.arrays.get(item.key)
    if spec is None:
        raise UserError(f"{where} lacks tensor {item.key}; it was saved from another state")
    if spec.shape != tuple(item.global_shape) and not (item.allow_shape_mismatch and len(spec.shape) == len(item.global_shape)):
        shapes = f"shape {list(spec.shape)}, and {list(item.global_shape)} is wanted"
        raise UserError(f"{where}: {item.key} has {shapes}; they are of different models")
    target = item.data if item.data is not None else torch.zeros(item.local_shape, dtype=item.dtype)
    # Where shapes may differ (a vocabulary padded otherwise) what the array has is read, and the rest stays as it is.
    sizes = (1,) * item.prepend_axis_num + tuple(item.local_shape)
    kept = [max(0, min(size, have - start)) for size, have, start in zip(sizes, spec.shape, item.global_offset, strict=True)]
    if all(kept):
        values = torch.empty(kept, dtype=spec.dtype)
        store.read_into(spec, item.global_offset, values)
        part = target.detach()
        for axis, size in enumerate(kept[item.prepend_axis_num :]):
            part = part.narrow(axis, 0, size)
        part.copy_(values.reshape(part.shape))
    return target


def check_state(place: str | Path) -> Mapping[str, ArraySpec]:
    """The arrays of a state checkpoint, every chunk and object of which is there; needs no process group.

    Raises:
        UserError: it is incomplete.
    """
    where = Location.parse(place)
    manifest = read_manifest(where, "state")
    check_present(where, manifest)
    return manifest.arrays
