"""Log-probabilities of given tokens from hidden states, with the vocabulary split over tensor-parallel ranks.

Logits exist for a bounded number of tokens at a time and for this rank's vocabulary rows alone; the backward pass computes them again,
unless they are few enough to keep. Ranks exchange three numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_mega.megatron.kernels import accumulate, on_cpu

CHUNK_BYTES = 64 * 1024**2
"""fp32 logits that exist at once."""
KEEP_BYTES = 256 * 1024**2
"""fp32 logits of a whole micro-batch that are kept for the backward pass: a matrix product less."""


def vocab_parallel_logprobs(
    hidden_th: Tensor,
    weight_vh: Tensor,
    targets_t: Tensor,
    *,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    chunk_bytes: int = CHUNK_BYTES,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of that distribution.

    Args:
        hidden_th: [T, hidden], the same tokens on every rank of ``group``. Its gradient is this rank's part only: sum it over the group.
        weight_vh: [rows, hidden], this rank's rows of the output layer, padding rows included.
        targets_t: [T] int64 in [0, vocab_size).
        temperature: of the sampled distribution; > 0.
        vocab_start: vocabulary number of the first row.
        vocab_size: of the model, without padding: padding rows take no part in the softmax.
        group: tensor-parallel group; None where the vocabulary is whole.

    Returns:
        log-probabilities [T] fp32 (differentiable) and entropies [T] fp32 in nats (without gradient).
    """
    assert temperature > 0, f"temperature {temperature} is not positive"
    rows = max(0, min(weight_vh.shape[0], vocab_size - vocab_start))
    size = 1 if group is None else group.size()
    chunk = max(1, chunk_bytes // (4 * max(1, weight_vh.shape[0])))
    keep = torch.is_grad_enabled() and 4 * hidden_th.shape[0] * weight_vh.shape[0] <= keep_bytes
    result: tuple[Tensor, Tensor] = _LogProbs.apply(
        hidden_th, weight_vh, rows, targets_t - vocab_start, temperature, group if size > 1 else None, chunk, keep
    )
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_th: Tensor,
        weight_vh: Tensor,
        rows: int,
        local_t: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_th, weight_vh, local_t)
        weight_vh, tokens, kept = weight_vh[:rows], hidden_th.shape[0], []
        logsumexp_t, logprob_t, entropy_t = (hidden_th.new_empty(tokens, dtype=torch.float32) for _ in range(3))
        for part in _parts(tokens, chunk):
            logits_tv = _logits(hidden_th[part], weight_vh, temperature)
            if logits_tv.shape[1]:
                highest_t = logits_tv.amax(dim=-1)
            else:  # a rank that holds nothing but padding rows
                highest_t = logits_tv.new_full(logits_tv.shape[:1], torch.finfo(torch.float32).min)
            if group is not None:
                dist.all_reduce(highest_t, op=dist.ReduceOp.MAX, group=group)
            here_t, inside_t = _inside(local_t[part], logits_tv.shape[1])
            target_t = _pick(logits_tv, here_t, inside_t)
            logits_tv -= highest_t[:, None]
            weights_tv = logits_tv.exp()
            # Sums over the vocabulary: of exp(z), of exp(z)·z, and of z at the target, z being relative to the highest logit.
            energy_t = torch.bmm(weights_tv.unsqueeze(1), logits_tv.unsqueeze(2))[:, 0, 0]
            sums_t3 = torch.stack([weights_tv.sum(-1), energy_t, target_t], dim=-1)
            if group is not None:
                dist.all_reduce(sums_t3, group=group)
            partition_t, energy_t, target_t = sums_t3.unbind(-1)
            log_partition_t = partition_t.log()
            logsumexp_t[part] = log_partition_t + highest_t
            logprob_t[part] = target_t - logsumexp_t[part]
            entropy_t[part] = log_partition_t - energy_t / partition_t
            if keep:
                kept.append((weights_tv, partition_t))
        ctx.kept, ctx.logsumexp_t, ctx.rows, ctx.temperature, ctx.chunk = kept, logsumexp_t, rows, temperature, chunk
        ctx.mark_non_differentiable(entropy_t)
        return logprob_t, entropy_t

    @staticmethod
    def backward(ctx: Any, grad_t: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_th, weight, local_t = ctx.saved_tensors
        weight_vh, factor_t = weight[: ctx.rows], grad_t / ctx.temperature
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_th = torch.empty_like(hidden_th) if need_hidden else None
        main_grad = getattr(weight, "main_grad", None) if on_cpu(weight) else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and main_grad is None else main_grad
        for number, part in enumerate(_parts(hidden_th.shape[0], ctx.chunk)):
            # d logprob / d z = onehot(target) - softmax(z)
            if ctx.kept:
                grad_tv, partition_t = ctx.kept[number]
                ctx.kept[number] = None  # its memory is the gradient's now
                grad_tv *= -(factor_t[part] / partition_t)[:, None]
            else:
                grad_tv = _logits(hidden_th[part], weight_vh, ctx.temperature).sub_(ctx.logsumexp_t[part, None]).exp_()
                grad_tv *= -factor_t[part, None]
            here_t, inside_t = _inside(local_t[part], grad_tv.shape[1])
            if grad_tv.shape[1]:
                grad_tv.scatter_add_(1, here_t[:, None], torch.where(inside_t, factor_t[part], 0.0)[:, None])
            grad_tv = grad_tv.to(hidden_th.dtype)
            if grad_hidden_th is not None:
                torch.matmul(grad_tv, weight_vh, out=grad_hidden_th[part])
            if need_weight:
                assert grad_weight is not None
                accumulate(grad_weight[: ctx.rows], grad_tv, hidden_th[part])
        returned = grad_weight.to(weight.dtype) if need_weight and main_grad is None and grad_weight is not None else None
        return grad_hidden_th, returned, None, None, None, None, None, None


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def _logits(hidden_th: Tensor, weight_vh: Tensor, temperature: float) -> Tensor:
    """[T, rows] fp32, a fresh tensor."""
    logits_tv = (hidden_th @ weight_vh.T).float()
    return logits_tv if temperature == 1.0 else logits_tv.div_(temperature)


def _inside(local_t: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row numbers made safe to index with, and whether they are this rank's."""
    inside_t = (local_t >= 0) & (local_t < rows)
    return torch.where(inside_t, local_t, 0), inside_t


def _pick(logits_tv: Tensor, here_t: Tensor, inside_t: Tensor) -> Tensor:
    if not logits_tv.shape[1]:
        return torch.zeros_like(inside_t, dtype=torch.float32)
    return torch.where(inside_t, logits_tv.gather(1, here_t[:, None])[:, 0], 0.0)
