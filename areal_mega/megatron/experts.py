"""Experts in plain PyTorch: Megatron-Core's parameters and names, without its module calls per expert."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from areal_mega.megatron.kernels import gated_experts


class LocalExperts(SequentialMLP):
    """``SequentialMLP`` whose forward is two matrix products and one activation per expert.

    The token dispatcher has already moved every token to the rank (and, under expert tensor parallelism, to every shard) that computes
    it, so an expert needs no communication of its own.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens, hidden] sorted by local expert, [local experts], [tokens] -> ([tokens, hidden], None)."""
        if not self._is_plain():
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        experts = self.local_experts
        output = gated_experts(
            permuted_local_hidden_states,
            permuted_probs,
            tokens_per_expert.tolist(),
            [expert.linear_fc1.weight for expert in experts],
            [expert.linear_fc2.weight for expert in experts],
        )
        return output, None

    def _is_plain(self) -> bool:
        c = self.config
        return bool(c.gated_linear_unit) and c.activation_func is F.silu and not c.add_bias_linear and not c.moe_apply_probs_on_input
