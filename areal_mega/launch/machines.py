"""Where the processes of a run live: what the controller asks of a launcher, and the launcher of one machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Protocol

from areal_mega.config.schema import Recipe
from areal_mega.launch.commands import visible_devices
from areal_mega.launch.local import LocalLauncher, ProcessSpec
from areal_mega.launch.rundir import Key, RunDir
from areal_mega.launch.watching import Absent
from areal_mega.parallel.placement import place
from areal_mega.parallel.strategy import parse
from areal_mega.rpc.wire import listen_socket


class Launcher(Protocol):
    """The processes of one attempt."""

    leaving: asyncio.Event
    """Set when a machine that the attempt cannot do without was told to end: there are moments to save in, then the attempt fails."""

    async def launch(self, specs: Iterable[ProcessSpec]) -> None:
        """Start processes; returns before they are ready. A process that has ended may be started again under its key."""

    async def wait_ready(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        """Wait until all of ``keys`` have announced themselves; returns what they announced.

        Raises:
            WorkerDied, UserError: a process ended meanwhile.
            DeadlineExceeded: ``launch.startup_timeout_s`` passed; names who is missing.
        """

    async def supervise[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; the unexpected end of a process ends it.

        Raises:
            WorkerDied, UserError: why; otherwise whatever ``work`` raises.
        """

    def survive(self, keys: Iterable[Key]) -> None:
        """From now on the unexpected end of these (alone) does not end the run: ``losses`` tells of it.

        So too the loss of a machine with none but these on it, as ``MachineLost`` for each of them.
        """

    def losses(self) -> list[tuple[Key, Exception]]:
        """Whom of those the run survives it has lost since the last call, and the error that it would have been. Does not wait."""

    async def kill(self, key: Key) -> None:
        """End one process at once, as a death like any other: it is told of as such. Nothing where it has ended, or its machine is gone."""

    async def reach(self, key: Key) -> None:
        """Wait, however long it takes, until the machine of a process is there."""

    async def absent(self) -> list[Absent]:
        """The machines that are not there."""

    async def close(self) -> None:
        """End everything."""


class Machines(Protocol):
    """The machines of a run: where each process goes, and how it is started there."""

    def devices(self, key: Key) -> str:
        """``CUDA_VISIBLE_DEVICES`` of a process: its GPUs, by the names that its own machine's are known by there. Empty: none."""

    async def launcher(self, run_dir: RunDir, say: Callable[[str], None]) -> Launcher:
        """For a new attempt. Waits for machines without which it cannot begin; ``say`` gets a line now and then while it does."""

    def is_here(self, key: Key) -> bool:
        """Whether the machine of a process is there. Known once there is a launcher; where it is not, see ``Launcher.reach``."""

    def host(self, key: Key) -> str:
        """The address where a process listens. Known once there is a launcher."""

    async def ports(self, keys: Sequence[Key]) -> dict[Key, int]:
        """A free port for each process, on its machine."""

    async def close(self, why: str, *, goes_on: bool) -> None:
        """The run is over; ``why`` is empty where all went well. ``goes_on``: it was stopped, and may go on with the same machines."""


class ThisMachine:
    """All processes here.

    Raises:
        UserError: the strategies do not fit the machine, or ``launch.host`` is no address of it.
    """

    def __init__(self, recipe: Recipe, device: Literal["cpu", "cuda"]) -> None:
        self._launch = recipe.launch
        self._device = device
        listen_socket(self._launch.host, 0).close()
        self._placement = place(parse(recipe.train.strategy), parse(recipe.rollout.strategy), recipe.launch.slots, device)

    def devices(self, key: Key) -> str:
        role, rank = key
        if self._device == "cpu" or role not in ("train", "server"):
            return ""
        return visible_devices(self._placement.slots("train" if role == "train" else "server", rank), os.environ)

    async def launcher(self, run_dir: RunDir, say: Callable[[str], None]) -> LocalLauncher:
        return LocalLauncher(run_dir, startup_timeout_s=self._launch.startup_timeout_s, shutdown_timeout_s=self._launch.shutdown_timeout_s)

    def is_here(self, key: Key) -> bool:
        return True

    def host(self, key: Key) -> str:
        return self._launch.host

    async def ports(self, keys: Sequence[Key]) -> dict[Key, int]:
        return dict(zip(keys, free_ports(self._launch.host, len(keys)), strict=True))

    async def close(self, why: str, *, goes_on: bool) -> None:
        return None


def free_ports(host: str, count: int) -> list[int]:
    """Distinct free ports of this machine: all are held until all are known.

    Raises:
        UserError: ``host`` is no address of this machine.
    """
    with ExitStack() as stack:
        probes = [stack.enter_context(listen_socket(host, 0)) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
