"""All ranks of a layout in one process: local shards by name and shape from the table, and a transport that is a dictionary."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from tiny_models import shake_buffers, tiny_tokenizer
from torch import Tensor

from areal_mega.models.family import Family
from areal_mega.models.gather import HFGatherer
from areal_mega.models.hf_io import HFSource
from areal_mega.models.loading import load_hf_weights
from areal_mega.models.ownership import Ownership
from areal_mega.models.table import LOCAL, Naming, Table
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse


class _Done:
    def wait(self) -> None:
        return None


class Mailbox:
    """Buffers under way between ranks of one process, in order per pair."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], deque[Tensor]]) -> None:
        self._rank, self._boxes = rank, boxes

    def send(self, buffer: Tensor, to: int) -> _Done:
        self._boxes.setdefault((self._rank, to), deque()).append(buffer.clone())  # the sender may reuse it
        return _Done()

    def receive(self, buffer: Tensor, source: int) -> _Done:
        buffer.copy_(self._boxes[(source, self._rank)].popleft())
        return _Done()


def layout_of(text: str) -> RankLayout:
    return RankLayout(parse(text))


def empty_shards(
    table: Table, layout: RankLayout, rank: int, *, dtype: torch.dtype = torch.float32, naming: Naming = LOCAL
) -> dict[str, Tensor]:
    """What a built model of that rank would have, uninitialised."""
    out = {}
    for shard in Ownership(table, layout).shards(rank):
        island = torch.float32 if shard.param.fp32 else dtype
        out[naming.name(shard.param)] = torch.empty(shard.param.shard_shape(shard.size, shard.rank), dtype=island)
    return out


def load_all(family: Family, hf: Any, source: HFSource, layout: RankLayout, **how: Any) -> list[dict[str, Tensor]]:
    """The shards of every rank, loaded."""
    naming, ranks = how.get("naming", LOCAL), []
    for rank in range(layout.world_size):
        named = empty_shards(family.table(hf), layout, rank, **how)
        load_hf_weights(named, source, family, hf, layout, rank, naming=naming)
        ranks.append(named)
    return ranks


def gather_all(
    shards: list[dict[str, Tensor]],
    family: Family,
    hf: Any,
    layout: RankLayout,
    *,
    root: int = 0,
    dtype: torch.dtype | None = None,
    **how: Any,
) -> list[tuple[str, Tensor]]:
    """Every rank iterates its stream to the end, senders first; what the root got."""
    boxes: dict[tuple[int, int], deque[Tensor]] = {}
    gatherers = [
        HFGatherer(named, family, hf, layout, rank, root=root, transport=Mailbox(rank, boxes), **how) for rank, named in enumerate(shards)
    ]
    plans = {gatherer.plan_as(dtype) for gatherer in gatherers}
    assert len(plans) == 1, "all ranks have the same plan"
    for rank, gatherer in enumerate(gatherers):
        if rank != root:
            items = list(gatherer.stream(dtype))
            assert items == [None] * len(gatherer.plan), "senders see one None per tensor"
    received = [item for item in gatherers[root].stream(dtype) if item is not None]
    assert not any(boxes.values()), "nothing is left under way"
    specs = [(spec.name, spec.shape, spec.dtype) for spec in plans.pop()]
    assert specs == [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in received], "the plan is what was streamed"
    return received


def plain_config(config: Any) -> dict[str, Any]:
    """A transformers config as the plain content of its config.json."""
    return json.loads(config.to_json_string(use_diff=False))


def save_model(folder: Path, config: Any, seed: int = 0, **save: Any) -> Path:
    """A folder as transformers writes it, every parameter random (norms and biases too)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        shake_buffers(model)
    model.save_pretrained(folder, **save)
    tiny_tokenizer().save_pretrained(folder)
    return folder
