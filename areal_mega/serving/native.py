"""Build and load ``kernels.cpp`` and ``products.cpp``: once per machine and source, by GCC; without it the server computes with PyTorch
alone, at 0.5 to 0.8 of the speed.

The library is kept in ``$XDG_CACHE_HOME/areal-mega`` (``~/.cache`` by default), or, where that cannot be written, in a folder of this user
alone under the system's temporary one. It uses the OpenMP library that PyTorch has loaded: a second one would bring a second team of
threads onto the same cores. That is GCC's (libgomp), whose functions Clang does not call, or LLVM's or Intel's, which have GCC's, too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from areal_mega.core.errors import UserError

log = logging.getLogger(__name__)
SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.h", "kernels.cpp", "products.cpp"))
_COMPILERS = ("c++", "g++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-exceptions", "-fno-math-errno", "-fno-trapping-math")
_BUILD_S, _VERSION_S = 120.0, 30.0
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
            raise UserError(f"--kernels native: {error}; install g++, or use --kernels auto") from None
        log.warning("kernels are not built, the server computes with PyTorch alone, at 0.5 to 0.8 of the speed: %s", error)
        return None


@functools.cache
def load() -> ctypes.CDLL:
    """The library, built if it is not there yet.

    Raises:
        Unavailable: no GCC, or it fails.
    """
    compiler, version = _gcc()
    try:
        return _declare(ctypes.CDLL(str(_built(compiler, version))))
    except OSError as error:
        raise Unavailable(f"the kernels could not be loaded: {error}") from error


def _gcc() -> tuple[str, str]:
    """A C++ compiler, and what it says of its version."""
    missed = []
    for name in _COMPILERS:
        if (found := shutil.which(name)) is None:
            missed.append(f"no {name}")
            continue
        try:
            version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_S).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            missed.append(str(error))
            continue
        if "Free Software Foundation" in version:
            return found, version
        missed.append(f"{found} is not GCC")
    raise Unavailable(f"no C++ compiler of GCC ({'; '.join(missed)})")


def _built(compiler: str, version: str) -> Path:
    openmp = _openmp()
    command = [compiler, *_FLAGS]
    if platform.machine() == "x86_64":
        command.append("-mprefer-vector-width=512")
    path = _place(f"kernels-{_key(command, version, openmp)}.so")
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


def _place(name: str) -> Path:
    """Where the library is, or is to be made."""
    try:
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-mega"
        if (kept / name).exists():
            return kept / name
        kept.mkdir(parents=True, exist_ok=True)
        if os.access(kept, os.W_OK | os.X_OK):
            return kept / name
        why = f"{kept} cannot be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        why = str(error)
    try:
        own = Path(tempfile.gettempdir()) / f"areal-mega-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        info = own.lstat()
    except OSError as error:
        raise Unavailable(f"there is no folder to keep the kernels in: {error}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise Unavailable(f"{own} is not a folder of this user alone: whoever else writes there could have their code run")
    log.info("the kernels are kept in %s: %s", own, why)
    return own / name


def _key(command: list[str], version: str, openmp: Path) -> str:
    """Another source, compiler, CPU or OpenMP library is another file: a home may be shared by unlike machines."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    parts = (
        *(source.read_text() for source in SOURCES),
        " ".join(command),
        version,
        platform.machine(),
        " ".join(sorted(cpu.split())),
        str(openmp),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _build(command: list[str], openmp: Path, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernels.so"
            parts = {str(source): f"{folder}/{source.stem}.o" for source in SOURCES if source.suffix == ".cpp"}
            for step in (
                *([*command, "-c", source, "-o", part] for source, part in parts.items()),
                # A function that is nowhere is an error here, not when it is called.
                [command[0], "-shared", "-Wl,-z,defs", *parts.values(), str(openmp), "-o", str(made)],
            ):
                done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=_BUILD_S)
                if done.returncode:
                    raise Unavailable(f"{' '.join(step)} failed: {_reason(done.stderr)}")
            os.replace(made, path)  # whole or not at all, whoever builds beside
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the kernels could not be built in {path.parent}: {error}") from error


def _reason(message: str) -> str:
    """The line that says it: linkers begin with where."""
    lines = (message.strip() or "no message").splitlines()
    return next((line for line in lines if "undefined reference" in line or "error:" in line), lines[0])


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
