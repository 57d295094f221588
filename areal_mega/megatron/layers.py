"""PyTorch layers behind Megatron-Core's backend protocol: norms that know sequence parallelism, and packed causal attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal_mega.megatron.kernels import rms_norm
from areal_mega.megatron.packing import unzigzag_index, zigzag_index


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467), statistics in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        _mark(self.weight, config)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm (arXiv:1607.06450)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        _mark(self.weight, config)
        _mark(self.bias, config)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(*, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> nn.Module:
    """The norm that ``config.normalization`` names."""
    assert not config.layernorm_zero_centered_gamma, "zero-centred norm weights are not built here"
    norms = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    return norms[str(config.normalization)](config, hidden_size, eps, **kwargs)


def _mark(parameter: nn.Parameter, config: TransformerConfig) -> None:
    # Under sequence parallelism each TP rank sees other tokens: Megatron-Core then sums these gradients over TP.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron-Core's description of a packed micro-batch, with the plan by which attention computes it.

    Sequences of similar length are computed together as a padded batch: causal attention never looks at padding behind a token.
    """

    gather_index: Tensor | None = None
    """Tokens of the padded batches, one batch after the other; None where the packed row is a batch already."""
    back_index: Tensor | None = None
    """[T]: where each token stands in the padded batches."""
    batches: tuple[tuple[int, int], ...] = ()
    """(sequences, padded length) of each batch."""
    context_slices: tuple[tuple[int, int], ...] = ()
    """(start, end) of each sequence, under context parallelism."""
    kv_index: Tensor | None = None
    """[T]: from context-parallel ranks' tokens, concatenated, to the packed order."""


def packed_layout(cu_seqlens: Tensor, max_seqlen: int, cp_size: int = 1, *, plan: bool = True) -> PackedLayout:
    """Describe one packed micro-batch to Megatron-Core and, with ``plan``, plan its attention.

    Args:
        cu_seqlens: [n + 1] int32, of whole sequences also under context parallelism.
    """
    common: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    if not plan:
        return PackedLayout(**common)
    bounds = cu_seqlens.tolist()
    spans = list(pairwise(bounds))
    if cp_size > 1:
        return PackedLayout(**common, context_slices=tuple(spans), kv_index=unzigzag_index(cu_seqlens, cp_size))
    lengths = [end - start for start, end in spans]
    if len(set(lengths)) == 1:
        return PackedLayout(**common, batches=((len(lengths), lengths[0]),))
    gather: list[Tensor] = []
    back_index = torch.empty(bounds[-1], dtype=torch.int64)
    batches, offset = [], 0
    for members in group_by_length(lengths):
        longest = lengths[members[0]]
        for row, member in enumerate(members):
            start, end = spans[member]
            # Padding repeats the sequence's last token: any token will do, nothing reads the result.
            gather.append(torch.arange(start, start + longest).clamp(max=end - 1))
            at = offset + row * longest
            back_index[start:end] = torch.arange(at, at + end - start)
        batches.append((len(members), longest))
        offset += len(members) * longest
    device = cu_seqlens.device
    return PackedLayout(**common, gather_index=torch.cat(gather).to(device), back_index=back_index.to(device), batches=tuple(batches))


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Group sequences so that none is shorter than half its group's longest. Each group lists indices, longest first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and 2 * lengths[i] >= lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class PackedAttention(nn.Module):
    """Causal attention over packed sequences in plain PyTorch, with grouped queries and context parallelism.

    Context parallelism gathers keys and values over the CP group; each rank computes its own queries (chunks r and 2·cp-1-r of each
    sequence).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), "attention dropout is not built here"
        assert config.window_size is None, "sliding windows are not built here"
        channels = k_channels or config.kv_channels
        assert channels is not None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """[T/cp, heads, dim], [T/cp, groups, dim] twice -> [T/cp, heads, dim]."""
        assert packed_seq_params is not None, "this attention takes packed sequences only"
        assert attention_mask is None, "packed attention is causal by its layout; a mask is not taken"
        assert attention_bias is None, "attention bias is not taken"
        # SDPA's fused CPU kernel wants as many key heads as query heads.
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        if self.cp_group.size() > 1:
            return self._context_parallel(query, key, value, packed_seq_params)
        return self._padded_batches(query, key, value, packed_seq_params)

    def _padded_batches(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        if layout.gather_index is not None:
            query, key, value = (t.index_select(0, layout.gather_index) for t in (query, key, value))
        outputs, start = [], 0
        for count, length in layout.batches:
            end = start + count * length
            q, k, v = (t[start:end].view(count, length, *t.shape[1:]).transpose(1, 2) for t in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            start = end
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return output if layout.back_index is None else output.index_select(0, layout.back_index)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        assert layout.kv_index is not None
        key, value = (
            gather_from_sequence_parallel_region(t, tensor_parallel_output_grad=True, group=self.cp_group).index_select(0, layout.kv_index)
            for t in (key, value)
        )
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        outputs = []
        for start, end in layout.context_slices:
            bounds = torch.tensor([0, end - start])
            positions_q = zigzag_index(bounds, cp_size, cp_rank).to(query.device)
            mask = positions_q[:, None] >= torch.arange(end - start, device=query.device)[None]
            q = query[start // cp_size : end // cp_size].transpose(0, 1)[None]
            k, v = (t[start:end].transpose(0, 1)[None] for t in (key, value))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.softmax_scale)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)
