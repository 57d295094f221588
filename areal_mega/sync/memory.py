"""Memory that several ranks of one machine write into: the sender's buckets, so that no shard is sent to it.

The sender makes a nameless file in memory (``memfd_create``); the others open it through the sender's ``/proc`` entry and map it. The file
has no name and no limit of a mount, and is gone when the last process that mapped it ends, however that ends. Whether a rank can map it
shows by trying: on another machine, in another container or as another user there is no such file of that name. A system may refuse the
file, or a process the addresses for it: then there is no memory in common either.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from areal_mega.models.gather import Transport

log = logging.getLogger(__name__)
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
        mine = _map(fd, nbytes) if fd >= 0 else None
        others = [other for other in ranks if other != root]
        for other in others:
            _send(transport, other, letter if mine is not None else bytes(_LETTER))
        answers = [_receive(transport, other, 1)[0] for other in others]
        all_have = mine is not None and all(answers)
        for other in others:
            _send(transport, other, bytes([all_have]))
        return mine if all_have else None
    finally:
        if fd >= 0:
            os.close(fd)


def _make(nbytes: int) -> tuple[int, bytes]:
    """The file and the message about it; -1 and an empty message where the system has no such files, or refuses one of that size."""
    if not hasattr(os, "memfd_create"):
        return -1, bytes(_LETTER)
    name, fd = f"weights-{secrets.token_hex(8)}", -1
    try:
        fd = os.memfd_create(name)
        os.ftruncate(fd, nbytes)
    except OSError as error:  # a filter of system calls, or a limit on files
        log.info("no memory in common, shards are sent: %s", error)
        if fd >= 0:
            os.close(fd)
        return -1, bytes(_LETTER)
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


def _map(fd: int, nbytes: int) -> Tensor | None:
    import torch

    try:
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    except (OSError, ValueError) as error:  # too few addresses, or a file of another size
        log.info("memory in common cannot be mapped, shards are sent: %s", error)
        return None


def _send(transport: Transport, to: int, message: bytes) -> None:
    import torch

    transport.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to).wait()


def _receive(transport: Transport, source: int, nbytes: int) -> bytes:
    import torch

    buffer = torch.empty(nbytes, dtype=torch.uint8)
    transport.receive(buffer, source).wait()
    return buffer.numpy().tobytes()
