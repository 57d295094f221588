"""The forward pass, over the flat tokens of one step. Inference only; the arithmetic of transformers' models of the same families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_mega.serving.arch import rope_frequencies
from areal_mega.serving.attention import StepAttention
from areal_mega.serving.blocks import Angles, Gated, GroupedQuery, LatentAttention, Sparse, make_attention, make_mlp
from areal_mega.serving.linear import Linear
from areal_mega.serving.weights import Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    attention: GroupedQuery | LatentAttention
    mlp_norm: Tensor
    mlp: Gated | Sparse


class Model:
    """A model with its rotary tables. ``max_length`` bounds positions. Loaded weights are refreshed for it."""

    def __init__(self, weights: Weights, max_length: int) -> None:
        self.weights, self.arch = weights, weights.arch
        frequencies, factor = rope_frequencies(self.arch.rotary)
        angles = torch.arange(max_length, dtype=torch.float32)[:, None] * frequencies[None]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = torch.cat([cos, cos], -1).to(weights.dtype).unsqueeze(1)
        # Half-turned pairs by one roll: the sign of rotate_half sits in the table.
        self._sin = torch.cat([-sin, sin], -1).to(weights.dtype).unsqueeze(1)
        self._embedding = weights.need("embedding.word_embeddings.weight")
        self._final_norm = weights.need("decoder.final_layernorm.weight")
        self._head: Linear = weights.linear("embedding.word_embeddings" if self.arch.tied else "output_layer")
        self._layers = [
            _Layer(
                weights.need("input_layernorm.weight", layer),
                make_attention(weights, layer),
                weights.need("pre_mlp_layernorm.weight", layer),
                make_mlp(weights, layer),
            )
            for layer in range(self.arch.layers)
        ]
        weights.refresh()

    def forward(self, tokens_t: Tensor, attention: StepAttention) -> Tensor:
        """Hidden states [t, hidden] after the final norm; experts chosen go to the cache where it keeps them."""
        arch, ops, positions = self.arch, self.weights.ops, attention.positions_t
        x = self._embedding.index_select(0, tokens_t)
        angles = Angles(self._cos[positions], self._sin[positions])
        routed: list[Tensor] = []
        # Each sum x + delta is made by the norm that reads it.
        delta: Tensor | None = None
        for layer in self._layers:
            delta = layer.attention(ops.add_norm(x, delta, layer.input_norm, arch.eps), angles, attention)
            h = ops.add_norm(x, delta, layer.mlp_norm, arch.eps)
            if isinstance(layer.mlp, Sparse):
                delta, experts = layer.mlp(h)
                routed.append(experts)
            else:
                delta = layer.mlp(h)
        if attention.cache.routed is not None and routed:
            self._keep_routed(attention, routed)
        return ops.add_norm(x, delta, self._final_norm, arch.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab], in the model's dtype."""
        return self._head(hidden)

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
