"""Small functions of a training step with their gradients written out, for a CPU.

There each pass over memory and each fresh large tensor is paid for: autograd's own rules for a chunk, a slice or a concatenation write
whole tensors of zeros, and the sum of a weight's gradients over micro-batches would be a product, a temporary and an addition. None of
them changes what is computed beyond rounding.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def add_weight_gradient(weight: Tensor, grad_to: Tensor, input_ti: Tensor) -> Tensor | None:
    """The gradient [outputs, inputs] of a linear layer's weight: ``grad_to.T @ input_ti``.

    Added in place to the fp32 buffer that sums micro-batches where the weight has one, and then None. On GPUs it is returned: reduction
    that overlaps the backward pass waits for autograd to deliver it.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not on_cpu(weight):
        return grad_to.T @ input_ti
    accumulate(main_grad, grad_to, input_ti)
    return None


def accumulate(main_grad_oi: Tensor, grad_to: Tensor, input_ti: Tensor) -> None:
    if grad_to.dtype == main_grad_oi.dtype:
        main_grad_oi.addmm_(grad_to.T, input_ti)
    else:
        main_grad_oi += grad_to.T @ input_ti


def on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class WeightGradients(ModuleType):
    """What Megatron-Core's linear layers take for NVIDIA apex's kernel, which accumulates into the fp32 gradient buffer."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_ti: Tensor, grad_to: Tensor, main_grad_oi: Tensor) -> None:
        accumulate(main_grad_oi, grad_to, input_ti)


class Functional(ModuleType):
    """What Megatron-Core's layers see as ``torch.nn.functional``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def embedding(ids: Tensor, weight_vh: Tensor) -> Tensor:
        out: Tensor = _Embedding.apply(ids, weight_vh)
        return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_vh: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight_vh)
        return F.embedding(ids, weight_vh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        ids, weight_vh = ctx.saved_tensors
        main_grad = getattr(weight_vh, "main_grad", None)
        target = torch.zeros_like(weight_vh) if main_grad is None else main_grad
        target.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(target.dtype))
        return None, target if main_grad is None else None


# --- norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), computed in fp32, in the dtype of ``x``."""
    out: Tensor = _RMSNorm.apply(x, weight, eps) if on_cpu(x) else F.rms_norm(x, weight.shape, weight, eps)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.float()
        scale = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad.float(), x.float() * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(dim=0)
        along = product @ weight.float()
        # d/dx of x/rms: what of the gradient lies along x changes the length alone, which the norm takes out again.
        grad_x = torch.mul(grad, weight, out=product).addcmul_(normed, along.unsqueeze(-1), value=-1 / x.shape[-1]).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


# --- rotary embedding


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + half) of the first ``cos.shape[-1]`` channels of ``t``; the others pass.

    Args:
        t: [T, heads, dim].
        cos, sin: [T, 1, rotary_dim], equal in both halves.
    """
    out: Tensor = _Rotate.apply(t, cos, sin)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(t, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(t: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    first, second = t[..., :half], t[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=direction)
    if t.shape[-1] > 2 * half:
        out[..., 2 * half :] = t[..., 2 * half :]
    return out


# --- gated activation and experts


def bias_swiglu(x: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Tensor:
    """``silu(gate) * up`` of [..., 2n] (gate, then up). Stand-in for Megatron-Core's ``bias_swiglu_impl``; same arguments."""
    assert not fp8_input_store and not cpu_offload_input, "not on a CPU"
    out: Tensor = _SwiGLU.apply(x if bias is None else x + bias)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gated(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _gated_backward(x, grad)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _gated_backward(x: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty_like(x)
    (gate, up), (grad_gate, grad_up) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return out


def gated_experts(
    tokens_nh: Tensor, probs_n: Tensor, counts: list[int], up_weights: list[nn.Parameter], down_weights: list[nn.Parameter]
) -> Tensor:
    """A gated MLP per expert over tokens sorted by expert, each result times its probability.

    Args:
        tokens_nh: [N, hidden], ``counts[e]`` of them for expert e, in order.
        probs_n: [N].
        up_weights: per expert [2·width, hidden] (gate, then up).
        down_weights: per expert [hidden, width].

    Returns:
        [N, hidden].
    """
    out: Tensor = _Experts.apply(tokens_nh, probs_n, counts, *up_weights, *down_weights)
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_nh: Tensor, probs_n: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        up_weights, down_weights = weights[: len(counts)], weights[len(counts) :]
        inner = tokens_nh.new_empty(len(tokens_nh), up_weights[0].shape[0])
        for part, weight in zip(_parts(counts), up_weights, strict=True):
            torch.mm(tokens_nh[part], weight.T, out=inner[part])
        gated = _gated(inner)
        weighted = gated * probs_n.unsqueeze(-1).to(gated.dtype)
        out = torch.empty_like(tokens_nh)
        for part, weight in zip(_parts(counts), down_weights, strict=True):
            torch.mm(weighted[part], weight.T, out=out[part])
        ctx.save_for_backward(tokens_nh, probs_n, inner, gated, weighted, *weights)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, grad_nh: Tensor) -> tuple[Tensor | None, ...]:
        tokens_nh, probs_n, inner, gated, weighted, *weights = ctx.saved_tensors
        counts = ctx.counts
        up_weights, down_weights = weights[: len(counts)], weights[len(counts) :]
        grad_weighted = torch.empty_like(weighted)
        grad_up: list[Tensor | None] = []
        grad_down: list[Tensor | None] = []
        for part, weight in zip(_parts(counts), down_weights, strict=True):
            torch.mm(grad_nh[part], weight, out=grad_weighted[part])
            grad_down.append(add_weight_gradient(weight, grad_nh[part], weighted[part]))
        grad_probs = (grad_weighted * gated).sum(dim=-1).to(probs_n.dtype)
        grad_inner = _gated_backward(inner, grad_weighted.mul_(probs_n.unsqueeze(-1)))
        grad_tokens = torch.empty_like(tokens_nh)
        for part, weight in zip(_parts(counts), up_weights, strict=True):
            torch.mm(grad_inner[part], weight, out=grad_tokens[part])
            grad_up.append(add_weight_gradient(weight, grad_inner[part], tokens_nh[part]))
        return grad_tokens, grad_probs, None, *grad_up, *grad_down


def _parts(counts: list[int]) -> list[slice]:
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
