"""Entry of every process of a run that is ours: ``python -m areal_mega.launch.worker ROLE --rank R --run-dir D --attempt A``.

Opens the run directory, sends all output to the process's log file, and calls ``areal_mega.launch.roles.<role>.main(context)``.
The same under the local launcher and under Slurm: nothing here depends on who started it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.launch.rundir import Key, RunDir

log = logging.getLogger(__name__)

USER_ERROR, FAILED = 2, 1
"""Exit codes."""

HOST_ENV = "AREAL_MEGA_HOST"
"""Environment variable: the address of this machine where the process listens, in place of ``launch.host``, which every machine shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a role's ``main`` gets."""

    role: str
    rank: int
    run_dir: RunDir
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.rank}"

    @property
    def host(self) -> str:
        """Where this process listens."""
        return os.environ.get(HOST_ENV) or self.recipe.launch.host

    @property
    def model_path(self) -> str:
        return self.run_dir.model_path(self.recipe)

    @property
    def token(self) -> str:
        return self.run_dir.token

    def announce(self, address: str, **info: Any) -> None:
        """Tell the controller and the other processes that this one is ready at ``host:port``; ``info`` is anything JSON holds."""
        self.run_dir.announce(self.role, self.rank, address, **info)
        log.info("ready at %s", address)

    def wait_for(self, keys: Iterable[Key], timeout_s: float | None = None) -> dict[Key, dict[str, Any]]:
        """Block until other processes have announced themselves. Default deadline: ``launch.startup_timeout_s``.

        Raises:
            DeadlineExceeded: names those that are missing.
        """
        return self.run_dir.wait_announced(keys, self.recipe.launch.startup_timeout_s if timeout_s is None else timeout_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one role to its end. Returns the exit code: 0; 2 for a user's mistake, which the launcher raises as such; 1 for the rest."""
    args = _parse(argv)
    try:
        run_dir = RunDir.open(args.run_dir, args.attempt)
    except UserError as error:  # no run directory: no log to write to, nowhere to report
        print(f"{args.role} rank {args.rank}: {error}", file=sys.stderr)
        return USER_ERROR
    _log_to(run_dir.log_path(args.role, args.rank))
    log.info("%s rank %d of %s, pid %d, attempt %s", args.role, args.rank, run_dir.path, os.getpid(), run_dir.attempt)
    try:
        context = WorkerContext(role=args.role, rank=args.rank, run_dir=run_dir, recipe=run_dir.read_recipe())
        importlib.import_module(f"areal_mega.launch.roles.{args.role}").main(context)
    except UserError as error:
        log.error("%s", error)
        run_dir.report_user_error(args.role, args.rank, str(error))
        return USER_ERROR
    except Exception:  # the process ends here: its log is what the launcher shows
        log.exception("%s rank %d failed", args.role, args.rank)
        return FAILED
    log.info("finished")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m areal_mega.launch.worker", description="One process of a run.")
    parser.add_argument("role", help="a module of areal_mega.launch.roles")
    parser.add_argument("--rank", type=int, required=True, help="rank within the role")
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory, as the controller made it")
    parser.add_argument("--attempt", required=True, help="folder of the run directory's rendezvous to join")
    return parser.parse_args(argv)


def _log_to(path: Path) -> None:
    """Send standard output and error to the log file, on the level of descriptors: native libraries write there too."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(fd, stream.fileno())
    os.close(fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1 PID: where it is stuck, in its log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True)


if __name__ == "__main__":
    sys.exit(main())
