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
    """By the built library, for one dtype. It takes addresses and checks nothing: whatever it is given goes through ``_at``."""

    name = "native"
    native = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self._add_norm, self._silu_mul, self._place, self._attend, self._draw = (
            getattr(library, f"{name}_{kind}") for name in ("add_norm", "silu_mul", "place", "attend", "draw")
        )
        self._library, self._threads, self._dtype = library, torch.get_num_threads(), dtype
        self.multiplies = dtype == torch.bfloat16 and native.multiplies(library)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        (t, n), own = x.shape, self._dtype
        out = x.new_empty(t, n)
        added = None if delta is None else _at(delta, own, t, n)
        self._add_norm(_at(x, own, t, n), added, _at(weight, own, n), eps, out.data_ptr(), t, n, self._threads)
        return out

    def silu_mul(self, both: Tensor) -> Tensor:
        t, n = len(both), both.shape[1] // 2
        out = both.new_empty(t, n)
        self._silu_mul(_at(both, self._dtype, t, 2 * n), out.data_ptr(), t, n, self._threads)
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
        (t, _), (slots, kv, capacity, dim), rotary, own = qkv.shape, keys.shape, cos.shape[-1], self._dtype
        assert dim <= 1024 and rotary % 2 == 0 and rotary <= dim
        q = qkv.new_empty(t, heads, dim)
        source = _at(qkv, own, t, (heads + 2 * kv) * dim)
        weight = None if norm is None else _at(norm, own, heads + kv, dim)
        pointers = (_at(cos, own, t, 1, rotary), _at(sin, own, t, 1, rotary), _at(positions, torch.int64, t), _at(rows, torch.int64, t))
        targets = (q.data_ptr(), _at(keys, own, slots, kv, capacity, dim), _at(values, own, slots, kv, capacity, dim))
        self._place(source, weight, eps, *pointers, t, heads, kv, dim, rotary, *targets, capacity, self._threads)
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
        (t, heads, key_dim), (slots, kv, capacity, value_dim), own = q.shape, values.shape, self._dtype
        step = values.stride(2)
        assert heads % kv == 0 and values.dtype == own and values.stride() == (kv * capacity * step, capacity * step, step, 1)
        out = q.new_empty(t, heads * value_dim)
        pointers = (_at(q, own, t, heads, key_dim), _at(keys, own, slots, kv, capacity, key_dim), values.data_ptr())
        tokens = (_at(rows, torch.int64, t), _at(positions, torch.int64, t))
        sizes = (t, kv, heads // kv, key_dim, value_dim, step, capacity)
        self._attend(*pointers, *tokens, *sizes, scale, out.data_ptr(), self._threads)
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
        pointers = (_at(logits, self._dtype, rows, vocab), _at(temperature, torch.float32, rows), _at(uniform, torch.float64, rows))
        self._draw(*pointers, rows, vocab, tokens.data_ptr(), logprobs.data_ptr(), self._threads)
        return tokens, logprobs

    # Products of bf16, where ``multiplies``.

    def packs(self, weight: Tensor) -> bool:
        return self.multiplies and weight.shape[1] % 2 == 0

    def pack(self, weight: Tensor, into: Tensor | None) -> Tensor:
        """``weight`` [out, in] as panels of 48 outputs; ``into`` is the result for another weight of that shape, reused."""
        outputs, inputs = weight.shape
        size, own = _panels(outputs) * inputs, self._dtype
        packed = torch.empty(size, dtype=own) if into is None else into
        self._library.pack(_at(weight, own, outputs, inputs), outputs, inputs, _at(packed, own, size), self._threads)
        return packed

    @staticmethod
    def pack_bias(bias: Tensor) -> Tensor:
        return F.pad(bias.float(), (0, _panels(len(bias)) - len(bias)))

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """``x W^T + b`` [rows, outputs] for dense x [rows, inputs]; bias as ``pack_bias`` makes it."""
        (rows, inputs), own, panels = x.shape, self._dtype, _panels(outputs)
        out = x.new_empty(rows, outputs)
        added = None if bias is None else _at(bias, torch.float32, panels)
        weight = _at(packed, own, panels * inputs)
        self._library.linear(_at(x, own, rows, inputs), rows, weight, added, outputs, inputs, out.data_ptr(), self._threads)
        return out

    def experts(self, x: Tensor, weight_tk: Tensor, chosen_tk: Tensor, up: Tensor, down: Tensor, width: int) -> Tensor:
        """Gated MLPs of the chosen experts, weighted and summed.

        Args:
            x: [t, hidden].
            weight_tk: fp32 [t, k].
            chosen_tk: int64 [t, k].
            up, down: int64 [experts], addresses of packed weights [2 width, hidden] and [hidden, width].
        """
        (t, hidden), k, count, experts = x.shape, chosen_tk.shape[1], chosen_tk.numel(), len(up)
        chosen_tk, weight_tk = chosen_tk.contiguous(), weight_tk.contiguous()  # named: they must live until the end
        chosen, by = _at(chosen_tk, torch.int64, t, k), _at(weight_tk, torch.float32, t, k)
        token, place, ends = (torch.empty(n, dtype=torch.int64) for n in (count, count, experts))
        at = [i.data_ptr() for i in (token, place, ends)]
        self._library.sort_choices(chosen, count, k, experts, *at)
        both, product = x.new_empty(count, 2 * width), self._library.product
        first, second = _at(up, torch.int64, experts), _at(down, torch.int64, experts)
        source = _at(x, self._dtype, t, hidden)
        product(source, at[0], at[2], experts, first, None, 2 * width, hidden, both.data_ptr(), self._threads)
        inner, outer, out = self.silu_mul(both), x.new_empty(count, hidden), x.new_empty(t, hidden)
        product(inner.data_ptr(), None, at[2], experts, second, None, hidden, width, outer.data_ptr(), self._threads)
        self._library.combine(outer.data_ptr(), at[1], by, t, k, hidden, out.data_ptr(), self._threads)
        return out


def _at(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a dense tensor; what a kernel would read otherwise is not its caller's."""
    assert tensor.is_contiguous() and tensor.dtype == dtype and tensor.shape == shape, f"{tensor.dtype} {tuple(tensor.shape)}"
    return tensor.data_ptr()


def _panels(outputs: int) -> int:
    """Outputs, filled up to whole panels."""
    return -(-outputs // 48) * 48


def make_ops(library: ctypes.CDLL | None, dtype: torch.dtype) -> Ops:
    return Ops() if library is None else Kernels(library, dtype)
