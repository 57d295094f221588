"""The run directory: one folder per run, with logs by role and the place where the processes of one attempt find each other.

    <root>/<name>/
      recipe.yaml                              resolved recipe
      model/                                   weights made at random, where the recipe asks for them
      lock                                     held (flock) by the controller while the run lives
      replicas.json                            replicas that do not serve at the moment, and why
      logs/<role>-<rank>.log
      rendezvous/<attempt>/token               secret of the attempt, readable by the user alone
      rendezvous/<attempt>/<role>-<rank>.json  address and more, written by the process itself

Every attempt has a name of its own, so a file that an earlier attempt left behind, or writes late, is never read by this one. All
files that others wait for are written aside and renamed, and are looked for by listing the folder: both hold on a shared file system.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_mega.config.schema import Recipe
from areal_mega.core.errors import DeadlineExceeded, UserError

Key = tuple[str, int]
"""(role, rank)"""

REPLICAS_FILE = "replicas.json"
"""In the run directory: replicas that do not serve, and why."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=,+-]*")
_ROLE = re.compile(r"[a-z][a-z0-9_]*")
_POLL_S = 0.05


class RunDir:
    """Paths and rendezvous of one attempt at a run. ``create`` is the controller's, ``open`` everyone else's."""

    def __init__(self, path: Path, attempt: str, token: str) -> None:
        self.path = path
        self.attempt = attempt
        self.token = token
        """The attempt's secret: every call between its processes shows it."""
        self._lock: int | None = None

    @classmethod
    def create(cls, recipe: Recipe) -> RunDir:
        """Make ``<run.root>/<run.name>`` with a first attempt in it, and hold it until ``close`` or the end of this process.

        Raises:
            UserError: the directory exists (and ``run.overwrite`` is off, or it is no run directory, or its run is alive), cannot be
                made, or the name is not one path component.
        """
        run = recipe.run
        if not _NAME.fullmatch(run.name):
            raise UserError(f"run.name={run.name!r} is not a plain folder name; use letters, digits and _ . = , + -")
        path = Path(run.root).absolute() / run.name
        try:
            if path.exists():
                _make_way(path, overwrite=run.overwrite)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _mkdir(path):
                raise UserError(f"{path} exists now: another run of this name began at the same moment; choose another run.name")
            run_dir = cls(path, _new_attempt(), secrets.token_hex(32))
            run_dir._lock = _lock(path)
            run_dir._fill(recipe)
        except OSError as error:
            raise UserError(
                f"cannot make the run directory {path}: {error.strerror or error}; set run.root to a writable folder"
            ) from error
        return run_dir

    @classmethod
    def resume(cls, recipe: Recipe) -> RunDir:
        """A new attempt in the run directory that is there, held as by ``create``. Logs go on in their files.

        Raises:
            UserError: there is none, its run is alive, or it cannot be written.
        """
        path = Path(recipe.run.root).absolute() / recipe.run.name
        try:
            if not (path / "lock").is_file():
                raise UserError(f"run.resume: {path} is not a run directory (it has no lock file); choose another run.name")
            run_dir = cls(path, _new_attempt(), secrets.token_hex(32))
            run_dir._lock = _lock(path)
            run_dir._fill(recipe)
        except OSError as error:
            raise UserError(f"cannot resume in {path}: {error.strerror or error}; it must be writable") from error
        return run_dir

    def next_attempt(self, recipe: Recipe) -> None:
        """Begin another attempt in the same directory, which stays held: processes of the last one find nobody any more."""
        self.attempt, self.token = _new_attempt(), secrets.token_hex(32)
        self._fill(recipe)

    @classmethod
    def open(cls, path: str | Path, attempt: str) -> RunDir:
        """The run directory that a controller has made, as one of its processes sees it.

        Raises:
            UserError: there is no such attempt.
        """
        path = Path(path).absolute()
        try:
            return cls(path, attempt, (path / "rendezvous" / attempt / "token").read_text())
        except FileNotFoundError as error:
            raise UserError(f"no attempt {attempt} in {path}; was the run replaced, or is the file system not shared?") from error

    def close(self) -> None:
        """Let go of the directory; it may then be replaced."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous" / self.attempt

    def model_path(self, recipe: Recipe) -> str:
        """Where every process loads the model from: ``model.path``, or the folder made here where ``model.weights`` is random."""
        return str(self.path / "model") if recipe.model.weights == "random" else recipe.model.path

    def log_path(self, role: str, rank: int) -> Path:
        return self.path / "logs" / f"{_label(role, rank)}.log"

    def read_recipe(self) -> Recipe:
        return Recipe.model_validate(yaml.safe_load(self.recipe_path.read_text()))

    def announce(self, role: str, rank: int, address: str, **info: Any) -> None:
        """Tell the others where this process listens. ``info`` is anything JSON holds. A later call replaces an earlier one."""
        who = {"role": role, "rank": rank, "address": address, "pid": os.getpid(), "host": socket.gethostname()}
        assert not (clash := who.keys() & info.keys()), f"announce sets {sorted(clash)} itself"
        write_atomic(self.rendezvous / f"{_label(role, rank)}.json", json.dumps(who | info))

    def forget(self, role: str, rank: int) -> None:
        """Take back what a process announced that has ended: another one takes its place."""
        (self.rendezvous / f"{_label(role, rank)}.json").unlink(missing_ok=True)

    def announced(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        """What those of ``keys`` that are there have announced: ``role``, ``rank``, ``address``, ``pid``, ``host`` and their own info."""
        there = set(os.listdir(self.rendezvous))
        names = {key: f"{_label(*key)}.json" for key in keys}
        return {key: json.loads((self.rendezvous / name).read_text()) for key, name in names.items() if name in there}

    def wait_announced(self, keys: Iterable[Key], timeout_s: float) -> dict[Key, dict[str, Any]]:
        """Block until all of ``keys`` have announced themselves: how processes of a run find each other without the controller.

        Raises:
            DeadlineExceeded: names those that are missing.
        """
        wanted = tuple(keys)
        deadline = time.monotonic() + timeout_s
        while len(found := self.announced(wanted)) < len(wanted):
            if time.monotonic() > deadline:
                missing = ", ".join(f"{role} rank {rank}" for role, rank in wanted if (role, rank) not in found)
                raise DeadlineExceeded(f"not announced in {self.rendezvous} within {timeout_s:g} s: {missing}; see {self.path / 'logs'}")
            time.sleep(_POLL_S)
        return found

    def report_user_error(self, role: str, rank: int, message: str) -> None:
        """Leave a user's mistake that this process met, so that the launcher raises it as one instead of as a death."""
        write_atomic(self.rendezvous / f"{_label(role, rank)}.user-error.json", json.dumps({"message": message}))

    def user_error(self, role: str, rank: int) -> str | None:
        """What ``report_user_error`` left, if anything."""
        path = self.rendezvous / f"{_label(role, rank)}.user-error.json"
        return str(json.loads(path.read_text())["message"]) if path.exists() else None

    def show_replicas(self, absent: Mapping[int, str]) -> None:
        """Leave word, for whoever looks at the run, of the replicas that do not serve now, and why."""
        write_atomic(self.path / REPLICAS_FILE, json.dumps({str(rank): why for rank, why in sorted(absent.items())}))

    def _fill(self, recipe: Recipe) -> None:
        (self.path / "logs").mkdir(exist_ok=True)
        self.rendezvous.mkdir(parents=True)
        write_atomic(self.rendezvous / "token", self.token, mode=0o600)
        write_atomic(self.recipe_path, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write aside and rename: whoever looks sees the whole file or none."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _new_attempt() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def _label(role: str, rank: int) -> str:
    assert _ROLE.fullmatch(role) and rank >= 0, f"not a role and rank: {role!r}, {rank}"
    return f"{role}-{rank}"


def _mkdir(path: Path) -> bool:
    """Make a folder; False where something of that name is there. One step, so that of two runs at once only one succeeds."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _make_way(path: Path, *, overwrite: bool) -> None:
    """Remove a run directory of the same name, where the recipe says so and nobody uses it."""
    if not overwrite:
        raise UserError(
            f"run directory {path} exists; choose another run.name, or set run.overwrite=true to replace it, "
            "or run.resume=true to go on with it"
        )
    if not (path / "lock").is_file():
        raise UserError(
            f"run.overwrite=true, but {path} is not a run directory (it has no lock file); remove it by hand or choose another run.name"
        )
    held = _lock(path)
    try:
        aside = path.with_name(f".{path.name}.replaced-{secrets.token_hex(3)}")
        path.rename(aside)
        shutil.rmtree(aside)
    finally:
        os.close(held)


def _lock(path: Path) -> int:
    """Take the directory's lock. The kernel lets go of it when this process ends, however it ends."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 4096, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise UserError(f"run directory {path} is in use by {holder}; stop that run or choose another run.name") from error
    os.truncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd
