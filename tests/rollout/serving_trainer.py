"""A trainer as small as one can be: rank 0 of a weight-sync group, and transformers as the judge of what servers answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_mega.rollout.inference import Generation, InferenceServer
from areal_mega.sync.group import create_group, destroy_group

_BUCKETS = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Trainer:
    """Rank 0 of a group of two. Before a recording (``live`` false) there is no group to be in, and only requests are made."""

    def __init__(self, client: InferenceServer, name: str, *, live: bool) -> None:
        self.client, self.name, self._live = client, name, live
        self._group: dist.ProcessGroup | None = None

    async def join(self) -> None:
        port = free_port()
        server = self.client.init_group(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=self.name, backend="gloo"
        )
        if not self._live:
            await server
            return
        where: dict[str, Any] = {"address": "127.0.0.1", "port": port, "rank": 0, "world_size": 2}
        mine = asyncio.to_thread(create_group, **where, name=self.name, backend="gloo", timeout_s=60)
        self._group, _ = await asyncio.gather(mine, server)

    async def leave(self) -> None:
        await self.client.destroy_group(self.name)
        if self._group is not None:
            destroy_group(self._group)
            self._group = None

    async def send(self, folder: Path, version: int, *, flush_cache: bool, flattened: bool = True) -> None:
        """A whole update: begin, several buckets, end."""
        items = list(load_file(folder / "model.safetensors").items())
        size = -(-len(items) // _BUCKETS)
        parts = [dict(items[i : i + size]) for i in range(0, len(items), size)]
        await self.client.begin_update()
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            update = self.client.update_bucket(
                names=list(part),
                dtypes=[str(t.dtype).removeprefix("torch.") for t in part.values()],
                shapes=[list(t.shape) for t in part.values()],
                group_name=self.name,
                version=version if last else None,
                flush_cache=last and flush_cache,
                flattened=flattened,
            )
            await asyncio.gather(update, asyncio.to_thread(self._broadcast, list(part.values()), flattened))
        await self.client.end_update()

    def _broadcast(self, tensors: Sequence[torch.Tensor], flattened: bool) -> None:
        if self._group is None:
            return
        if flattened:
            tensors = [torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])]
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), src=0, group=self._group)


@lru_cache(maxsize=4)
def _judge(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def judged(folder: Path, prompt: Sequence[int], generation: Generation, temperature: float = 1.0) -> tuple[torch.Tensor, list[int]]:
    """Log-probabilities [new tokens] that these weights give to what was generated, and their greedy choice at each position."""
    ids = torch.tensor([[*prompt, *generation.output_ids]])
    logits = _judge(folder)(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1), logits.argmax(-1).tolist()


@torch.no_grad()
def routed(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Experts [len(ids), layers, top_k] that each position is routed to, in ascending order."""
    model = _judge(folder)
    scores = model(torch.tensor([list(ids)]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(model.config.num_experts_per_tok, -1).indices.sort(-1).values for layer in scores], 1)
