"""Many units of work on a few threads, with a bound on the bytes under way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next allocation, for a program that does nothing but move tensors.

    By default every buffer of megabytes is mapped afresh, and the kernel clears its pages each time: that costs more than the copying
    (twice the whole conversion's time, measured). Other allocators are left alone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 1024**2)  # the largest that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 1024**3)
        libc.mallopt(_M_ARENA_MAX, 1)  # threads reuse what others freed: a third less memory, and fewer pages to clear


IN_FLIGHT = 256 * 1024**2


def run_units[T](
    units: Iterable[T],
    work: Callable[[T], None],
    *,
    workers: int,
    cost: Callable[[T], int],
    done: Callable[[T], None] = lambda unit: None,
    in_flight: int = IN_FLIGHT,
) -> None:
    """Call ``work`` on every unit; the first failure stops what has not begun and is raised.

    Args:
        cost: bytes that a unit needs while it is worked on. Units start while their sum is within ``in_flight``; a larger one runs alone.
        done: called in the caller's thread after each unit, in the order of completion.
    """
    assert workers > 0
    running: dict[Future[None], tuple[T, int]] = {}

    def collect() -> None:
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            unit, _ = running.pop(future)
            future.result()
            done(unit)

    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        try:
            for unit in units:
                size = cost(unit)
                while running and (len(running) >= 2 * workers or size + sum(s for _, s in running.values()) > in_flight):
                    collect()
                running[pool.submit(work, unit)] = (unit, size)
            while running:
                collect()
        except BaseException:
            for future in running:
                future.cancel()
            raise
