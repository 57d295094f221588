"""What the ranks of one save say to each other: small JSON values, and whether anybody failed. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from areal_mega.core.errors import UserError


class Ranks:
    """The ranks of ``group`` (None: the default group; this process alone where there is none).

    Args:
        device: where the backend wants its tensors (CUDA for NCCL).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self._group, self._device = group, torch.device(device)
        self._alone = group is None and not dist.is_initialized()
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.size = 1 if self._alone else dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(content)], device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        longest = max(int(n) for n in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(content)] = content.to(self._device)
        buffers = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(buffers, padded, group=self._group)
        return [json.loads(bytes(b[: int(n)].cpu().numpy())) for b, n in zip(buffers, lengths, strict=True)]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks leave this block, or none does: where one fails the others fail too, naming it.

        Raises:
            UserError: another rank met a user's mistake (a full disk, say).
            RuntimeError: another rank failed otherwise.
        """
        try:
            yield
        except Exception as error:
            users = isinstance(error, UserError)
            self.gather([users, str(error) if users else f"{type(error).__name__}: {error}"])
            raise
        failed = [(rank, report) for rank, report in enumerate(self.gather(None)) if report is not None]
        if failed:
            rank, (users, message) = failed[0]
            raise (UserError(message) if users else RuntimeError(f"rank {rank} could not {what}: {message}"))
