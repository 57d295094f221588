"""Matrix products with weights in the CPU's own layout.

oneDNN multiplies fastest when a weight lies in blocks as its kernels read them. From a plain weight it makes that layout anew in every
product; made once, a product with few rows takes a third to a half of the time (measured in docs/LOG.md). The plain weight stays: it is
what loads write and digests read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 32
"""Rows of input that the layout is chosen for; measured: any choice from 8 to 64 serves products of 1 to 100 rows alike."""


def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch and this CPU multiply by packed weights of the dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Linear:
    """``x W^T + b`` for x [rows, in], rows >= 1; ``weight`` [out, in]. Call ``pack`` after the weight has changed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: Tensor | None = None
        self._packs = packing_works(weight.dtype)

    def pack(self) -> None:
        if self._packs:
            self._packed = None  # frees the old copy first: the peak is one weight, not two
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out
