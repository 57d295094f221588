"""The kinds of failure that a person reads: their own mistake, an expired wait, a run that cannot go on, the death of a process."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake. The message is one line: what, where, the remedy. The CLI prints it and exits with 2."""


class RunFailed(RuntimeError):
    """The run cannot go on. The message says what stopped it; the CLI prints it and exits with 1."""


class DeadlineExceeded(TimeoutError):
    """A wait ran out. The message says what was awaited, for how long, and who is missing."""


class WorkerDied(RunFailed):
    """A process of the run ended when it should not have.

    Args:
        role: ``train``, ``rollout`` or ``server``.
        rank: rank within the role.
        cause: how it ended, e.g. ``killed by SIGKILL`` or ``exit code 1``.
        log: path of its log file.
        last_lines: the end of that log.
    """

    def __init__(self, *, role: str, rank: int, cause: str, log: str, last_lines: str) -> None:
        self.role, self.rank, self.cause, self.log, self.last_lines = role, rank, cause, log, last_lines
        indented = "\n".join("    " + line for line in last_lines.splitlines()) or "    (its log is empty)"
        super().__init__(f"{role} rank {rank} died: {cause}; log: {log}; its last lines:\n{indented}")
