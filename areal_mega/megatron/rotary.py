"""Rotary embedding of packed sequences in one go: Megatron-Core's own PyTorch code loops over the sequences in Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_mega.megatron.kernels import rotate
from areal_mega.megatron.packing import zigzag_index

_cached: tuple[Any, Tensor, Tensor] | None = None
"""(what they were made from, cos, sin) of the last micro-batch: every layer asks for the same ones, twice."""


def apply_rotary(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup | None = None,
    mla_rotary_interleaved: bool = False,
) -> Tensor:
    """Stand-in for ``megatron.core...rope_utils.apply_rotary_pos_emb``; same arguments and result.

    Args:
        t: [T/cp, heads, dim] where ``cu_seqlens`` is given (packed), else [S, B, heads, dim].
        freqs: [max_seqlen, 1, 1, rotary_dim] angles.
    """
    from megatron.core.models.common.embeddings import rope_utils

    if cu_seqlens is None or config.rotary_interleaved:
        return rope_utils.apply_rotary_pos_emb(t, freqs, config, cu_seqlens, mscale, cp_group, mla_rotary_interleaved)
    if mla_rotary_interleaved:  # latent attention: neighbouring channels are a pair, and leave as halves
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    cos, sin = _cos_sin(freqs, cu_seqlens, mscale, cp_group, t.dtype)
    return rotate(t, cos, sin)


def _cos_sin(
    freqs: Tensor, cu_seqlens: Tensor, mscale: float, cp_group: torch.distributed.ProcessGroup | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[T/cp, 1, rotary_dim] each, for this rank's tokens."""
    global _cached
    if _cached is not None:
        made_from, cos, sin = _cached
        same = made_from[0].data_ptr() == freqs.data_ptr() and made_from[0].shape == freqs.shape
        if same and made_from[1] is cu_seqlens and made_from[2:] == (mscale, dtype):
            return cos, sin
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - starts
    positions_t = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - torch.repeat_interleave(starts, lengths)
    if cp_group is not None and cp_group.size() > 1:
        positions_t = positions_t[zigzag_index(cu_seqlens, cp_group.size(), cp_group.rank())]
    angles = freqs[:, 0].index_select(0, positions_t)
    cos, sin = (torch.cos(angles) * mscale).to(dtype), (torch.sin(angles) * mscale).to(dtype)
    _cached = ((freqs, cu_seqlens, mscale, dtype), cos, sin)
    return cos, sin
