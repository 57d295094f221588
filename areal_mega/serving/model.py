"""The forward pass, over the flat tokens of one step. Inference only; the arithmetic of transformers' models of the same families."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_mega.serving.arch import rope_frequencies
from areal_mega.serving.attention import StepAttention
from areal_mega.serving.weights import Layer, Weights


class Model:
    """A model with its rotary tables. ``max_length`` bounds positions."""

    def __init__(self, weights: Weights, max_length: int) -> None:
        self.weights, self.arch = weights, weights.arch
        angles = torch.arange(max_length, dtype=torch.float32)[:, None] * rope_frequencies(self.arch)[None]
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], -1).to(weights.dtype).unsqueeze(1)
        # Half-turned pairs by one roll: the sign of rotate_half sits in the table.
        self._sin = torch.cat([-sin, sin], -1).to(weights.dtype).unsqueeze(1)

    def forward(self, tokens_t: Tensor, attention: StepAttention) -> Tensor:
        """Hidden states [t, hidden] after the final norm; experts chosen go to the cache where it keeps them."""
        arch, positions = self.arch, attention.positions_t
        x = self.weights.embedding[tokens_t]
        cos, sin = self._cos[positions], self._sin[positions]
        routed: list[Tensor] = []
        for index, layer in enumerate(self.weights.layers):
            h = F.rms_norm(x, (arch.hidden,), layer.input_norm, arch.eps)
            x = x + F.linear(self._attend(index, layer, h, cos, sin, attention), layer.o, layer.o_bias)
            h = F.rms_norm(x, (arch.hidden,), layer.post_norm, arch.eps)
            if layer.router is None:
                x = x + self._dense(layer, h)
            else:
                out, experts = self._sparse(layer, h)
                x = x + out
                routed.append(experts)
        if attention.cache.routed is not None and routed:
            self._keep_routed(attention, routed)
        return F.rms_norm(x, (arch.hidden,), self.weights.final_norm, arch.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab]."""
        return F.linear(hidden, self.weights.head).float()

    def _attend(self, index: int, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        arch = self.arch
        rotated = arch.heads + arch.kv_heads
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(len(h), rotated + arch.kv_heads, arch.head_dim)
        qk = qkv[:, :rotated]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (arch.head_dim,), None, arch.eps) * layer.qk_norm
        qk = torch.addcmul(qk * cos, torch.roll(qk, arch.head_dim // 2, -1), sin)
        return attention(index, qk[:, : arch.heads], qk[:, arch.heads :], qkv[:, rotated:])

    def _dense(self, layer: Layer, h: Tensor) -> Tensor:
        gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _sparse(self, layer: Layer, h_th: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens sorted by expert, one grouped product per projection. Returns (output [t, h], experts [t, k])."""
        experts = self.arch.experts
        assert experts is not None and layer.router is not None
        k = experts.top_k
        probabilities = torch.softmax(F.linear(h_th, layer.router), -1, dtype=torch.float32)
        weight_tk, chosen_tk = torch.topk(probabilities, k, -1)
        if experts.normalise:
            weight_tk = weight_tk / weight_tk.sum(-1, keepdim=True)
        flat = chosen_tk.flatten()
        order = torch.argsort(flat)
        token = order // k
        ends = torch.bincount(flat, minlength=experts.count).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(h_th[token], layer.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate).mul_(up), layer.down.transpose(1, 2), offs=ends)
        out = out * weight_tk.flatten()[order].to(out.dtype).unsqueeze(1)
        # Summed per token in the order of its k experts, whoever else is in the batch: back to [t, k, h] first.
        placed = torch.empty_like(out)
        placed[order] = out
        return placed.view(len(h_th), k, -1).sum(1), chosen_tk

    def _keep_routed(self, attention: StepAttention, routed: list[Tensor]) -> None:
        sparse = [i for i in range(self.arch.layers) if self.arch.is_sparse(i)]
        stacked = torch.stack(routed, 1).to(torch.int32)
        kept = attention.cache.routed
        assert kept is not None
        if len(sparse) == self.arch.layers:
            kept[attention.rows_t, attention.positions_t] = stacked
        else:
            for slot, layer in enumerate(sparse):
                kept[attention.rows_t, attention.positions_t, layer] = stacked[:, slot]
