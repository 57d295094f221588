"""How this process's allocator treats memory that is freed."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def keep_freed_memory(arenas: int | None = None) -> None:
    """Let glibc keep what is freed for the next allocation, in a program that makes and drops large arrays all the time.

    By default every buffer of megabytes is mapped afresh, and the kernel clears its pages each time: that costs more than copying them,
    and more still where another core is busy with memory too. At most a gibibyte is kept. Other allocators are left alone.

    Args:
        arenas: how many threads allocate side by side; with one, threads reuse what others freed (a third less memory of a
            conversion). None: as glibc has it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 1024**2)  # the largest that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 1024**3)
        if arenas is not None:
            libc.mallopt(_M_ARENA_MAX, arenas)
