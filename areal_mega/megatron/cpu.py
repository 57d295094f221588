"""Megatron-Core on a CPU: its hard-coded CUDA calls, redirected while a model lives and put back afterwards.

Nothing here changes what is computed. Written against Megatron-Core 0.19.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

_MISSING = object()
_CPU = torch.device("cpu")
_active = 0
_stack = ExitStack()


@contextmanager
def redirections() -> Iterator[None]:
    """Redirect while inside; nested entries are counted, the outermost exit puts everything back."""
    global _active
    if _active == 0:
        _enter(_stack)
    _active += 1
    try:
        yield
    finally:
        _active -= 1
        if _active == 0:
            _stack.close()


def _enter(stack: ExitStack) -> None:
    # Imported first, so that the scan for modules below meets everything that a training step uses.
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.tensor_parallel.random
    import megatron.core.transformer.attention
    import megatron.core.transformer.moe.token_dispatcher
    import megatron.core.transformer.multi_latent_attention  # noqa: F401

    # Megatron-Core wraps small functions in torch.compile; compiling them costs minutes here and gains nothing. Before anything is
    # redirected: this loads the compiler, which lists torch's functions and refuses to find one under two names.
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    _redirect_devices(stack)
    _redirect_random(stack)
    _redirect_streams(stack)
    _redirect_keywords(stack)
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    moe_utils = sys.modules["megatron.core.transformer.moe.moe_utils"]
    for module in (dispatcher, moe_utils):
        _replace(stack, module, "maybe_move_tensor_to_cpu", _to_host)
    from areal_mega.megatron import alone, kernels, uneven
    from areal_mega.megatron.rotary import apply_rotary

    mappings = sys.modules["megatron.core.tensor_parallel.mappings"]
    _replace(stack, mappings, "_gather_along_first_dim", uneven.gather(vars(mappings)["_gather_along_first_dim"]))
    _replace(stack, mappings, "_reduce_scatter_along_first_dim", uneven.reduce_scatter(vars(mappings)["_reduce_scatter_along_first_dim"]))

    buffers = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
    for owner, name, leave_out in (
        (buffers, "dist_all_gather_func", alone.collective),
        (buffers, "dist_reduce_scatter_func", alone.collective),
        (dispatcher, "sort_chunks_by_idxs", alone.sort_chunks),
    ):
        _replace(stack, owner, name, leave_out(vars(owner)[name]))

    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    _replace(stack, layers, "fused_weight_gradient_mlp_cuda", kernels.WeightGradients("weight_gradients"))
    _replace(stack, layers, "_grad_accum_fusion_available", True)
    _replace(stack, layers, "F", kernels.Functional("functional"))
    _replace(stack, sys.modules["megatron.core.transformer.mlp"], "bias_swiglu_impl", kernels.bias_swiglu)
    for name in ("attention", "multi_latent_attention"):
        _replace(stack, sys.modules[f"megatron.core.transformer.{name}"], "apply_rotary_pos_emb", apply_rotary)


def _redirect_devices(stack: ExitStack) -> None:
    _replace(stack, torch.cuda, "current_device", lambda: _CPU)
    for name in ("synchronize", "set_device", "empty_cache"):
        _replace(stack, torch.cuda, name, _nothing)
    _replace(stack, torch.cuda, "is_current_stream_capturing", lambda: False)
    _replace(stack, torch.Tensor, "cuda", _itself)
    _replace(stack, torch.nn.Module, "cuda", _itself)
    # The optimizers of Megatron-Core accept parameters by the *name* of their CUDA tensor type.
    plain = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = plain(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    _replace(stack, torch.Tensor, "type", type_name)


def _redirect_random(stack: ExitStack) -> None:
    """One generator, the CPU's, stands for the CPU's and the GPU's."""
    tracker = sys.modules["megatron.core.tensor_parallel.random"]

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    for module in (torch.cuda, torch.cuda.random):
        _replace(stack, module, "get_rng_state", get_state)
        _replace(stack, module, "set_rng_state", set_state)
        _replace(stack, module, "manual_seed", torch.manual_seed)
    _replace(stack, tracker, "_get_cuda_rng_state", get_state)
    _replace(stack, tracker, "_set_cuda_rng_state", set_state)


class _Stream:
    """Stands for CUDA's streams and events: everything is in order already. All streams are the same one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _redirect_streams(stack: ExitStack) -> None:
    for name in ("Stream", "Event"):
        _replace(stack, torch.cuda, name, _Stream)
    for name in ("current_stream", "default_stream"):
        _replace(stack, torch.cuda, name, _Stream)
    _replace(stack, torch.cuda, "stream", lambda stream: nullcontext())


class _TorchOfMegatron(ModuleType):
    """What Megatron-Core's modules see as ``torch``: factories that take ``device="cuda"`` for the CPU, and no pinned memory.

    Only those modules pay for the detour; a global function mode would slow down every call of the process.
    """

    FACTORIES: tuple[str, ...] = (
        *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "ones", "ones_like", "rand", "randint", "randn"),
        *("tensor", "zeros", "zeros_like"),
    )

    def __init__(self) -> None:
        super().__init__("torch")
        for name in self.FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)
        return value


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _redirect_keywords(stack: ExitStack) -> None:
    stand_in = _TorchOfMegatron()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            _replace(stack, module, "torch", stand_in)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """gloo's all_to_all takes numbers for split sizes, not tensors; Megatron-Core converts them on GPUs only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _itself(this: Any, *args: Any, **kwargs: Any) -> Any:
    return this


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    previous = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if previous is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, previous)
