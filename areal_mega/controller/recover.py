"""Recover checkpoints: when they are made, what of the controller is in them, which are kept, and how a run goes on from one.

    <run>/recover/step-N/           everything of a run after train step N; named so only when it is whole
      weights/ exp_avg/ exp_avg_sq/     by the train ranks (see ``checkpoint.recover``)
      state.json                        by the controller: step, version, prompts, counters

Generation and training go on while it is written: what stops the loop is the copying alone. Prompts under way are part of the state by
their ids; what was generated of them is not, and is generated again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_mega.config.schema import CheckpointSection, Recipe
from areal_mega.controller.train import TrainController
from areal_mega.core import metrics as m
from areal_mega.core import points as fault_points
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError
from areal_mega.core.metrics import Metrics

log = logging.getLogger(__name__)

STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")
_POLL_S = 0.2


class Stopped(RunFailed):
    """The run was asked to end, and has saved everything."""


class Terminated(RunFailed):
    """SIGTERM has ended the run: with everything saved, if the time was enough for it. Whoever sent it decides whether it begins again."""


@dataclass(frozen=True)
class RecoverPoint:
    """A complete recover checkpoint."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """The controller's part.

        Raises:
            UserError: it is damaged.
        """
        try:
            return dict(json.loads((self.path / STATE).read_text()))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / STATE} is damaged ({error}); remove {self.path} to resume from an earlier checkpoint") from error


def recover_folder(recipe: Recipe, run_dir: Path) -> Path:
    """Where a run's recover checkpoints lie."""
    root = recipe.checkpoint.recover_root
    return run_dir / "recover" if root is None else Path(root).absolute() / recipe.run.name


def points(folder: Path) -> list[RecoverPoint]:
    """The complete checkpoints of a run, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None and (path / STATE).is_file():
            found.append(RecoverPoint(path, int(match[1])))
    return sorted(found, key=lambda point: point.step)


def outdated(steps: list[int], keep: int, keep_every: int) -> list[int]:
    """Steps whose checkpoints go: all but the newest ``keep`` and every multiple of ``keep_every`` (0: none)."""
    newest = set(sorted(steps)[-keep:])
    return [step for step in sorted(steps) if step not in newest and not (keep_every and step % keep_every == 0)]


class Recovery:
    """Makes the recover checkpoints of one attempt.

    Args:
        folder: see ``recover_folder``.
        state: the controller's part, as plain JSON types, taken between two train steps.
    """

    def __init__(
        self, train: TrainController, section: CheckpointSection, folder: Path, state: Callable[[], dict[str, Any]], timeout_s: float
    ) -> None:
        self._train, self._section, self._folder, self._state = train, section, folder, state
        self._timeout_s = timeout_s
        self._pending: asyncio.Task[Metrics] | None = None
        self._metrics: list[Metrics] = []

    def due(self, step: int) -> bool:
        every = self._section.recover_every_steps
        return bool(every) and step % every == 0

    def has(self, step: int) -> bool:
        """Whether there is a whole checkpoint after train step ``step``."""
        return any(point.step == step for point in points(self._folder))

    async def save(self, step: int) -> None:
        """Begin a checkpoint after train step ``step``; waits first for one that is still being written.

        Raises:
            UserError: it cannot be written (a full disk, a read-only folder).
        """
        clock = time.perf_counter()
        await self.finish()
        waited = time.perf_counter() - clock
        await asyncio.to_thread(self._clear)
        state = self._state()
        begun = await self._train.call("recover_begin", place=str(self._folder / f"step-{step}"))
        state |= {"step": step, "train": begun[0]["counters"], "strategy": str(self._train.layout.strategy)}
        self._metrics.append(
            {
                "recover/wait_s": m.total(waited),
                "recover/stall_s": m.total(time.perf_counter() - clock),
                "recover/bytes": m.total(sum(answer["nbytes"] for answer in begun)),
            }
        )
        self._pending = asyncio.create_task(self._complete(step, json.dumps(state), time.perf_counter()))

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            UserError: it could not be written.
            DeadlineExceeded: a rank did not finish in time; names it.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._metrics.append(await pending)

    async def drain(self) -> list[Metrics]:
        """Measurements since the last call; raises what went wrong with a checkpoint that has ended meanwhile."""
        if self._pending is not None and self._pending.done():
            await self.finish()
        found, self._metrics = self._metrics, []
        return found

    async def close(self) -> None:
        """Give up what is being written; it never gets its name."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
            self._pending = None

    async def _complete(self, step: int, state: str, begun: float) -> Metrics:
        deadline = time.monotonic() + self._timeout_s
        while not all(done := await self._train.call("recover_done")):
            if time.monotonic() > deadline:
                late = [f"train rank {rank}" for rank, finished in enumerate(done) if not finished]
                raise DeadlineExceeded(f"recover checkpoint of step {step}: not written within {self._timeout_s:g} s by {', '.join(late)}")
            await asyncio.sleep(_POLL_S)
        await fault_points.reached("recover.written")
        await self._train.call("recover_commit", state=state)
        await fault_points.reached("recover.committed")
        await asyncio.to_thread(self._prune)
        log.info("recover checkpoint of step %d is complete", step)
        return {"recover/write_s": m.total(time.perf_counter() - begun)}

    def _clear(self) -> None:
        """Remove what a killed attempt left half-made or half-removed."""
        for left in self._folder.glob(".step-*"):
            shutil.rmtree(left)

    def _prune(self) -> None:
        there = {point.step: point.path for point in points(self._folder)}
        for step in outdated(list(there), self._section.keep, self._section.keep_every_steps):
            # Renamed first: a removal that is interrupted leaves nothing that looks whole.
            aside = there[step].with_name(f".{there[step].name}.removed")
            there[step].rename(aside)
            fault_points.reach("recover.pruning")
            shutil.rmtree(aside)
