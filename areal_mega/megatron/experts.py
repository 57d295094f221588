"""Experts in plain PyTorch: Megatron-Core's parameters and names, without its module calls per expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


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
        counts = tokens_per_expert.tolist()
        tokens = torch.split(permuted_local_hidden_states, counts)
        gated = []
        for expert, tokens_nh in zip(self.local_experts, tokens, strict=True):
            gate, up = F.linear(tokens_nh, expert.linear_fc1.weight).chunk(2, dim=-1)
            gated.append(F.silu(gate) * up)
        weighted = torch.cat(gated) * permuted_probs.unsqueeze(-1).to(gated[0].dtype)
        outputs = [
            F.linear(part, expert.linear_fc2.weight) for expert, part in zip(self.local_experts, torch.split(weighted, counts), strict=True)
        ]
        return torch.cat(outputs), None

    def _is_plain(self) -> bool:
        c = self.config
        return bool(c.gated_linear_unit) and c.activation_func is F.silu and not c.add_bias_linear and not c.moe_apply_probs_on_input
