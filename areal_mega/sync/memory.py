"""Memory that several ranks of one machine write into: the sender's buckets, so that no shard is sent to it.

The sender makes a nameless file in memory (``memfd_create``); the others open it through the sender's ``/proc`` entry and map it. The file
has no name and no limit of a mount, and is gone when the last process that mapped it ends, however that ends. Whether a rank can map it
shows by trying: on another machine, in another container or as another user there is no such file of that name.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from areal_mega.models.gather import Transport

_LETTER = 64
"""Bytes of the sender's message: process id, file descriptor and name."""


def common_buffer(transport: Transport, rank: int, root: int, ranks: Sequence[int], nbytes: int) -> Tensor | None:
    """A buffer [nbytes] of bytes that all ``ranks`` have in common, made by ``root``; None, on all of them, where one cannot map it.

    Collective over ``ranks``. Pages take memory once they are written.
    """
    if rank != root:
        letter = _receive(transport, root, _LETTER)
        mapped = _open(letter, nbytes)
        _send(transport, root, bytes([mapped is not None]))
        return mapped if _receive(transport, root, 1)[0] else None
    fd, letter = _make(nbytes)
    try:
        others = [other for other in ranks if other != root]
        for other in others:
            _send(transport, other, letter)
        answers = [_receive(transport, other, 1)[0] for other in others]
        all_have = fd >= 0 and all(answers)
        for other in others:
            _send(transport, other, bytes([all_have]))
        return _map(fd, nbytes) if all_have else None
    finally:
        if fd >= 0:
            os.close(fd)


def _make(nbytes: int) -> tuple[int, bytes]:
    """The file and the message about it; -1 and an empty message where the system has no such files."""
    if not hasattr(os, "memfd_create"):
        return -1, bytes(_LETTER)
    name = f"weights-{secrets.token_hex(8)}"
    fd = os.memfd_create(name)
    os.ftruncate(fd, nbytes)
    return fd, f"{os.getpid()} {fd} {name}".encode().ljust(_LETTER, b"\0")


def _open(letter: bytes, nbytes: int) -> Tensor | None:
    words = letter.rstrip(b"\0").decode().split()
    if not words:
        return None
    path = f"/proc/{words[0]}/fd/{words[1]}"
    try:
        # Elsewhere the same number may be any file of any process: look at its name before it is opened.
        if not os.readlink(path).startswith(f"/memfd:{words[2]}"):
            return None
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def _send(transport: Transport, to: int, message: bytes) -> None:
    import torch

    transport.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to).wait()


def _receive(transport: Transport, source: int, nbytes: int) -> bytes:
    import torch

    buffer = torch.empty(nbytes, dtype=torch.uint8)
    transport.receive(buffer, source).wait()
    return buffer.numpy().tobytes()
