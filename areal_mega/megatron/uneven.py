"""Collectives over shares of different sizes, which gloo lacks: expert tensor parallelism gathers what each rank was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[..., Tensor]


def gather(plain: Collective) -> Collective:
    """``_gather_along_first_dim`` of Megatron-Core, ``plain`` where shares are equal."""

    def gather_along_first_dim(t: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return plain(t, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = t.new_zeros(max(sizes), *t.shape[1:])
        padded[: len(t)] = t
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    return gather_along_first_dim


def reduce_scatter(plain: Collective) -> Collective:
    """``_reduce_scatter_along_first_dim`` of Megatron-Core, ``plain`` where shares are equal."""

    def reduce_scatter_along_first_dim(t: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return plain(t, group, input_split_sizes, use_global_buffer)
        total = t.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(n) for n in input_split_sizes])[group.rank()].clone()

    return reduce_scatter_along_first_dim
