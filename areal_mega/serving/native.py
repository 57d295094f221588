"""Build and load ``kernels.cpp``: once per machine and source, by the C++ compiler that is there; without one the server computes with
PyTorch alone, at 0.5 to 0.8 of the speed.

The library is kept in ``$XDG_CACHE_HOME/areal-mega`` (``~/.cache`` by default). It uses the OpenMP library that PyTorch has loaded:
a second one would bring a second team of threads onto the same cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from areal_mega.core.errors import UserError

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-exceptions", "-fno-math-errno", "-fno-trapping-math")
_BUILD_S = 120.0
_SIGNATURES = {
    "add_norm": "pppfpiin",
    "silu_mul": "ppiin",
    "place": "ppfppppiiiiipppin",
    "attend": "pppppiiiiiiifpn",
    "draw": "pppiippn",
}
"""Parameters of the functions that exist for fp32 and bf16: p pointer, i int64, n int, f float."""
_BF16_ONLY = {"pack": "piipn", "linear": "pippiipn", "product": "pppippiipn", "sort_choices": "piiippp", "combine": "pppiiipn"}
_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "n": ctypes.c_int, "f": ctypes.c_float}


class Unavailable(Exception):
    """Why there are no kernels on this machine."""


def choose(wanted: str) -> ctypes.CDLL | None:
    """The kernels for ``--kernels``: ``auto`` (if they can be built), ``native`` (or fail), ``torch`` (None).

    Raises:
        UserError: ``native``, and they cannot be built.
    """
    if wanted == "torch":
        return None
    try:
        return load()
    except Unavailable as error:
        if wanted == "native":
            raise UserError(f"--kernels native: {error}; install a C++ compiler, or use --kernels auto") from None
        log.warning("kernels are not built, the server computes with PyTorch alone, at 0.5 to 0.8 of the speed: %s", error)
        return None


@functools.cache
def load() -> ctypes.CDLL:
    """The library, built if it is not there yet.

    Raises:
        Unavailable: no compiler, or it fails.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C++ compiler (looked for {', '.join(_COMPILERS)})")
    try:
        return _declare(ctypes.CDLL(str(_built(compiler))))
    except OSError as error:
        raise Unavailable(f"the kernels could not be loaded: {error}") from error


def _built(compiler: str) -> Path:
    openmp = _openmp()
    command = [compiler, *_FLAGS]
    if platform.machine() == "x86_64":
        command.append("-mprefer-vector-width=512")
    path = _cache() / f"kernels-{_key(command, openmp)}.so"
    if not path.exists():
        _build(command, openmp, path)
    return path


def _openmp() -> Path:
    """PyTorch's OpenMP library; where it ships none of its own, the one in this process."""
    import torch

    names, home = ("libgomp", "libiomp5", "libomp"), str(Path(torch.__file__).parent)
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    found = [path for path in sorted(mapped) if Path(path).name.startswith(names)]
    if found:
        return Path(min(found, key=lambda path: not path.startswith(home)))
    raise Unavailable("PyTorch has loaded no OpenMP library (libgomp, libiomp5 or libomp)")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-mega"


def _key(command: list[str], openmp: Path) -> str:
    """Another source, compiler, CPU or OpenMP library is another file: a home may be shared by unlike machines."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False, timeout=_BUILD_S).stdout
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    parts = (SOURCE.read_text(), " ".join(command), version, platform.machine(), " ".join(sorted(cpu.split())), str(openmp))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _build(command: list[str], openmp: Path, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernels"
            for step in (
                [*command, "-c", str(SOURCE), "-o", f"{made}.o"],
                [command[0], "-shared", f"{made}.o", str(openmp), "-o", f"{made}.so"],
            ):
                done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=_BUILD_S)
                if done.returncode:
                    raise Unavailable(f"{' '.join(step)} failed: {(done.stderr.strip() or 'no message').splitlines()[0]}")
            os.replace(f"{made}.so", path)  # whole or not at all, whoever builds beside
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the kernels could not be built in {path.parent}: {error}") from error


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    signatures = {f"{name}_{kind}": s for name, s in _SIGNATURES.items() for kind in ("fp32", "bf16")}
    if multiplies(library):
        signatures |= _BF16_ONLY
    for name, signature in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_KINDS[letter] for letter in signature], None
    return library


def multiplies(library: ctypes.CDLL) -> bool:
    """Whether the CPU has products of bf16, and so the library."""
    return hasattr(library, "product")
