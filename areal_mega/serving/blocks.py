"""Parts of a layer: attention with grouped queries or latent, dense and sparse MLPs. The arithmetic of transformers' models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_mega.serving.arch import Experts
from areal_mega.serving.attention import StepAttention
from areal_mega.serving.linear import Linear
from areal_mega.serving.ops import Kernels
from areal_mega.serving.weights import Weights

_LATENT_EPS = 1e-6
"""Of the norms inside latent attention, whatever config.json says of the others: transformers builds them with its default."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of a step's positions, [t, 1, rotary dim]; the sign of the rotation sits in ``sin``."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x_thd: Tensor) -> Tensor:
        """Rotate pairs (i, i + dim / 2) of the last dimension."""
        return torch.addcmul(x_thd * self.cos, torch.roll(x_thd, x_thd.shape[-1] // 2, -1), self.sin)


class GroupedQuery:
    """Attention of the Llama kind, with optional biases, norms per head, and rotation of a part of each head."""

    def __init__(self, weights: Weights, layer: int) -> None:
        self._arch, self._layer, self._ops = weights.arch, layer, weights.ops
        self._qkv = weights.linear("self_attention.linear_qkv", layer)
        self._out = weights.linear("self_attention.linear_proj", layer)
        self._norm: Tensor | None = None
        q, k = (weights.get(f"self_attention.{n}_layernorm.weight", layer) for n in "qk")
        if q is not None and k is not None:
            self._q_norm, self._k_norm = q, k
            for n in "qk":
                weights.derive(self._join_norms, f"self_attention.{n}_layernorm.weight", layer)

    def _join_norms(self) -> None:
        """[heads + kv_heads, head_dim]: the query's weight for every head, then the key's, so that one norm serves both."""
        self._norm = torch.cat([self._q_norm.expand(self._arch.heads, -1), self._k_norm.expand(self._arch.kv_heads, -1)])

    def __call__(self, h: Tensor, angles: Angles, attention: StepAttention) -> Tensor:
        arch = self._arch
        if isinstance(self._ops, Kernels):
            return self._out(attention.attend(self._layer, self._place(self._ops, self._qkv(h), angles, attention)))
        rotated = arch.heads + arch.kv_heads
        qkv = self._qkv(h).view(len(h), rotated + arch.kv_heads, arch.key_dim)
        qk = qkv[:, :rotated]
        if self._norm is not None:
            qk = F.rms_norm(qk, (arch.key_dim,), None, arch.eps) * self._norm
        if arch.rotary.dim == arch.key_dim:
            qk = angles.rotate(qk)
        else:
            qk = torch.cat([angles.rotate(qk[..., : arch.rotary.dim]), qk[..., arch.rotary.dim :]], -1)
        return self._out(attention(self._layer, qk[:, : arch.heads], qk[:, arch.heads :], qkv[:, rotated:]))

    def _place(self, kernels: Kernels, qkv: Tensor, angles: Angles, attention: StepAttention) -> Tensor:
        keys, values = attention.cache.keys[self._layer], attention.cache.values[self._layer]
        slots = {"positions": attention.positions_t, "rows": attention.rows_t, "keys": keys, "values": values}
        return kernels.place(qkv, heads=self._arch.heads, norm=self._norm, eps=self._arch.eps, cos=angles.cos, sin=angles.sin, **slots)


class LatentAttention:
    """Multi-head latent attention over a cache of latents: per token the normed latent and one rotated key for all heads.

    The up-projections of key and value are applied to the query and to the result instead of to every cached token ("absorbed";
    arXiv:2405.04434, section 2.1.2), so that the cache is one head of ``kv_rank + rope`` and its values are part of its keys.
    """

    def __init__(self, weights: Weights, layer: int) -> None:
        assert weights.arch.latent is not None
        self._arch, self._latent, self._layer, sizes = weights.arch, weights.arch.latent, layer, weights.arch.latent
        role = "self_attention."
        self._q_down: Linear | None = None
        if sizes.q_rank is None:
            self._q = weights.linear(f"{role}linear_q_proj", layer)
        else:
            self._q_down = weights.linear(f"{role}linear_q_down_proj", layer)
            self._q_norm = weights.need(f"{role}q_layernorm.weight", layer)
            self._q = weights.linear(f"{role}linear_q_up_proj", layer)
        self._kv_down = weights.linear(f"{role}linear_kv_down_proj", layer)
        self._kv_norm = weights.need(f"{role}kv_layernorm.weight", layer)
        self._kv_up = weights.need(f"{role}linear_kv_up_proj.weight", layer)
        weights.derive(self._split_up, f"{role}linear_kv_up_proj.weight", layer)
        self._out = weights.linear(f"{role}linear_proj", layer)
        # Files rotate neighbouring pairs. Scores are sums over pairs, so any order will do that query and key share.
        self._order = torch.cat([torch.arange(0, sizes.rope, 2), torch.arange(1, sizes.rope, 2)])

    def _split_up(self) -> None:
        sizes = self._latent
        up = self._kv_up.view(self._arch.heads, sizes.nope + sizes.value, sizes.kv_rank)
        self._key_up, self._value_up = up[:, : sizes.nope], up[:, sizes.nope :].transpose(1, 2)

    def __call__(self, h: Tensor, angles: Angles, attention: StepAttention) -> Tensor:
        heads, sizes, t = self._arch.heads, self._latent, len(h)
        x = h if self._q_down is None else F.rms_norm(self._q_down(h), self._q_norm.shape, self._q_norm, _LATENT_EPS)
        q = self._q(x).view(t, heads, sizes.nope + sizes.rope)
        q_latent = torch.bmm(q[..., : sizes.nope].transpose(0, 1), self._key_up).transpose(0, 1)
        q = torch.cat([q_latent, angles.rotate(q[..., sizes.nope :][..., self._order])], -1)
        latent, key = self._kv_down(h).split([sizes.kv_rank, sizes.rope], -1)
        latent = F.rms_norm(latent, self._kv_norm.shape, self._kv_norm, _LATENT_EPS)
        k = torch.cat([latent.unsqueeze(1), angles.rotate(key[:, self._order].unsqueeze(1))], -1)
        seen = attention(self._layer, q, k, None).view(t, heads, sizes.kv_rank)
        values = torch.bmm(seen.transpose(0, 1), self._value_up).transpose(0, 1)
        return self._out(values.reshape(t, heads * sizes.value))


class Gated:
    """Dense SiLU-gated MLP, or the shared experts of a sparse layer."""

    def __init__(self, weights: Weights, layer: int, role: str = "mlp") -> None:
        self._up, self._down = weights.linear(f"{role}.linear_fc1", layer), weights.linear(f"{role}.linear_fc2", layer)
        self._ops = weights.ops

    def __call__(self, h: Tensor) -> Tensor:
        return self._down(self._ops.silu_mul(self._up(h)))


class Sparse:
    """Routed experts and, where the family has them, shared ones."""

    def __init__(self, weights: Weights, layer: int) -> None:
        assert weights.arch.experts is not None
        self.experts: Experts = weights.arch.experts
        self._router = weights.linear("mlp.router", layer)
        self._router32: Tensor | None = None
        self._bias = weights.get("mlp.router.expert_bias", layer)
        if self.experts.fp32 and weights.dtype != torch.float32:
            weights.derive(self._widen, "mlp.router.weight", layer)
        self._up = [weights.linear("linear_fc1", layer, e) for e in range(self.experts.count)]
        self._down = [weights.linear("linear_fc2", layer, e) for e in range(self.experts.count)]
        shared = weights.get("mlp.shared_experts.linear_fc1.weight", layer) is not None
        self._shared = Gated(weights, layer, "mlp.shared_experts") if shared else None
        self._shared_gate = weights.get("mlp.shared_experts.gate_weight", layer)
        self._ops = weights.ops
        self._grouped = all(p.by_kernels and p.bias is None for p in (*self._up, *self._down))
        self._addresses: tuple[Tensor, Tensor] | None = None
        for expert in range(self.experts.count):
            for role in ("linear_fc1", "linear_fc2"):
                weights.derive(self._forget, f"{role}.weight", layer, expert)

    def _forget(self) -> None:
        self._addresses = None

    def _widen(self) -> None:
        self._router32 = self._router.weight.float()

    def __call__(self, h_th: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (output [t, h], experts [t, k])."""
        weight_tk, chosen_tk = self.route(h_th)
        out = self._routed(h_th, weight_tk, chosen_tk)
        if self._shared is not None:
            shared = self._shared(h_th)
            if self._shared_gate is not None:
                shared = torch.sigmoid(F.linear(h_th, self._shared_gate)) * shared
            out = out + shared
        return out, chosen_tk

    def route(self, h_th: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [t, k] and experts int64 [t, k]."""
        e = self.experts
        if self._router32 is not None:
            logits = F.linear(h_th.float(), self._router32)
        else:
            logits = self._router(h_th).float()
        scores = logits.sigmoid() if e.score == "sigmoid" else torch.softmax(logits, -1)
        choice = scores if self._bias is None else scores + self._bias
        if e.groups > 1:
            choice = self._within_groups(choice)
        chosen = torch.topk(choice, e.top_k, -1).indices
        weight = scores.gather(1, chosen)
        if e.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return weight * e.scale if e.scale != 1.0 else weight, chosen

    def _within_groups(self, choice_te: Tensor) -> Tensor:
        """-inf outside of the best groups (device-limited routing, arXiv:2405.04434, section 2.1.3)."""
        e = self.experts
        grouped = choice_te.view(len(choice_te), e.groups, -1)
        best = grouped.topk(e.group_score, -1).values.sum(-1).topk(e.group_top, -1).indices
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)

    def _routed(self, h_th: Tensor, weight_tk: Tensor, chosen_tk: Tensor) -> Tensor:
        if not (isinstance(self._ops, Kernels) and self._grouped):
            return self._routed_by_torch(h_th, weight_tk, chosen_tk)
        if self._addresses is None:
            self._addresses = (_addresses(self._up), _addresses(self._down))
        return self._ops.experts(h_th, weight_tk, chosen_tk, *self._addresses, self._down[0].weight.shape[1])

    def _routed_by_torch(self, h_th: Tensor, weight_tk: Tensor, chosen_tk: Tensor) -> Tensor:
        """Tokens sorted by expert: one product per projection and expert that has tokens, one operation for all between."""
        k = self.experts.top_k
        flat = chosen_tk.flatten()
        order = torch.argsort(flat)
        counts = torch.bincount(flat, minlength=self.experts.count).tolist()
        used = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in used]
        parts = h_th[order // k].split(sizes)
        both = torch.cat([self._up[expert](part) for expert, part in zip(used, parts, strict=True)])
        parts = self._ops.silu_mul(both).split(sizes)
        out = torch.cat([self._down[expert](part) for expert, part in zip(used, parts, strict=True)])
        # Summed per token in the order of its k experts, whoever else is in the batch: back to [t, k, h] first.
        placed = torch.empty_like(out)
        placed[order] = out
        return (placed.view(len(h_th), k, -1) * weight_tk.to(out.dtype).unsqueeze(-1)).sum(1)


def _addresses(products: list[Linear]) -> Tensor:
    """Of weights as the kernels want them, until one changes; int64 [experts]."""
    for product in products:
        product.pack()
    packed = [p.packed for p in products]
    assert all(p is not None for p in packed), "used before it was loaded"
    return torch.tensor([p.data_ptr() for p in packed if p is not None], dtype=torch.int64)


def make_attention(weights: Weights, layer: int) -> GroupedQuery | LatentAttention:
    return GroupedQuery(weights, layer) if weights.arch.latent is None else LatentAttention(weights, layer)


def make_mlp(weights: Weights, layer: int) -> Gated | Sparse:
    return Sparse(weights, layer) if weights.arch.is_sparse(layer) else Gated(weights, layer)
