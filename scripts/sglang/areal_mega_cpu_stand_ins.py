"""Stand-ins for packages that SGLang 0.5.23 imports on a CPU and never uses there: sgl_kernel, torchvision, torchaudio.

``scripts/sglang/setup.sh`` puts this module into the server's environment, where a .pth file imports it at every start. A package that is
installed wins over its stand-in. Whatever a stand-in is asked for is a function (or class) that raises when it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

# SGLang takes the ImportError of ``sgl_kernel.scalar_type`` for "without quantisation kernels", so sgl_kernel must have no submodules.
_PLAIN, _PACKAGES = ("sgl_kernel",), ("torchvision", "torchaudio")
_INTERPOLATIONS = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "LANCZOS", "BOX", "HAMMING")


class _StandIn(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        value = sys.modules.get(whole) or (type(name, (), {"__init__": _absent(whole)}) if name[0].isupper() else _absent(whole))
        setattr(self, name, value)
        return value


def _absent(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} is not installed in this CPU environment")

    return call


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on the path, so that it is asked for what nobody else has."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in _PLAIN:
            return importlib.machinery.ModuleSpec(name, self)
        if name.partition(".")[0] in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torchvision.transforms":
            # Tables of image models name its members while they are imported.
            module.InterpolationMode = types.SimpleNamespace(**{name: name.lower() for name in _INTERPOLATIONS})  # type: ignore[attr-defined]
        if module.__name__ == "sgl_kernel":
            _let_host_buffers_register()


class _CudaRuntime:
    """Answers "success" to everything."""

    cudaError = types.SimpleNamespace(success=0)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


def _let_host_buffers_register() -> None:
    """Reporting routed experts pins a host buffer by CUDA's runtime, which a torch built for CPUs does not have."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.cudart = _CudaRuntime


sys.meta_path.append(_Finder())
