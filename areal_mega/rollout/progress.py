"""When waiting for more groups is hopeless: what ended in a row without a group to train on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from areal_mega.core.errors import RunFailed

_HOPELESS, _HOPELESS_LEAST = 16, 128
"""Give up when so many times a batch's prompts (and at least so many) ended in a row without a group to train on: rejecting and
filtering are part of some methods, and may hit many prompts."""
_BROKEN, _BROKEN_LEAST = 2, 8
"""The same for attempts that failed in a row: a workflow or verifier that fails every time is broken."""
_KINDS = ("rejected", "failed", "timed_out", "uniform", "lone")


class RolloutFailed(RunFailed):
    """Rollout makes no progress. The message says what became of the prompts."""


class Progress:
    """Counts in a row. ``last_reason`` is why the last prompt, or member of a group, gave nothing."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.useless = 0
        """Prompts in a row that gave no group to train on."""
        self.failed = 0
        """Attempts in a row that failed or timed out."""
        self.last_reason = ""

    def check(self, counts: Mapping[str, int]) -> None:
        """Raise where it is hopeless. ``counts``: since the start of the run, by outcome.

        Raises:
            RolloutFailed: prompt after prompt fails, or gives nothing to train on.
        """
        if self.failed >= max(_BROKEN * self._batch_size, _BROKEN_LEAST):
            raise RolloutFailed(f"{self.failed} prompts in a row failed; the last: {self.last_reason}")
        if self.useless >= max(_HOPELESS * self._batch_size, _HOPELESS_LEAST):
            shown = ", ".join(f"{counts[name]} {name}" for name in _KINDS if counts[name])
            raise RolloutFailed(
                f"{self.useless} prompts in a row gave no group to train on (since the start: {shown}); the last: {self.last_reason}"
            )

    def state(self) -> list[int | str]:
        return [self.useless, self.failed, self.last_reason]

    def restore(self, state: list[int | str]) -> None:
        useless, failed, reason = state
        self.useless, self.failed, self.last_reason = int(useless), int(failed), str(reason)
