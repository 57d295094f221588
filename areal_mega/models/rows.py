"""Positional reads and writes in safetensors files: unmapped, so that memory holds no more than what is asked for; thread-safe.

And small files and names that survive a crash of the machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor


def data_offsets(path: Path) -> dict[str, int]:
    """Byte offset in the file of every tensor's data. The file was opened by the safetensors library before, which checks the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    assert tensor.is_contiguous(), "rows of a contiguous tensor are wanted"
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()).cast("B")


def read_full(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill ``out`` from ``offset`` on.

    Raises:
        OSError: the file ends before.
    """
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            raise OSError(f"{path} ends at byte {offset + done}")
        done += count


def write_full(fd: int, content: memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset``."""
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], offset + done)


def write_file(path: Path, content: bytes) -> None:
    """A small file, stored for good."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """The names in a folder are stored for good."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
