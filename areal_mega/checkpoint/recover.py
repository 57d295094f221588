"""A train rank's part of a recover checkpoint: weights and Adam's moments in fp32, one array per parameter, readable by any strategy.

    <place>/weights     a model checkpoint as any other (it converts to HuggingFace), in fp32
    <place>/exp_avg, exp_avg_sq     the same arrays for the moments

``RecoverSave`` copies what this rank is to write (the stall of the training loop), and writes it in a thread. Nothing has the name
``<place>`` before the controller has seen every rank's part stored and its own state beside it: see ``controller.recover``.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from areal_mega.checkpoint.arrays import ArraySpec, ArrayStore
from areal_mega.checkpoint.canonical import array_name, logical_arrays, spans
from areal_mega.checkpoint.collective import Ranks
from areal_mega.checkpoint.host_memory import Share, available, check_host_memory, machine
from areal_mega.checkpoint.location import Location, publish
from areal_mega.checkpoint.manifest import MANIFEST, Manifest, write_files
from areal_mega.checkpoint.model import WRITERS, Checkpoint, fill_shard, owned_candidates, turn, write_shard
from areal_mega.checkpoint.pool import run_units
from areal_mega.core import points
from areal_mega.core.errors import RunFailed, UserError
from areal_mega.models.family import Family
from areal_mega.models.hf_config import HFConfig, first_line
from areal_mega.models.hf_io import model_files
from areal_mega.models.ownership import Ownership, Shard
from areal_mega.models.proof import prove_model, prove_table
from areal_mega.models.table import KINDS, LOCAL, Naming
from areal_mega.parallel.layout import RankLayout

STATE = "state.json"
"""The controller's part, written last: a folder without it was never completed."""
_SPARE = 1.05
"""Free space asked for, over the bytes to be written: metadata and the file system's own blocks."""


class States(Protocol):
    """Where the values come from and go to: one rank's parameters and persistent buffers, by Megatron's global names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the local shards."""

    def holds_with(self, name: str, rank: int) -> bool:
        """Whether this rank and ``rank`` together hold the parameter's state (a rank does with itself)."""

    def whole(self, name: str, kind: str, dst: int) -> Tensor | None:
        """The local shard's ``kind`` in fp32 on rank ``dst``, perhaps live memory. Collective over the ranks that hold it together."""

    def fill(self, name: str, kind: str, whole: Tensor) -> None:
        """Take ``kind`` of the local shard from an fp32 tensor of its shape. Called for several names at once, each by a thread."""


class RecoverSave:
    """One rank's saving of one checkpoint. The constructor is collective and returns when the copies are made.

    Args:
        states: this rank's values.
        place: folder on storage that all ranks share.
        source: HuggingFace folder whose config, tokenizer and chat template are copied.
        buffers: host copies by name and kind, used again and added to. A caller that keeps them from one save to the next saves the cost
            of new memory, which on a CPU exceeds that of the copying; one that gives an empty dict has the memory back when all is written.

    Raises:
        UserError: ``place`` is taken, cannot be written, or has not enough free space, or a machine has not enough memory (on every rank).
    """

    def __init__(
        self,
        states: States,
        place: Path,
        *,
        family: Family,
        hf_config: HFConfig,
        layout: RankLayout,
        rank: int,
        source: str,
        device: torch.device,
        buffers: dict[tuple[str, str], Tensor],
        naming: Naming = LOCAL,
    ) -> None:
        clock = time.perf_counter()
        self._target, self._rank = Location.of_folder(place), rank
        table = family.table(hf_config)
        ownership = Ownership(table, layout)
        self._specs = {name: array.spec(torch.float32, ownership) for name, array in logical_arrays(table).items()}
        self._about = {"family": hf_config["model_type"], "strategy": str(layout.strategy)}
        self._files: Mapping[str, bytes] = {}
        ranks = Ranks(None, device if device.type == "cuda" else "cpu")
        mine = _held(states, ownership, rank, naming)
        fresh = [(name, kind) for name, _, writer in mine if writer == rank for kind in KINDS if (name, kind) not in buffers]
        needed = sum(4 * math.prod(states.shapes[name]) for name, _ in fresh)
        shares: list[Share] = [(where, nbytes) for where, nbytes in ranks.gather([machine(), needed])]
        with ranks.together("make room for the recover checkpoint"):
            check_host_memory(shares, machine(), available())
            if rank == 0:
                self._files = model_files(source)
                _make_room(self._target, self._specs, self._files)
        self._copies: list[tuple[str, Shard, Tensor]] = []
        for name, shard, writer in mine:
            for kind in KINDS:
                whole = states.whole(name, kind, writer)
                if whole is not None:
                    if (name, kind) not in buffers:
                        buffers[name, kind] = torch.empty(whole.shape)
                    self._copies.append((kind, shard, buffers[name, kind].copy_(whole)))
        self.nbytes = sum(copy.nbytes for _, _, copy in self._copies)
        self._error: Exception | None = None
        self.write_s = 0.0
        points.reach("recover.copied")
        self.stall_s = time.perf_counter() - clock
        self._thread = threading.Thread(target=self._write, name="recover checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank's part is stored.

        Raises:
            UserError: it could not be (a full disk, say).
            RunFailed: anything else went wrong; names rank and place.
        """
        if self._thread.is_alive():
            return False
        if isinstance(self._error, UserError):
            raise self._error
        if self._error is not None:
            why = type(self._error).__name__ + (f": {first_line(self._error)}" if str(self._error) else "")
            raise RunFailed(
                f"train rank {self._rank} could not write its part of {self._target}: {why}; see that the machine has memory and that the "
                "place can be written, then go on from the checkpoint before with run.resume=true"
            ) from self._error
        return True

    def commit(self, state: str) -> None:
        """On rank 0, when every rank is done: complete the three lists, write the controller's state, and give the folder its name."""
        assert self._rank == 0 and self.done()
        aside = self._target.aside
        for kind in KINDS:
            files = {name: len(content) for name, content in self._files.items()} if kind == "weights" else {}
            below(aside, kind).write(MANIFEST, Manifest("model", self._specs, files, self._about).to_json())
        aside.write(STATE, state.encode())
        points.reach("recover.commit")
        publish(aside, self._target)

    def _write(self) -> None:
        clock = time.perf_counter()
        stores = {kind: ArrayStore(below(self._target.aside, kind)) for kind in KINDS}

        def write(item: tuple[str, Shard, Tensor]) -> None:
            kind, shard, values = item
            write_shard(stores[kind], self._specs, (shard, values))

        try:
            points.reach("recover.writing")
            run_units(self._copies, write, workers=WRITERS, cost=lambda item: item[2].nbytes)
            self._target.aside.sync()
        except Exception as error:  # told by `done`, on the thread that asks
            self._error = error
        self._copies = []
        self.write_s = time.perf_counter() - clock


def load_recovered(
    states: States,
    place: Path,
    *,
    family: Family,
    hf_config: HFConfig,
    layout: RankLayout,
    rank: int,
    naming: Naming = LOCAL,
) -> None:
    """Fill one rank's weights and moments from a recover checkpoint that any strategy wrote. Not collective.

    Raises:
        UserError: it is incomplete, of another model, or holds a value that is not finite.
        TableMismatch: the model and the family's table disagree.
    """
    table = family.table(hf_config)
    ownership = Ownership(table, layout)
    prove_table(table, ownership)
    shapes = states.shapes
    prove_model(shapes.items(), ownership, rank, naming)
    owners = {param.hf: param for param in table.exported}

    def fill(kind: str, checkpoint: Checkpoint, shard: Shard) -> None:
        name, owner = naming.name(shard.param), owners[shard.param.hf]
        whole = torch.full(shapes[name], float("nan"))
        fill_shard(checkpoint, owner, spans(owner, shard.size, shard.rank), whole)
        if not bool(torch.isfinite(whole).all()):
            raise UserError(f"{place / kind}: {array_name(owner)} holds NaN or infinity; resume from an earlier checkpoint")
        states.fill(name, kind, whole)

    for kind in KINDS:
        checkpoint = Checkpoint(place / kind, check=False)
        checkpoint.check_arrays(table)
        run_units(
            ownership.shards(rank),
            partial(fill, kind, checkpoint),
            workers=WRITERS,
            cost=lambda shard: 4 * math.prod(shapes[naming.name(shard.param)]),
        )


def _held(states: States, ownership: Ownership, rank: int, naming: Naming) -> list[tuple[str, Shard, int]]:
    """By name, the shards whose state this rank holds, alone or together with the rank that writes it; and that rank."""
    held = []
    for number, shard in enumerate(owned_candidates(ownership)):
        writer, name = turn(ownership, shard, number), naming.name(shard.param)
        if rank in ownership.holders(shard.param, shard.rank) and states.holds_with(name, writer):
            held.append((name, shard, writer))
    return held


def below(place: Location, name: str) -> Location:
    assert place.path is not None, "recover checkpoints lie in folders"
    return Location.of_folder(place.path / name)


def _make_room(target: Location, specs: Mapping[str, ArraySpec], files: Mapping[str, bytes]) -> None:
    """An empty folder aside with all arrays created, on a file system with room for them.

    Raises:
        UserError: the target is taken, missing, read-only, or too small.
    """
    assert target.path is not None and target.aside.path is not None
    parent = target.path.parent
    try:
        parent.mkdir(exist_ok=True)
        if target.path.exists():
            raise UserError(f"{target} exists already; was the run resumed from an earlier checkpoint? remove it or set another run.name")
        free = shutil.disk_usage(parent).free
        needed = int(len(KINDS) * sum(spec.nbytes for spec in specs.values()) * _SPARE)
        if needed > free:
            raise UserError(
                f"a recover checkpoint takes {needed / 1e9:.2f} GB, but {parent} has {free / 1e9:.2f} GB free; "
                "free space, lower checkpoint.keep, or set checkpoint.recover_root to another file system"
            )
        shutil.rmtree(target.aside.path, ignore_errors=True)
        target.aside.path.mkdir()
    except OSError as error:
        raise UserError(
            f"cannot write a recover checkpoint to {parent}: {error.strerror or error}; "
            "mend it, or set checkpoint.recover_root to another folder"
        ) from error
    for kind in KINDS:
        store = ArrayStore(below(target.aside, kind))
        for spec in specs.values():
            store.create(spec)
    write_files(below(target.aside, "weights"), files)
