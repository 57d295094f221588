"""Many units of work on a few threads, with a bound on the bytes under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

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
