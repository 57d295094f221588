"""Whether the machines have room for what their ranks are about to copy to host memory."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from areal_mega.core.errors import UserError

Share = tuple[str, int]
"""A machine, and bytes that one of its ranks will take there."""


def machine() -> str:
    """The same for all processes that share this memory, containers or not: Linux' id of this boot, else the host's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.is_file() else platform.node()


def available() -> int | None:
    """Bytes that can be taken without swapping, as Linux estimates them; None on other systems, which say nothing like it."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return None
    lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def check_host_memory(shares: Sequence[Share], here: str, free: int | None) -> None:
    """Refuse copies that do not fit.

    Args:
        shares: of all ranks.
        here: this rank's machine.
        free: see ``available``, before any rank begins to copy.

    Raises:
        UserError: with what is needed and what there is.
    """
    mine = [nbytes for where, nbytes in shares if where == here]
    if free is not None and sum(mine) > free:
        raise UserError(
            f"a recover checkpoint copies {sum(mine) / 1e9:.2f} GB of {len(mine)} ranks to the memory of {platform.node()}, which has "
            f"{free / 1e9:.2f} GB available; spread train.strategy over more machines, free memory, or set checkpoint.recover_every_steps=0"
        )
