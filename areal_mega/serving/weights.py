"""The server's parameters, made from the trainer's parameter table: fused for speed, addressed by HuggingFace names.

Every HF tensor is a view into a parameter. Loading a tensor is one copy, a digest reads the views, and what is derived from parameters
(packed layouts) is made again after every load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from areal_mega.core.errors import UserError
from areal_mega.serving.arch import Arch
from areal_mega.serving.linear import Linear
from areal_mega.serving.ops import Ops
from areal_mega.sync.digest import combine, tensor_digests

if TYPE_CHECKING:
    from torch import Tensor

    from areal_mega.models.table import Param


class Weights:
    """All parameters of a model. ``hf`` maps every HuggingFace name to a view of them. Parameters are NaN until loaded.

    Args:
        ops: how the model computes, and so how products are packed.
        parameters: entries of the family's table. Several HF tensors of one entry (query, key, value; gate, up) stand one after the other.
    """

    def __init__(self, arch: Arch, dtype: torch.dtype, parameters: Iterable[Param], ops: Ops) -> None:
        self.arch, self.dtype, self.ops = arch, dtype, ops
        self.hf: dict[str, Tensor] = {}
        self._parameters: dict[tuple[int | None, int | None, str], Tensor] = {}
        self._names: dict[tuple[int | None, int | None, str], tuple[str, ...]] = {}
        self._derived: dict[str, list[Callable[[], None]]] = {}
        for param in parameters:
            rows = [shape[0] for shape in param.shapes]
            kind = torch.float32 if param.fp32 else dtype
            tensor = torch.full((sum(rows), *param.shapes[0][1:]), float("nan"), dtype=kind)
            key = (param.layer, param.expert, param.role)
            self._parameters[key], self._names[key] = tensor, tuple(t.name for t in param.hf)
            self.hf.update(zip(self._names[key], tensor.split(rows), strict=True))

    def get(self, role: str, layer: int | None = None, expert: int | None = None) -> Tensor | None:
        return self._parameters.get((layer, expert, role))

    def need(self, role: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        return self._parameters[layer, expert, role]

    def linear(self, role: str, layer: int | None = None, expert: int | None = None) -> Linear:
        """The product with ``role.weight`` and, where there is one, ``role.bias``; packed by every ``refresh``."""
        bias = self.get(f"{role}.bias", layer, expert)
        made = Linear(self.need(f"{role}.weight", layer, expert), bias, self.ops)
        self.derive(made.pack, f"{role}.weight", layer, expert)
        if bias is not None:
            self.derive(made.pack, f"{role}.bias", layer, expert)
        return made

    def derive(self, make: Callable[[], None], role: str, layer: int | None = None, expert: int | None = None) -> None:
        """Call ``make`` whenever the parameter has changed."""
        for name in self._names[layer, expert, role]:
            self._derived.setdefault(name, []).append(make)

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy one HF tensor in, casting to the server's dtype; ``refresh`` must follow.

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

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Make again what is derived from these HF tensors (None: from all); call after any load."""
        makers = [make for name in (self._derived if names is None else names) for make in self._derived.get(name, ())]
        for make in dict.fromkeys(makers):
            make()

    def digests(self) -> dict[str, str]:
        return tensor_digests(self.hf)

    def digest(self) -> str:
        return combine(self.digests())


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
