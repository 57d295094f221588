"""The optimizer's state by parameter: full-precision weights and Adam's moments, whatever optimizer class of Megatron-Core holds them.

Megatron-Core spreads them in three ways: over data-parallel ranks as ranges of each flattened parameter (distributed optimizer); as whole
master copies beside bf16 parameters; or on the fp32 parameters themselves. Here a parameter has, on each rank, a range of its flattened
self (perhaps none), and the group over which the ranges make up the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class ParamState:
    """One parameter on one rank.

    Args:
        main: fp32 weights of ``[start, end)`` of the flattened parameter; what the optimizer updates. None where this rank has none.
        slot: the optimizer's own state of ``main`` (empty before its first step).
        group: ranks whose ranges make up the parameter; None: this rank has all of it.
    """

    param: Tensor
    main: Tensor | None
    slot: dict[str, Any]
    start: int
    end: int
    group: dist.ProcessGroup | None

    def local(self, kind: str) -> Tensor:
        """This rank's range of ``kind``, flat and fp32, on the parameter's device; a moment is zero before the first step."""
        if self.main is None:
            return torch.zeros(0, device=self.param.device)
        if kind == "weights":
            return self.main.detach().float().reshape(-1)
        moment = self.slot.get(kind)
        return torch.zeros(self.end - self.start, device=self.param.device) if moment is None else moment.detach().float().reshape(-1)

    def whole(self, kind: str, dst: int) -> Tensor | None:
        """All of ``kind`` in the parameter's shape on global rank ``dst``, None elsewhere. Collective over ``group``.

        May be the optimizer's own memory.
        """
        if self.group is None or dist.get_world_size(self.group) == 1:
            return self.local(kind).reshape(self.param.shape)
        # Zeros and one rank's values add up exactly.
        flat = torch.zeros(self.param.numel(), device=self.param.device)
        flat[self.start : self.end] = self.local(kind)
        dist.reduce(flat, dst=dst, group=self.group)
        return flat.reshape(self.param.shape) if dist.get_rank() == dst else None

    @torch.no_grad()
    def fill(self, kind: str, whole: Tensor) -> None:
        """Take this rank's range of ``kind`` from the whole parameter."""
        if self.main is None:
            return
        values = whole.reshape(-1)[self.start : self.end].to(torch.float32)
        if kind == "weights":
            self.main.copy_(values.reshape(self.main.shape))
        else:
            self.slot[kind] = values.to(self.main.device).reshape(self.main.shape).clone()


def param_states(megatron: Any) -> Iterator[ParamState]:
    """Every parameter that a Megatron-Core optimizer (chained or not) updates."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for part in getattr(megatron, "chained_optimizers", [megatron]):
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            yield from _ranges(part)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            yield from (_plain(param, main, part) for params, mains in pairs for param, main in zip(params, mains, strict=True))
            yield from (_plain(param, param, part) for params in part.fp32_from_fp32_groups for param in params)
        else:
            assert isinstance(part, FP32Optimizer), f"an optimizer of another kind: {type(part).__name__}"
            yield from (_plain(param, param, part) for group in part.param_groups for param in group["params"])


def _ranges(part: Any) -> Iterator[ParamState]:
    """A distributed optimizer's parameters: all of its buffers' own, of which this rank has ranges."""
    for buffer in part.buffers:
        for param in buffer.params:
            place = part.model_param_group_index_map.get(param)
            if place is None:
                yield ParamState(param, None, {}, 0, 0, part.data_parallel_group)
                continue
            main = part.optimizer.param_groups[place[0]]["params"][place[1]]
            bounds = part._get_model_param_range_map(param)["param"]
            yield ParamState(param, main, part.optimizer.state[main], bounds.start, bounds.end, part.data_parallel_group)


def _plain(param: nn.Parameter, main: Tensor, part: Any) -> ParamState:
    return ParamState(param, main, part.optimizer.state[main], 0, param.numel(), None)


def steps_taken(megatron: Any) -> int:
    """Updates that the optimizer has made. Some implementations count by parameter, others by parameter group."""
    counts = {0}
    for part in getattr(megatron, "chained_optimizers", [megatron]):
        if not part.is_stub_optimizer:
            counts |= {int(slot["step"]) for slot in part.optimizer.state.values() if "step" in slot}
            counts |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    return max(counts)


def set_steps(megatron: Any, steps: int) -> None:
    """Make the optimizer go on as after ``steps`` updates."""
    for part in getattr(megatron, "chained_optimizers", [megatron]):
        if part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            if type(part.optimizer).__module__.startswith("torch."):
                for param in group["params"]:
                    part.optimizer.state[param]["step"] = torch.tensor(float(steps), device=param.device if group.get("fused") else "cpu")
            else:
                group["step"] = steps
