"""Matrix products with weights in a layout made for them: bf16 by our kernels where the CPU has such products, else by oneDNN.

oneDNN multiplies fastest when a weight lies in blocks as its kernels read them. From a plain weight it makes that layout anew in every
product; made once, a product with few rows takes a third to a half of the time (measured in docs/LOG.md). The plain weight stays: it is
what loads write and digests read. The layout is made by the first product after a load, which thus costs about what a plain one would: no
sync waits for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_mega.serving.ops import Kernels, Ops

_ROWS = 32
"""Rows of input that the layout is chosen for; measured: any choice from 8 to 64 serves products of 1 to 100 rows alike."""


def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch and this CPU multiply by packed weights of the dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Linear:
    """``x W^T + b`` for x [rows, in], rows >= 1; ``weight`` [out, in]. Call ``changed`` after weight or bias has changed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        self.weight, self.bias = weight, bias
        self.packed: Tensor | None = None
        """As the kernels want it, where they pack it; its address stays from the first ``pack`` on."""
        self._kernels = ops if isinstance(ops, Kernels) and ops.packs(weight) else None
        self._packed_bias: Tensor | None = None
        self._onednn: Tensor | None = None
        self._packs = packing_works(weight.dtype)
        self._stale = True

    @property
    def by_kernels(self) -> bool:
        return self._kernels is not None

    def changed(self) -> None:
        """The layout is that of the weight before. Kernels keep its memory."""
        self._stale, self._onednn = True, None

    def pack(self) -> None:
        """Make the layout, where it is not that of the weight."""
        if not self._stale:
            return
        self._stale = False
        if self._kernels is not None:
            self.packed = self._kernels.pack(self.weight, self.packed)
            self._packed_bias = None if self.bias is None else self._kernels.pack_bias(self.bias)
        elif self._packs:
            self._onednn = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        self.pack()
        if self._kernels is not None and self.packed is not None:
            return self._kernels.linear(x.contiguous(), self.packed, self._packed_bias, len(self.weight))
        if self._onednn is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._onednn, self.bias, "none", [], "")
        return out
