"""The operations of a layer that PyTorch makes of many small ones, each in two forms: by PyTorch, and by one kernel of ``native``."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_mega.serving import native


class Ops:
    """By PyTorch alone; works everywhere."""

    name = "torch"
    native = False
    """Whether there are the operations of ``Kernels``."""
    multiplies = False
    """Whether there are its products, too."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``delta`` to ``x`` [t, n] in place, if there is one; returns the RMS norm of the sum."""
        if delta is not None:
            x.add_(delta)
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, both: Tensor) -> Tensor:
        """silu(gate) * up of [t, gate and up]."""
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)


class Kernels(Ops):
    """By the built library, for one dtype. Tensors must be dense; those made here are."""

    name = "native"
    native = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self._add_norm, self._silu_mul, self._place, self._attend, self._draw = (
            getattr(library, f"{name}_{kind}") for name in ("add_norm", "silu_mul", "place", "attend", "draw")
        )
        self._library, self._threads = library, torch.get_num_threads()
        self.multiplies = dtype == torch.bfloat16 and native.multiplies(library)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        added = None if delta is None else delta.data_ptr()
        self._add_norm(x.data_ptr(), added, weight.data_ptr(), eps, out.data_ptr(), len(x), x.shape[1], self._threads)
        return out

    def silu_mul(self, both: Tensor) -> Tensor:
        out = both.new_empty(len(both), both.shape[1] // 2)
        self._silu_mul(both.data_ptr(), out.data_ptr(), len(both), out.shape[1], self._threads)
        return out

    def place(
        self,
        qkv: Tensor,
        *,
        heads: int,
        norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        rows: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache.

        Args:
            qkv: [t, (heads + 2 kv_heads) * dim].
            norm: weights [heads + kv_heads, dim], or None.
            cos, sin: [t, 1, rotary dim], the sign of the rotation in ``sin``.
            positions, rows: int64 [t], where each token is written.
            keys, values: of one layer, [rows, kv_heads, length, dim].

        Returns:
            queries [t, heads, dim].
        """
        _, kv, capacity, dim = keys.shape
        assert dim <= 1024 and qkv.shape[1] == (heads + 2 * kv) * dim and keys.shape == values.shape
        q = qkv.new_empty(len(qkv), heads, dim)
        pointers = [t.data_ptr() for t in (cos, sin, positions, rows)]
        weight = None if norm is None else norm.data_ptr()
        sizes = (len(qkv), heads, kv, dim, cos.shape[-1])
        targets = [t.data_ptr() for t in (q, keys, values)]
        self._place(qkv.data_ptr(), weight, eps, *pointers, *sizes, *targets, capacity, self._threads)
        return q

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float) -> Tensor:
        """Attention of every token to its row of the cache, from the row's begin to the token's own position.

        Args:
            q: [t, heads, key_dim], dense; tokens of one row side by side and in their order.
            keys, values: of one layer, [rows, kv_heads, length, dim]; values may be the beginnings of the keys.
            rows, positions: int64 [t].

        Returns:
            [t, heads * value_dim]
        """
        t, heads, key_dim = q.shape
        kv, capacity, value_dim = values.shape[1:]
        out = q.new_empty(t, heads * value_dim)
        pointers = [tensor.data_ptr() for tensor in (q, keys, values, rows, positions)]
        sizes = (t, kv, heads // kv, key_dim, value_dim, values.stride(2), capacity)
        self._attend(*pointers, *sizes, scale, out.data_ptr(), self._threads)
        return out

    def draw(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [rows] and their log-probabilities fp32 [rows] (NaN where logits give none); ``sampling`` says which.

        Args:
            logits: [rows, vocab], dense.
            temperature: fp32 [rows], 0 for the likeliest token.
            uniform: fp64 [rows] in [0, 1).
        """
        rows, vocab = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        pointers = [t.data_ptr() for t in (logits, temperature, uniform)]
        self._draw(*pointers, rows, vocab, tokens.data_ptr(), logprobs.data_ptr(), self._threads)
        return tokens, logprobs

    # Products of bf16, where ``multiplies``.

    def packs(self, weight: Tensor) -> bool:
        return self.multiplies and weight.shape[1] % 2 == 0

    def pack(self, weight: Tensor, into: Tensor | None) -> Tensor:
        """``weight`` [out, in] as panels of 48 outputs; ``into`` is the result for another weight of that shape, reused."""
        outputs, inputs = weight.shape
        packed = torch.empty(_panels(outputs) * inputs, dtype=weight.dtype) if into is None else into
        self._library.pack(weight.data_ptr(), outputs, inputs, packed.data_ptr(), self._threads)
        return packed

    @staticmethod
    def pack_bias(bias: Tensor) -> Tensor:
        return F.pad(bias.float(), (0, _panels(len(bias)) - len(bias)))

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """``x W^T + b`` [rows, outputs] for dense x [rows, inputs]; bias as ``pack_bias`` makes it."""
        rows, inputs = x.shape
        out = x.new_empty(rows, outputs)
        added = None if bias is None else bias.data_ptr()
        self._library.linear(x.data_ptr(), rows, packed.data_ptr(), added, outputs, inputs, out.data_ptr(), self._threads)
        return out

    def experts(self, x: Tensor, weight_tk: Tensor, chosen_tk: Tensor, up: Tensor, down: Tensor, width: int) -> Tensor:
        """Gated MLPs of the chosen experts, weighted and summed.

        Args:
            x: [t, hidden].
            weight_tk: fp32 [t, k].
            chosen_tk: int64 [t, k].
            up, down: int64 [experts], addresses of packed weights [2 width, hidden] and [hidden, width].
        """
        (t, hidden), k, count = x.shape, chosen_tk.shape[1], chosen_tk.numel()
        chosen_tk, weight_tk = chosen_tk.contiguous(), weight_tk.contiguous()
        token, place, ends = (torch.empty(n, dtype=torch.int64) for n in (count, count, len(up)))
        at = [i.data_ptr() for i in (token, place, ends)]
        self._library.sort_choices(chosen_tk.data_ptr(), count, k, len(up), *at)
        both, product = x.new_empty(count, 2 * width), self._library.product
        product(x.data_ptr(), at[0], at[2], len(up), up.data_ptr(), None, 2 * width, hidden, both.data_ptr(), self._threads)
        inner, outer, out = self.silu_mul(both), x.new_empty(count, hidden), x.new_empty(t, hidden)
        product(inner.data_ptr(), None, at[2], len(up), down.data_ptr(), None, hidden, width, outer.data_ptr(), self._threads)
        self._library.combine(outer.data_ptr(), at[1], weight_tk.data_ptr(), t, k, hidden, out.data_ptr(), self._threads)
        return out


def _panels(outputs: int) -> int:
    """Outputs, filled up to whole panels."""
    return -(-outputs // 48) * 48


def make_ops(library: ctypes.CDLL | None, dtype: torch.dtype) -> Ops:
    return Ops() if library is None else Kernels(library, dtype)
