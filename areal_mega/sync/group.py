"""The weight-sync communicator: an extra process group between trainer ranks and inference ranks.

Both sides meet at a TCP store that rank 0 hosts. The group's name prefixes every key, in the manner of SGLang's
``init_custom_process_group``, so that a real SGLang server can be the other side. It works whether or not ``torch.distributed`` has a
default group in this process: the new group is neither the default one nor a part of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from areal_mega.core.errors import DeadlineExceeded, UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, TCPStore

DEFAULT_NAME = "weight_update_group"
"""SGLang's own default name of the group."""


def host_store(address: str, timeout_s: float) -> TCPStore:
    """Listen at ``address`` on a port that the system chooses (``.port``): no other program can have taken it meanwhile."""
    import torch.distributed as dist

    return dist.TCPStore(address, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def create_group(
    *,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
    store: Store | None = None,
) -> ProcessGroup:
    """Join the group ``name`` of ``world_size`` ranks; blocks until all have come.

    Args:
        address, port: where rank 0 hosts the store; rank 0 must be able to listen there, or gives the ``store`` it hosts already.
        rank: 0 for the first sender, then the other senders, then inference ranks from their ``rank_offset``.
        backend: ``gloo`` or ``nccl``.
        timeout_s: deadline of the meeting, and of every collective on the group later.

    Raises:
        UserError: the arguments make no group, or a group of this name exists in this process.
        DeadlineExceeded: not all ranks came in time; says how many did.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not 0 <= rank < world_size:
        raise UserError(f"weight-sync group {name!r}: rank {rank} is not in 0..{world_size - 1} (world size {world_size})")
    if backend not in ("gloo", "nccl"):
        raise UserError(f"weight-sync group {name!r}: backend {backend!r} is unknown; use gloo or nccl")
    if name in c10d._world.pg_names.values():
        raise UserError(f"weight-sync group {name!r} exists already in this process; destroy it first or choose another name")
    timeout = timedelta(seconds=timeout_s)
    who = f"weight-sync group {name!r} at {address}:{port}: rank {rank} waited {timeout_s:g} s for {world_size} ranks"
    make: Any = c10d._new_process_group_helper  # the type of its group name differs between versions of torch
    try:
        if store is None:
            store, _, _ = next(c10d.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        group, _ = make(
            world_size,
            rank,
            [],  # as for a default group: membership comes from the store, not from the default group's ranks
            dist.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
    except dist.DistError as error:
        if "address already in use" in str(error).lower() or "EADDRINUSE" in str(error):
            raise UserError(f"weight-sync group {name!r}: {address}:{port} is in use; choose a free port") from error
        raise DeadlineExceeded(f"{who}: {_first_line(error)}") from error
    except RuntimeError as error:  # gloo reports a missing peer as a plain RuntimeError
        if "timeout" in str(error).lower() or "timed out" in str(error).lower() or "connect" in str(error).lower():
            raise DeadlineExceeded(f"{who}: {_first_line(error)}") from error
        raise
    # dist.broadcast(src=0, group=...) translates ranks through this table, which the helper fills for subgroups only.
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    assert isinstance(group, dist.ProcessGroup), "the helper returns a group to its members"
    return group


def destroy_group(group: ProcessGroup) -> None:
    """Leave the group and free its sockets. Every member calls this; none waits for another."""
    import torch.distributed as dist

    dist.destroy_process_group(group)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
