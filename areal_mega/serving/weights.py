"""The server's parameters: fused for speed, addressed by HuggingFace names.

Every HF tensor is a view into a fused parameter, so loading a tensor is one copy and a digest reads what the model really computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from areal_mega.core.errors import UserError
from areal_mega.serving.arch import Arch
from areal_mega.sync.digest import combine, tensor_digests

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Layer:
    """One layer. Shapes: h hidden, q = (heads + 2 kv_heads) head_dim, i intermediate, E experts."""

    input_norm: Tensor
    qkv: Tensor
    """[q, h]: query rows, then key, then value."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the query's norm weight for every head, then the key's. Derived; see ``refresh``."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """[2 i, h], or [E, 2 i, h] in a sparse layer."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[h, i], or [E, h, i] in a sparse layer."""
    down_bias: Tensor | None
    router: Tensor | None


@dataclass(slots=True)
class Weights:
    """All parameters of a model. ``hf`` maps every HuggingFace name to a view of them."""

    arch: Arch
    dtype: torch.dtype
    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: list[Layer]
    hf: dict[str, Tensor] = field(default_factory=dict)

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy one HF tensor in, casting to the server's dtype.

        Raises:
            UserError: unknown name, or another shape than the model has.
        """
        self.check(name, tuple(tensor.shape))
        self.hf[name].copy_(tensor)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.hf:
            raise UserError(f"tensor {name!r} is no parameter of this {self.arch.model_type} model")
        if tuple(self.hf[name].shape) != shape:
            raise UserError(f"tensor {name!r} has shape {list(shape)}, the model has {list(self.hf[name].shape)}")

    def refresh(self) -> None:
        """Recompute what is derived from parameters; call after any load."""
        heads, kv_heads = self.arch.heads, self.arch.kv_heads
        for layer in self.layers:
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.qk_norm = torch.cat([layer.q_norm.expand(heads, -1), layer.k_norm.expand(kv_heads, -1)])

    def digests(self) -> dict[str, str]:
        return tensor_digests(self.hf)

    def digest(self) -> str:
        return combine(self.digests())


def empty_weights(arch: Arch, dtype: torch.dtype) -> Weights:
    """Parameters of NaN: whatever is not loaded shows."""

    def make(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    embedding = make(arch.vocab, arch.hidden)
    head = embedding if arch.tied else make(arch.vocab, arch.hidden)
    weights = Weights(arch, dtype, embedding, head, make(arch.hidden), [])
    names: dict[str, Tensor] = {"model.embed_tokens.weight": embedding}
    for index in range(arch.layers):
        layer, views = _layer(arch, index, make)
        weights.layers.append(layer)
        names.update({f"model.layers.{index}.{name}": view for name, view in views.items()})
    names["model.norm.weight"] = weights.final_norm
    if not arch.tied:
        names["lm_head.weight"] = head
    weights.hf = names
    return weights


def _layer(arch: Arch, index: int, make: Callable[..., Tensor]) -> tuple[Layer, dict[str, Tensor]]:
    h, d, sparse = arch.hidden, arch.head_dim, arch.is_sparse(index)
    rows = [arch.heads * d, arch.kv_heads * d, arch.kv_heads * d]
    qkv, o = make(sum(rows), h), make(h, arch.heads * d)
    qkv_bias = make(sum(rows)) if arch.qkv_bias else None
    o_bias = make(h) if arch.o_bias else None
    q_norm, k_norm = (make(d), make(d)) if arch.qk_norm else (None, None)
    views: dict[str, Tensor] = {"input_layernorm.weight": make(h), "post_attention_layernorm.weight": make(h)}
    for name, part in zip("qkv", qkv.split(rows), strict=True):
        views[f"self_attn.{name}_proj.weight"] = part
    if qkv_bias is not None:
        for name, part in zip("qkv", qkv_bias.split(rows), strict=True):
            views[f"self_attn.{name}_proj.bias"] = part
    views["self_attn.o_proj.weight"] = o
    if o_bias is not None:
        views["self_attn.o_proj.bias"] = o_bias
    if q_norm is not None and k_norm is not None:
        views["self_attn.q_norm.weight"], views["self_attn.k_norm.weight"] = q_norm, k_norm
    mlp, mlp_views = (_sparse_mlp if sparse else _dense_mlp)(arch, make)
    views.update(mlp_views)
    layer = Layer(
        input_norm=views["input_layernorm.weight"],
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norm=None,
        q_norm=q_norm,
        k_norm=k_norm,
        o=o,
        o_bias=o_bias,
        post_norm=views["post_attention_layernorm.weight"],
        **mlp,
    )
    return layer, views


def _dense_mlp(arch: Arch, make: Callable[..., Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    h, i = arch.hidden, arch.intermediate
    gate_up, down = make(2 * i, h), make(h, i)
    views = {"mlp.gate_proj.weight": gate_up[:i], "mlp.up_proj.weight": gate_up[i:], "mlp.down_proj.weight": down}
    gate_up_bias = down_bias = None
    if arch.mlp_bias:
        gate_up_bias, down_bias = make(2 * i), make(h)
        views |= {"mlp.gate_proj.bias": gate_up_bias[:i], "mlp.up_proj.bias": gate_up_bias[i:], "mlp.down_proj.bias": down_bias}
    return {"gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "down_bias": down_bias, "router": None}, views


def _sparse_mlp(arch: Arch, make: Callable[..., Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    assert arch.experts is not None
    h, i, count = arch.hidden, arch.experts.hidden, arch.experts.count
    gate_up, down, router = make(count, 2 * i, h), make(count, h, i), make(count, h)
    views = {"mlp.gate.weight": router}
    for e in range(count):
        views[f"mlp.experts.{e}.gate_proj.weight"] = gate_up[e, :i]
        views[f"mlp.experts.{e}.up_proj.weight"] = gate_up[e, i:]
        views[f"mlp.experts.{e}.down_proj.weight"] = down[e]
    return {"gate_up": gate_up, "gate_up_bias": None, "down": down, "down_bias": None, "router": router}, views


def load_all(weights: Weights, tensors: Iterable[tuple[str, Tensor]], *, source: str, ignorable: frozenset[str] = frozenset()) -> None:
    """Load a whole checkpoint: every parameter exactly once, nothing left over.

    Args:
        source: what to call the checkpoint in errors.
        ignorable: names that files may carry in vain (rotary buffers, a tied output layer written twice).

    Raises:
        UserError: naming what is missing, unknown, double, or of another shape.
    """
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in ignorable and name not in weights.hf:
            continue
        if name in seen:
            raise UserError(f"{source}: tensor {name!r} stands there twice")
        try:
            weights.load(name, tensor)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        seen.add(name)
    missing = sorted(weights.hf.keys() - seen)
    if missing:
        raise UserError(f"{source}: {_count(missing)} missing: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
    weights.refresh()


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"
