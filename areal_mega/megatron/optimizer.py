"""AdamW with Megatron-Core's sharded state, and the learning rate as a pure function of the train step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from areal_mega.config.schema import OptimizerSection


def learning_rate(step: int, section: OptimizerSection, total_steps: int) -> float:
    """Learning rate of train step ``step`` (from 0): linear warm-up to ``lr``, then decay to ``min_lr`` over the remaining steps.

    The last step, ``total_steps - 1``, has ``min_lr`` where there is a decay. Steps beyond keep it.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    decay_steps = total_steps - 1 - section.warmup_steps
    progress = min(1.0, (step - section.warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
    remaining = 1.0 - progress if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr + (section.lr - section.min_lr) * remaining


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """``grad_norm`` is the global one before clipping; ``skipped`` means that it was not finite and no parameter changed."""

    grad_norm: float
    skipped: bool


class Optimizer:
    """One optimizer over all chunks of this rank's model."""

    def __init__(self, section: OptimizerSection, chunks: list[nn.Module], dtype: torch.dtype) -> None:
        config = OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.min_lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=section.distributed,
            log_num_zeros_in_grad=False,
        )
        self._weight_decay = section.weight_decay
        self.megatron: Any = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        for group in self.megatron.param_groups:
            if "fused" in group:  # torch's own AdamW, which Megatron-Core takes where neither Transformer Engine's nor apex's is installed
                group["fused"] = True

    def reload_parameters(self) -> None:
        """Take the parameters as they are now into the master copies. Call after a load."""
        self.megatron.reload_model_params()

    def step(self, lr: float) -> StepOutcome:
        """One clipped update with the gradients that backward has left. Collective over all ranks."""
        for group in self.megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._weight_decay * group.get("wd_mult", 1.0)
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            return StepOutcome(norm, skipped=True)
        self._clip(norm)
        assert self.megatron.step_with_ready_grads()
        return StepOutcome(norm, skipped=False)

    def _clip(self, norm: float) -> None:
        for optimizer in self.megatron.chained_optimizers:
            limit = optimizer.config.clip_grad
            if limit > 0 and norm > limit and not optimizer.is_stub_optimizer:
                # In place: Megatron-Core's own, without apex, writes a scaled copy of each gradient and copies it back.
                gradients = [p.grad for p in optimizer.get_parameters() if p.grad is not None]
                if gradients:  # a rank may own none of a small model's parameters
                    torch._foreach_mul_(gradients, limit / (norm + 1e-6))
