"""The only place that knows CUDA from CPU.

On GPUs: NCCL, Transformer Engine's layers and the fused kernels that are installed. On a CPU: gloo, PyTorch layers, and Megatron-Core's
hard-coded CUDA calls redirected while a model lives (see ``cpu``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from areal_mega.core.errors import UserError


@dataclass(frozen=True)
class Platform:
    """One kind of device and what is installed for it. ``device`` is this process's own."""

    device: torch.device
    backend: Literal["gloo", "nccl"]
    transformer_engine: bool = False
    """Transformer Engine's layers replace the PyTorch ones."""
    fused_weight_gradients: bool = False
    """A weight-gradient kernel that accumulates into the fp32 gradient buffer: NVIDIA apex's where it is installed; on a CPU, ours."""

    capability: tuple[int, int] = (0, 0)
    """Compute capability of the GPU; (0, 0) on a CPU."""

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def init_process_group(self, *, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        """Form the default process group of the train ranks."""
        if not self.is_cpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            # No device_id: torch would then try to split the weight-sync group, which has other members, off this one.
        )

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Enter around the first import of Megatron-Core.

        It has its fused functions compiled by Inductor as it is imported. Nothing here uses them on a CPU, where loading Inductor
        doubles the time to start and compiling would need a C++ compiler: they stay plain functions there.
        """
        compile_ = torch.compile
        if self.is_cpu:
            torch.compile = _as_it_is  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compile = compile_

    def activate(self) -> AbstractContextManager[None]:
        """Enter while a Megatron model lives; may be nested. On GPUs there is nothing to redirect."""
        if not self.is_cpu:
            return nullcontext()
        from areal_mega.megatron.cpu import redirections

        return redirections()


def detect(device: Literal["auto", "cpu", "cuda"] = "auto", local_rank: int = 0) -> Platform:
    """The platform of this process.

    Args:
        device: ``auto`` takes CUDA where a GPU is visible.
        local_rank: index among the GPUs visible to this process (0 where the launcher shows each process its own only).

    Raises:
        UserError: CUDA is asked for and no GPU is visible.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UserError(
            "launch.device is cuda, but torch sees no GPU here; set launch.device to auto or cpu, or check CUDA_VISIBLE_DEVICES"
        )
    if device == "cpu" or not has_gpu:
        return Platform(torch.device("cpu"), "gloo", fused_weight_gradients=True)
    return Platform(
        torch.device("cuda", local_rank),
        "nccl",
        transformer_engine=_installed("transformer_engine.pytorch"),
        fused_weight_gradients=_installed("fused_weight_gradient_mlp_cuda"),
        capability=torch.cuda.get_device_capability(local_rank),
    )


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """``torch.compile`` that does not compile, as a function and as a decorator with options."""
    return function if function is not None else lambda decorated: decorated


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
