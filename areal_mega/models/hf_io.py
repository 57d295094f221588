"""HuggingFace safetensors folders: a source that reads slices, and a writer that streams.

Reading and writing go tensor by tensor, so peak memory is about one tensor. A folder under construction has another name until it is
complete: a killed run leaves nothing that looks whole.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_mega.core.errors import UserError
from areal_mega.models.hf_config import first_line, load_hf_config
from areal_mega.models.rows import data_offsets, fsync_folder, read_full, tensor_bytes, write_file, write_full

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 1024**3
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
)
"""Files of a model folder that are not weights and travel with it, byte for byte."""


@dataclass(frozen=True, slots=True)
class HFTensorSpec:
    """Name, shape and dtype of one tensor of a HuggingFace model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def resolve_folder(path: str) -> Path:
    """A local folder as it is; a hub name downloaded (or found in the cache) first.

    Raises:
        UserError: if it is neither.
    """
    if Path(path).is_dir():
        return Path(path)
    load_hf_config(path)  # the plainer message for a path that is only a typo
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=[*COPIED, "*.safetensors", _INDEX]))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(f"model '{path}' could not be downloaded: {first_line(error)}") from None


class HFSource:
    """The tensors of a model folder (one safetensors file, or shards with an index) or hub name. Open files are mapped, not read.

    Raises:
        UserError: for a missing folder, index, shard or tensor, or a damaged file; the message names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = resolve_folder(str(path))
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._raw: dict[str, tuple[int, dict[str, int]]] = {}
        self._lock = threading.Lock()
        self._where = self._read_index()
        for file in sorted(set(self._where.values())):
            self._open(file)
        for name, file in self._where.items():
            if name not in self._names[file]:
                raise UserError(f"{self.folder / _INDEX} places tensor {name} in {file}, which lacks it; fetch the model again")
        for file, names in self._names.items():
            for name in sorted(names):  # a tensor that the index forgot is there all the same: it counts as one of the model's
                if self._where.setdefault(name, file) != file:
                    raise UserError(f"{self.folder}: tensor {name} is in {self._where[name]} and in {file}; fetch the model again")

    def _read_index(self) -> dict[str, str]:
        index, single = self.folder / _INDEX, self.folder / _SINGLE
        self._names: dict[str, frozenset[str]] = {}
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise UserError(f"{index} is damaged ({type(error).__name__}: {error}); fetch the model again") from None
        if single.is_file():
            self._open(_SINGLE)
            return dict.fromkeys(self._names[_SINGLE], _SINGLE)
        pickled = sorted(p.name for p in self.folder.glob("*.bin"))
        more = f"; {pickled[0]} is a pickle and never read: save the model as safetensors" if pickled else ""
        raise UserError(f"model folder {self.folder} has neither {_SINGLE} nor {_INDEX}{more}")

    def _open(self, file: str) -> None:
        path = self.folder / file
        if file in self._files:
            return
        if not path.is_file():
            raise UserError(f"{path} is missing, but {_INDEX} names it; fetch the model again")
        try:
            self._files[file] = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is truncated or damaged ({first_line(error)}); fetch the model again") from None
        self._names[file] = frozenset(self._files[file].keys())

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._where))

    def _file(self, name: str) -> Any:
        if name not in self._where:
            raise UserError(f"{self.folder}: tensor {name} is missing")
        return self._files[self._where[name]]

    def spec(self, name: str) -> HFTensorSpec:
        """Shape and dtype of a tensor, from the file's header."""
        view = self._file(name).get_slice(name)
        kind = view.get_dtype()
        if kind not in DTYPES:
            raise UserError(f"{self.folder}: tensor {name} has dtype {kind}, which is not read here; save the model in bf16 or fp32")
        return HFTensorSpec(name, tuple(view.get_shape()), DTYPES[kind])

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return self._file(name).get_tensor(name)

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """``tensor.narrow(dim, start, stop - start)``, reading no more than that where ``dim`` is 0."""
        view = self._file(name).get_slice(name)
        return view[(*(slice(None),) * dim, slice(start, stop))]

    def read_rows(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` (contiguous, of the tensor's dtype) with rows from ``start`` on. Unlike a mapped read this leaves nothing of the
        file in this process's memory; any number of threads may read at once.

        Raises:
            UserError: the file ends before.
        """
        spec, file = self.spec(name), self._where[name]
        assert out.dtype == spec.dtype, f"{name}: {spec.dtype} into {out.dtype}"
        with self._lock:
            if file not in self._raw:
                fd = os.open(self.folder / file, os.O_RDONLY)
                self._stack.callback(os.close, fd)
                self._raw[file] = (fd, data_offsets(self.folder / file))
        fd, offsets = self._raw[file]
        row = spec.nbytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
        try:
            read_full(fd, tensor_bytes(out), offsets[name] + start * row, self.folder / file)
        except OSError as error:
            raise UserError(f"{self.folder / file} cannot be read ({first_line(error)}); fetch the model again") from None

    def stamp(self) -> list[list[Any]]:
        """Name, size and time of change of every weight file: equal stamps mean the same content."""
        files = sorted(set(self._where.values()))
        return [[file, (self.folder / file).stat().st_size, (self.folder / file).stat().st_mtime_ns] for file in files]

    def close(self) -> None:
        self._stack.close()
        self._files.clear()
        self._raw.clear()

    def __enter__(self) -> HFSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def model_files(source: str | Path) -> dict[str, bytes]:
    """Everything of a model folder (or hub name) but its weights: content by file name."""
    folder = resolve_folder(str(source))
    wanted = (path for path in sorted(folder.iterdir()) if path.is_file() and any(fnmatch(path.name, pattern) for pattern in COPIED))
    return {path.name: path.read_bytes() for path in wanted}


def copy_model_files(files: Mapping[str, bytes], out: Path) -> None:
    """Write what ``model_files`` gave, byte for byte and for good."""
    for name, content in files.items():
        write_file(out / name, content)


class HFWriter:
    """Streams a HuggingFace folder. The plan is known before the first tensor, so headers, shard names and the index are exact.

    Use as a context manager: the folder gets its name at a clean exit, and is removed after an error. Threads may write at once. The
    weights come first and config, tokenizer and index last, so that an unfinished folder is no model to anyone who finds it.

    Args:
        out: the folder to make. It must not exist, unless ``overwrite`` says to replace it.
        plan: every tensor to be written.
        source: model folder (or hub name) whose config, tokenizer and chat template are copied, or those files by name.
        shard_bytes: largest shard; a bigger tensor has one for itself.
        resume: tensors of the same plan that an interrupted writer completed. Given (even empty), the unfinished folder ``aside`` has a
            fixed name and stays after an error, so that a later writer can go on.
        stored: called when everything is stored for good, just before the folder gets its name.

    Raises:
        UserError: if ``out`` exists, or the disk is full.
    """

    def __init__(
        self,
        out: str | Path,
        plan: Sequence[HFTensorSpec],
        *,
        source: str | Path | Mapping[str, bytes],
        shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
        resume: Collection[str] | None = None,
        stored: Callable[[], None] = lambda: None,
    ) -> None:
        self.out, self._overwrite, self._keep, self._stored = Path(out), overwrite, resume is not None, stored
        if self.out.exists() and not overwrite:
            raise UserError(f"{self.out} exists; remove it or choose another folder")
        self.aside = self.out.with_name(f".{self.out.name}.partial" + ("" if self._keep else f"-{os.getpid()}"))
        self._model_files = source if isinstance(source, Mapping) else model_files(source)
        self._specs = {spec.name: spec for spec in plan}
        assert len(self._specs) == len(plan), "a plan names each tensor once"
        self._left = {name: spec.nbytes for name, spec in self._specs.items() if name not in (resume or ())}
        self._lock = threading.Lock()
        shards = _assign(plan, shard_bytes)
        self._total = sum(spec.nbytes for spec in plan)
        self._place: dict[str, tuple[str, int]] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        for number, shard in enumerate(shards, 1):
            file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            header, offsets = _header(shard)
            self._headers[file] = header
            self._place |= {name: (file, len(header) + offset) for name, offset in offsets.items()}
            self._sizes[file] = len(header) + sum(spec.nbytes for spec in shard)
        self._open: dict[str, int] = {}
        self._turns = {file: threading.Lock() for file in self._headers}

    def __enter__(self) -> HFWriter:
        if not self._keep:
            shutil.rmtree(self.aside, ignore_errors=True)
        try:
            with _disk(self.aside):
                self.aside.mkdir(parents=True, exist_ok=self._keep)
                for file, header in self._headers.items():
                    self._open[file] = os.open(self.aside / file, os.O_RDWR | os.O_CREAT, 0o666)
                    write_full(self._open[file], memoryview(header), 0)
        except UserError:
            self._abandon()
            raise
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor of the plan, in any order, each exactly once."""
        assert tuple(tensor.shape) == self._specs[name].shape, f"{name}: {tuple(tensor.shape)} is not the planned {self._specs[name].shape}"
        self.write_rows(name, 0, tensor)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Write rows of one tensor from ``start`` on (all of a tensor, or of a scalar, from 0); every row exactly once."""
        spec = self._specs[name]
        assert rows.dtype == spec.dtype, f"{name}: {rows.dtype} is not the planned {spec.dtype}"
        assert rows.shape[1:] == spec.shape[1:], f"{name}: rows of {tuple(rows.shape)} in {spec.shape}"
        content = tensor_bytes(rows.detach().cpu().contiguous())
        row = spec.nbytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
        with self._lock:
            assert len(content) <= self._left.get(name, -1), f"{name} was written already"
            self._left[name] -= len(content)
            if not self._left[name]:
                del self._left[name]
        file, offset = self._place[name]
        # The kernel lets one thread at a time write to a file, and the others spin on a core each; here they sleep.
        with self._turns[file], _disk(self.aside / file):
            write_full(self._open[file], content, offset + start * row)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Close files and remove what has no name yet (nothing, once the folder is renamed)."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()
        if not self._keep:
            shutil.rmtree(self.aside, ignore_errors=True)

    def _finish(self) -> None:
        assert not self._left, f"{len(self._left)} tensors were never written, e.g. {min(self._left)}"
        with _disk(self.aside):
            for handle in self._open.values():
                os.fsync(handle)
            if len(self._headers) > 1:
                index = {
                    "metadata": {"total_size": self._total},
                    "weight_map": {name: self._place[name][0] for name in sorted(self._place)},
                }
                copy_model_files({_INDEX: (json.dumps(index, indent=2) + "\n").encode()}, self.aside)
            copy_model_files(self._model_files, self.aside)
            fsync_folder(self.aside)
        for file, size in self._sizes.items():
            assert (self.aside / file).stat().st_size == size, f"{file} has another size than planned"
        self._stored()
        if self._overwrite and self.out.exists():
            old = self.aside.with_name(f"{self.aside.name}-replaced")
            self.out.rename(old)
            self.aside.rename(self.out)
            shutil.rmtree(old)
        else:
            with _disk(self.out):
                self.aside.rename(self.out)
        fsync_folder(self.out.absolute().parent)


class _disk:
    """Turns a failed write into one line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OSError):
            remedy = "raise the limit on file sizes (ulimit -f)" if error.errno == errno.EFBIG else "free space or choose another folder"
            raise UserError(f"cannot write {self._path}: {error.strerror or error}; {remedy}") from error


def _assign(plan: Sequence[HFTensorSpec], shard_bytes: int) -> list[list[HFTensorSpec]]:
    """Consecutive tensors into shards of at most ``shard_bytes`` (a larger tensor stands alone)."""
    shards: list[list[HFTensorSpec]] = [[]]
    used = 0
    for spec in plan:
        if shards[-1] and used + spec.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return shards


def _header(shard: Sequence[HFTensorSpec]) -> tuple[bytes, dict[str, int]]:
    """A safetensors header and each tensor's offset in the data. Wider dtypes come first, so that every tensor is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for spec in sorted(shard, key=lambda s: -s.dtype.itemsize):
        entries[spec.name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        offsets[spec.name] = end
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
