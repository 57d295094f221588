"""Which slots (GPUs, or CPU slots) each process of the run owns. Training and rollout never share one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from areal_mega.core.errors import UserError
from areal_mega.parallel.strategy import ParallelStrategy

PlacedRole = Literal["train", "server"]
TRAIN_ENGINES = ("megatron",)
SERVER_ENGINES = ("sglang", "vllm", "embedded")
UNITS = {"cuda": "GPUs", "cpu": "CPU slots", "auto": "slots"}


@dataclass(frozen=True)
class Placement:
    """Slot ids of every train rank and every inference replica, all disjoint.

    Rollout workers and the controller own no slot. ``owned[("train", rank)]`` is one slot; ``owned[("server", replica)]`` is as many
    as a replica has ranks.
    """

    owned: Mapping[tuple[PlacedRole, int], tuple[int, ...]]
    _owner: dict[int, tuple[PlacedRole, int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for who, slots in self.owned.items():
            for slot in slots:
                if slot in self._owner:
                    other = self._owner[slot]
                    raise UserError(f"slot {slot} is given to {other[0]} {other[1]} and to {who[0]} {who[1]}: every process needs its own")
                self._owner[slot] = who

    def slots(self, role: PlacedRole, rank: int) -> tuple[int, ...]:
        return self.owned[(role, rank)]

    @property
    def used(self) -> int:
        return len(self._owner)


def place(
    train: ParallelStrategy, rollout: ParallelStrategy, slots: int | None = None, device: Literal["auto", "cpu", "cuda"] = "cpu"
) -> Placement:
    """Give train ranks the first slots and inference replicas the next ones.

    Args:
        train: strategy of the train role.
        rollout: strategy of the inference servers; ``dp`` counts replicas.
        slots: GPUs or CPU slots of this machine. None: on a CPU as many as there are ranks; on GPUs all that are visible.
        device: what a slot is; ``auto`` where that is not known yet, and then ``slots`` must be given.

    Raises:
        UserError: when the ranks do not fit, with the sum.
    """
    if train.engine not in TRAIN_ENGINES:
        raise UserError(f"train.strategy {train}: engine {train.engine} does not train; use {' or '.join(TRAIN_ENGINES)}, e.g. megatron:d1")
    if rollout.engine not in SERVER_ENGINES:
        raise UserError(f"rollout.strategy {rollout}: engine {rollout.engine} does not serve; use one of {', '.join(SERVER_ENGINES)}")
    needed = train.world_size + rollout.world_size
    assert slots is not None or device != "auto", "how many slots there are depends on the device"
    available = slots if slots is not None else (visible_gpus() if device == "cuda" else needed)
    if needed > available:
        raise UserError(
            f"strategies do not fit: train.strategy {train} takes {train.world_size} + rollout.strategy {rollout} takes "
            f"{rollout.world_size} = {needed} {UNITS[device]}, but {'there are' if slots is None else 'launch.slots is'} {available}; "
            f"{_remedy(train, rollout, available, slots is not None)}"
        )
    owned: dict[tuple[PlacedRole, int], tuple[int, ...]] = {("train", rank): (rank,) for rank in range(train.world_size)}
    for replica in range(rollout.dp):
        first = train.world_size + replica * rollout.replica_size
        owned["server", replica] = tuple(range(first, first + rollout.replica_size))
    return Placement(owned)


def _remedy(train: ParallelStrategy, rollout: ParallelStrategy, available: int, slots_given: bool) -> str:
    """The strategies that would fit, keeping the replicas' shape where possible."""
    replicas = (available - train.world_size) // rollout.replica_size
    if replicas >= 1:
        return f"rollout with d{replicas} fits"
    for dp in range((available - rollout.replica_size) // train.replica_size, 0, -1):
        if (train.tp * train.cp * dp) % (train.ep * train.etp) == 0:
            return f"train with d{dp} and rollout with d1 fit"
    least = train.replica_size + rollout.replica_size
    return f"one replica of each takes {train.replica_size} + {rollout.replica_size} = {least}" + (
        ": raise launch.slots or shrink t, p, c" if slots_given else ": shrink t, p, c"
    )


def visible_gpus() -> int:
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()
