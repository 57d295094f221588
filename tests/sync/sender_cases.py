"""Train ranks that send and inference ranks that receive, in processes of their own (see ``ranks``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal_mega.models.gather import HFGatherer
from areal_mega.models.hf_io import HFSource
from areal_mega.models.loading import load_hf_weights
from areal_mega.models.ownership import Ownership
from areal_mega.models.registry import family_for
from areal_mega.models.table import LOCAL
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse
from areal_mega.sync import memory
from areal_mega.sync.digest import tensor_digests
from areal_mega.sync.group import create_group, destroy_group
from areal_mega.sync.plan import WireSpec, elements, plan_buckets, total_order, with_fused
from areal_mega.sync.sender import WeightSender
from areal_mega.sync.shares import share_of, shares

TIMEOUT_S = 60.0


def sync(
    rank: int, world_size: int, *, folder: str, strategy: str, receivers: int, bucket_bytes: int, most: int, overlap: bool, elsewhere: int
) -> Any:
    """Ranks of the strategy send, the last ``receivers`` receive: everything, then what changed, then everything again.

    Args:
        most: senders of a stage; 0: rank 0 sends all.
        elsewhere: a rank that can map no other's memory.

    Returns of a receiver, for each of the three: digests of what it holds, and how many bytes came. Of a sender: its reports.
    """
    layout = RankLayout(parse(strategy))
    size = layout.world_size
    assert world_size == size + receivers
    train: Any = dist.new_group(list(range(size)))
    hf = json.loads((Path(folder) / "config.json").read_text())
    family = family_for(hf)
    sender, named = None, {}
    if rank < size:
        named = shards(rank, layout, family, hf, folder)
        share = share_of(rank, shares(Ownership(family.table(hf), layout), most)) if most else None
        gatherer = HFGatherer(named, family, hf, layout, rank, train, share=share, parcel_bytes=bucket_bytes * 2 // 3)
        if rank == elsewhere:
            memory._open = lambda letter, nbytes: None  # as on another machine
        sender = WeightSender(gatherer, dtype="bfloat16", bucket_bytes=bucket_bytes, device=torch.device("cpu"), overlap=overlap)
    plans = shared([(s.name, s.shape, s.dtype) for s in sender.specs] if sender and sender.sends else [], world_size)
    senders = {number: [WireSpec(n, tuple(s), d) for n, s, d in plan] for number, plan in enumerate(plans) if plan}
    groups = {number: form(rank, number, size, receivers, sender) for number in senders}
    held: dict[str, torch.Tensor] = {}
    out = []
    for version in range(3):
        if version == 1:
            for name, tensor in named.items():
                if "layers.1." in name:
                    tensor.mul_(2)
        base = None if version == 2 else version - 1  # as after a server was started again
        mine = sender.changed(version, base) if sender else []
        only = None
        if None not in (answers := shared(mine, world_size)):
            only = with_fused({name for names in answers for name in names}, [s for specs in senders.values() for s in specs])
        if sender:
            # Nothing is filled ahead, what is sent then, or something else.
            if version:
                sender.fill(version if version == 1 else 9, only, digests="xxh3")
            report = sender.broadcast(version, TIMEOUT_S, only, digests="xxh3")
            out.append(None if report is None else {"digests": report.digests, "nbytes": report.nbytes, "saved": report.saved_bytes})
        else:
            nbytes = receive(senders, groups, only, bucket_bytes, held)
            out.append({"digests": tensor_digests(held, "xxh3"), "nbytes": nbytes})
    for group in groups.values():
        if group is not None and sender is None:
            destroy_group(group)
    if sender:
        sender.leave()
    return {
        "common": sender._filling.in_common if sender and sender.specs else None,
        "syncs": out,
        "weights": dict(held),
        "buckets": sum(len(plan_buckets(s, bucket_bytes)) for s in senders.values()),
    }


def shards(rank: int, layout: RankLayout, family: Any, hf: Any, folder: str) -> dict[str, torch.Tensor]:
    """What the model of that rank holds, loaded."""
    named = {}
    for shard in Ownership(family.table(hf), layout).shards(rank):
        dtype = torch.float32 if shard.param.fp32 else torch.bfloat16
        named[LOCAL.name(shard.param)] = torch.empty(shard.param.shard_shape(shard.size, shard.rank), dtype=dtype)
    with HFSource(folder) as source:
        load_hf_weights(named, source, family, hf, layout, rank)
    return named


def shared(value: Any, world_size: int) -> list[Any]:
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def form(rank: int, number: int, size: int, receivers: int, sender: WeightSender | None) -> Any:
    """The group of sender ``number``; None on ranks that are not in it."""
    port = shared(sender.host("127.0.0.1", TIMEOUT_S) if sender and rank == number else 0, size + receivers)[number]
    how: dict[str, Any] = {"address": "127.0.0.1", "port": port, "world_size": 1 + receivers, "name": f"w{number}", "backend": "gloo"}
    if sender and rank == number:
        sender.join(**how, timeout_s=TIMEOUT_S)
        return sender.group
    return create_group(rank=1 + rank - size, **how, timeout_s=TIMEOUT_S) if rank >= size else None


def receive(senders: Any, groups: Any, only: Any, bucket_bytes: int, held: dict[str, torch.Tensor]) -> int:
    """All buckets, in the total order."""
    numbers = list(senders)
    plans = [plan_buckets((s for s in senders[n] if only is None or s.name in only), bucket_bytes) for n in numbers]
    nbytes = 0
    for sender, bucket in total_order(plans):
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=groups[numbers[sender]])
        nbytes += bucket.nbytes
        parts = flat.view(getattr(torch, bucket.dtype)).split([elements(shape) for shape in bucket.shapes])
        held |= {n: p.view(s).clone() for n, p, s in zip(bucket.names, parts, bucket.shapes, strict=True)}
    return nbytes
