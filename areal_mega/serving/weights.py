"""The server's parameters, made from the trainer's parameter table: fused for speed, addressed by HuggingFace names.

Every HF tensor is a view into a parameter. Loading a tensor is one copy, or none where a bucket is received into its place; a digest reads
the views. What is derived from parameters is made again by ``refresh``; packed layouts by the first product after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from areal_mega.core.errors import UserError
from areal_mega.serving.arch import Arch
from areal_mega.serving.linear import Linear
from areal_mega.serving.ops import Ops
from areal_mega.sync.digest import DigestKind, combine, tensor_digests

if TYPE_CHECKING:
    from torch import Tensor

    from areal_mega.models.table import Param


DIGESTS: DigestKind = "xxh3"
"""The kind that the server reports: its weights are in host memory."""


_Key = tuple[int | None, int | None, str]
"""Layer, expert and role of a parameter."""


class Weights:
    """All parameters of a model. ``hf`` maps every HuggingFace name to a view of them. Parameters are NaN until loaded.

    Args:
        ops: how the model computes, and so how products are packed.
        parameters: entries of the family's table. Several HF tensors of one entry (query, key, value; gate, up) stand one after the other.
    """

    def __init__(self, arch: Arch, dtype: torch.dtype, parameters: Iterable[Param], ops: Ops) -> None:
        self.arch, self.dtype, self.ops = arch, dtype, ops
        self.hf: dict[str, Tensor] = {}
        self._parameters: dict[_Key, Tensor] = {}
        self._names: dict[_Key, tuple[str, ...]] = {}
        self._key: dict[str, _Key] = {}
        """Of a parameter's first tensor."""
        self._home: dict[str, tuple[str, ...]] = {}
        """Of a tensor that ``settle`` has moved: all those that it shares memory with."""
        self._memory: dict[tuple[str, ...], Tensor] = {}
        """Bytes in which exactly these tensors lie, one after the other."""
        self._derived: dict[str, list[Callable[[], None]]] = {}
        for param in parameters:
            rows = [shape[0] for shape in param.shapes]
            kind = torch.float32 if param.fp32 else dtype
            tensor = torch.full((sum(rows), *param.shapes[0][1:]), float("nan"), dtype=kind)
            key = (param.layer, param.expert, param.role)
            self._parameters[key], self._names[key] = tensor, tuple(t.name for t in param.hf)
            self._key[param.hf[0].name] = key
            self.hf.update(zip(self._names[key], tensor.split(rows), strict=True))

    def get(self, role: str, layer: int | None = None, expert: int | None = None) -> Tensor | None:
        return self._parameters.get((layer, expert, role))

    def need(self, role: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        return self._parameters[layer, expert, role]

    def linear(self, role: str, layer: int | None = None, expert: int | None = None) -> Linear:
        """The product with ``role.weight`` and, where there is one, ``role.bias``; packed anew by the first product after a ``refresh``."""
        bias = self.get(f"{role}.bias", layer, expert)
        made = Linear(self.need(f"{role}.weight", layer, expert), bias, self.ops)
        self.derive(made.changed, f"{role}.weight", layer, expert)
        if bias is not None:
            self.derive(made.changed, f"{role}.bias", layer, expert)
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

    def settle(self, names: tuple[str, ...], dtypes: Iterable[torch.dtype]) -> Tensor | None:
        """Let these tensors lie in memory of their own, one after the other, so that a bucket of them can be received into its place.

        What they were is then lost; ``refresh`` must follow. The next bucket of the same tensors finds the same memory.

        Args:
            dtypes: of the tensors as they come.

        Returns:
            Those bytes; None, and nothing is changed, where a tensor comes in another dtype than it has here, or only a part of a fused
            parameter comes, or of the tensors that one of these lies among, or where one would begin within an item of its dtype.
        """
        fits = all(self.hf[name].dtype == dtype for name, dtype in zip(names, dtypes, strict=True))
        if not fits:
            return None  # even where they have memory: what comes is other bits, and must be cast
        if names in self._memory:
            return self._memory[names]
        keys = self._complete(names)
        left = {self._home[name] for name in names if name in self._home}
        if keys is None or not {name for home in left for name in home} <= set(names) or not self._aligned(keys):
            return None
        for home in left:
            self._memory.pop(home, None)
        return self._place(names, keys)

    def unsettle(self, names: tuple[str, ...]) -> None:
        """Something may still write into the memory that ``settle`` gave these tensors: they leave it, and are lost."""
        if self._memory.pop(names, None) is not None:
            keys = self._complete(names)
            assert keys is not None
            self._place(names, keys)

    def _place(self, names: tuple[str, ...], keys: list[_Key]) -> Tensor:
        memory = torch.empty(sum(self.hf[name].nbytes for name in names), dtype=torch.uint8)
        start = 0
        for key in keys:
            parameter, rows = self._parameters[key], [len(self.hf[name]) for name in self._names[key]]
            end = start + parameter.nbytes
            # In place: layers hold this very object.
            parameter.set_(memory[start:end].view(parameter.dtype).view(parameter.shape))  # type: ignore[call-overload]
            self.hf.update(zip(self._names[key], parameter.split(rows), strict=True))
            start = end
        self._home |= dict.fromkeys(names, names)
        self._memory[names] = memory
        return memory

    def _aligned(self, keys: list[_Key]) -> bool:
        """Whether every parameter, one behind the other, begins at a multiple of its item's size."""
        start = 0
        for key in keys:
            if start % self._parameters[key].itemsize:
                return False
            start += self._parameters[key].nbytes
        return True

    def _complete(self, names: tuple[str, ...]) -> list[_Key] | None:
        """The parameters of these tensors, if they are whole parameters in order."""
        keys: list[_Key] = []
        at = 0
        while at < len(names):
            key = self._key.get(names[at])
            if key is None or names[at : at + len(self._names[key])] != self._names[key]:
                return None
            keys.append(key)
            at += len(self._names[key])
        return keys

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Make again what is derived from these HF tensors (None: from all); call after any load."""
        makers = [make for name in (self._derived if names is None else names) for make in self._derived.get(name, ())]
        for make in dict.fromkeys(makers):
            make()

    def digests(self, kind: DigestKind = DIGESTS) -> dict[str, str]:
        return tensor_digests(self.hf, kind)

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
