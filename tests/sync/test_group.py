from __future__ import annotations

import socket
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.sync.group import create_group, destroy_group, host_store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sums_in_both_groups(rank: int, world_size: int) -> dict[str, object]:
    """Ranks 1 and 2 of the default group of three form a sync group in reverse order, twice, beside it."""
    out: dict[str, object] = {}
    for turn in range(2):
        store = host_store("127.0.0.1", 60) if rank == 2 else None
        ports = [0, 0, 0]
        dist.all_gather_object(ports, store.port if store else 0)
        if rank > 0:
            group = create_group(
                address="127.0.0.1",
                port=ports[2],
                rank=2 - rank,
                world_size=2,
                name=f"weights-{turn}",
                backend="gloo",
                timeout_s=60,
                store=store,
            )
            tensor = torch.arange(5.0) if rank == 2 else torch.zeros(5)
            dist.broadcast(tensor, src=0, group=group)
            out[f"received {turn}"] = tensor
        both = torch.tensor([float(rank)])
        dist.all_reduce(both)
        out["default"] = both
        if rank > 0:
            destroy_group(group)
    return out


def test_beside_a_default_group() -> None:
    results = run_ranks(3, sums_in_both_groups)
    for result in results:
        assert result["default"].tolist() == [3.0]
    for result in results[1:]:
        assert result["received 0"].tolist() == result["received 1"].tolist() == [0, 1, 2, 3, 4]


def pair_without_default(rank: int, world_size: int, *, port: int) -> dict[str, object]:
    assert not dist.is_initialized()
    group = create_group(address="127.0.0.1", port=port, rank=rank, world_size=2, name="w", backend="gloo", timeout_s=60)
    tensor = torch.full((3,), float(rank))
    dist.broadcast(tensor, src=0, group=group)
    with pytest.raises(UserError, match="exists already"):
        create_group(address="127.0.0.1", port=port, rank=rank, world_size=2, name="w", backend="gloo", timeout_s=60)
    destroy_group(group)
    return {"tensor": tensor}


def test_without_a_default_group() -> None:
    results = run_ranks(2, pair_without_default, distributed=False, port=free_port())
    assert [r["tensor"].tolist() for r in results] == [[0.0] * 3] * 2


def test_a_member_that_does_not_come_is_a_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="rank 0 waited 1 s for 2 ranks"):
        create_group(address="127.0.0.1", port=free_port(), rank=0, world_size=2, name="alone", backend="gloo", timeout_s=1)
    with pytest.raises(DeadlineExceeded, match="rank 1 waited 1 s for 2 ranks"):
        create_group(address="127.0.0.1", port=free_port(), rank=1, world_size=2, name="alone", backend="gloo", timeout_s=1)


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} is in use"):
            create_group(address="127.0.0.1", port=port, rank=0, world_size=2, name="taken", backend="gloo", timeout_s=2)


@pytest.mark.parametrize(("rank", "backend", "message"), [(2, "gloo", "rank 2 is not in 0..1"), (0, "mpi", "backend 'mpi' is unknown")])
def test_arguments_that_make_no_group(rank: int, backend: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_group(address="127.0.0.1", port=1, rank=rank, world_size=2, name="x", backend=backend, timeout_s=1)


def test_ranks_of_different_groups_never_meet() -> None:
    port, failures = free_port(), []

    def join(rank: int) -> None:
        try:
            create_group(address="127.0.0.1", port=port, rank=rank, world_size=2, name=f"t{rank}", backend="gloo", timeout_s=3)
        except DeadlineExceeded as error:
            failures.append(str(error))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 2
