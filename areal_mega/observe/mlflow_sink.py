"""MLflow, fed from ``metrics.jsonl`` by a background thread.

The file is the spool: the thread remembers in ``<run>/mlflow.json`` which MLflow run this is and up to which byte the file was
sent. So a tracking server that is down, slow or silent costs the run nothing, what it missed follows when it is back or when the run
is resumed, and a resumed run goes on under its own id. Delivery is at least once: MLflow's database keeps one of two equal points.

``python -m areal_mega.observe.mlflow_sink RUN`` sends what is left after the run has ended.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import posixpath
import re
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from areal_mega.core.errors import UserError
from areal_mega.observe.record import METRICS_FILE, StepRecord, whole_lines

STATE_FILE = "mlflow.json"
ARTIFACTS = ("recipe.yaml", "report.html")
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

# One attempt that fails fast: waiting and trying again is this module's affair, where it is bounded and can be cut short.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_BATCH = 1000  # metrics in one request, MLflow's limit
_LONGEST_PAUSE_S = 60.0
_SCHEMES = ("http://", "https://", "sqlite:", "postgresql", "mysql", "mssql", "databricks")


@dataclass(slots=True, kw_only=True)
class MlflowState:
    """What outlives the process: which MLflow run this is, and how far it has been told."""

    uri: str
    experiment: str
    run_name: str
    tags: dict[str, str]
    uid: str
    """Ours, tagged on the run: a run that was created although the answer got lost is found again instead of made twice."""
    run_id: str | None = None
    sent_bytes: int = 0
    sent_artifacts: list[str] = field(default_factory=list)
    status: str | None = None

    @classmethod
    def load(cls, run_dir: Path) -> MlflowState | None:
        path = run_dir / STATE_FILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def save(self, run_dir: Path) -> None:
        aside = run_dir / f".{STATE_FILE}.{os.getpid()}"
        aside.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        aside.replace(run_dir / STATE_FILE)


def local_store_uri(root: Path) -> str:
    """The store used where the recipe names none: one database for all runs under ``root`` (MLflow no longer keeps its file store)."""
    return f"sqlite:///{root.absolute() / 'mlflow.db'}"


def check_uri(uri: str) -> None:
    """
    Raises:
        UserError: ``uri`` is no tracking server or database.
    """
    if not uri.startswith(_SCHEMES):
        raise UserError(
            f"observe.mlflow_uri {uri!r} is neither a server (http://…, https://…) nor a database (sqlite:///…, postgresql://…); "
            "remove it for a local store under run.root"
        )


def metric_key(name: str) -> str:
    """``name`` in the alphabet that MLflow accepts, so that one odd score name does not hold up all the others."""
    return posixpath.normpath(re.sub(r"[^\w./ :-]", "_", name)).lstrip("/.")[:250] or "_"


class Delivery:
    """Sends what has not been sent. Blocking; any failure is the caller's to wait out; nothing is lost by one."""

    def __init__(self, run_dir: Path, state: MlflowState) -> None:
        self.run_dir = run_dir
        self.state = state
        self._client: Any = None
        self._ready = False
        self.cut: int | None = None
        """Set where the file was cut back to so many bytes: what is beyond them now has not been sent."""

    def run(self) -> None:
        """Create or find the MLflow run if need be, then send new steps and the artifacts that exist."""
        client = self._connect()
        self._send_steps(client)
        for name in ARTIFACTS:
            if name not in self.state.sent_artifacts and (self.run_dir / name).exists():
                client.log_artifact(self.state.run_id, str(self.run_dir / name))
                self.state.sent_artifacts.append(name)
                self.state.save(self.run_dir)

    def finish(self, status: RunStatus) -> None:
        """``run``, then mark the MLflow run as ended."""
        self.run()
        self._client.set_terminated(self.state.run_id, status=status)
        self.state.status = status
        self.state.save(self.run_dir)

    @property
    def unsent_steps(self) -> int:
        path = self.run_dir / METRICS_FILE
        return len(whole_lines(path, self.state.sent_bytes)[0]) if path.exists() else 0

    def _connect(self) -> Any:
        if self._client is None:
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            from mlflow.tracking import MlflowClient

            for logger in ("mlflow", "alembic"):
                logging.getLogger(logger).setLevel(logging.WARNING)
            self._client = MlflowClient(tracking_uri=self.state.uri)
        if not self._ready:
            if self.state.run_id is None:
                self.state.run_id = self._find_or_create(self._client)
                self.state.save(self.run_dir)
            self._client.update_run(self.state.run_id, status="RUNNING")
            self._ready = True
        return self._client

    def _find_or_create(self, client: Any) -> str:
        state = self.state
        experiment = client.get_experiment_by_name(state.experiment)
        if experiment is not None:
            experiment_id = experiment.experiment_id
            found = client.search_runs([experiment_id], filter_string=f"tags.`areal_mega.uid` = '{state.uid}'", max_results=1)
            if found:
                return str(found[0].info.run_id)
        else:
            # A database on this file system needs a folder beside it; a server knows where its artifacts go.
            local = (self.run_dir.absolute().parent / "mlartifacts").as_uri() if state.uri.startswith("sqlite:") else None
            experiment_id = client.create_experiment(state.experiment, artifact_location=local)
        tags = {**state.tags, "areal_mega.uid": state.uid, "mlflow.user": getpass.getuser()}
        return str(client.create_run(experiment_id, run_name=state.run_name, tags=tags).info.run_id)

    def _send_steps(self, client: Any) -> None:
        from mlflow.entities import Metric

        cut, self.cut = self.cut, None
        if cut is not None:
            self.state.sent_bytes = min(self.state.sent_bytes, cut)
        lines, _ = whole_lines(self.run_dir / METRICS_FILE, self.state.sent_bytes)
        batch: list[Any] = []
        upto = self.state.sent_bytes
        for line in lines:
            record = StepRecord.from_line(line)
            points = [Metric(metric_key(name), value, int(record.time * 1000), record.step) for name, value in record.metrics.items()]
            if batch and len(batch) + len(points) > _BATCH:
                self._send(client, batch, upto)
                batch = []
            batch += points
            upto += len(line.encode()) + 1
        if upto > self.state.sent_bytes:
            self._send(client, batch, upto)

    def _send(self, client: Any, batch: list[Any], upto: int) -> None:
        for start in range(0, len(batch), _BATCH):
            client.log_batch(self.state.run_id, metrics=batch[start : start + _BATCH])
        self.state.sent_bytes = upto if self.cut is None else min(upto, self.cut)
        self.state.save(self.run_dir)


class MlflowSink:
    """The background thread around ``Delivery``.

    Args:
        run_dir: holds ``metrics.jsonl``; ``mlflow.json`` is kept there.
        uri: tracking server or database.
        experiment: its name, created where missing.
        run_name: shown in MLflow.
        tags: set when the MLflow run is created.
        on_trouble: called from the thread with one sentence when sending starts to fail, and when it works again.
    """

    def __init__(
        self, run_dir: Path, *, uri: str, experiment: str, run_name: str, tags: Mapping[str, str], on_trouble: Callable[[str], None]
    ) -> None:
        check_uri(uri)
        state = MlflowState.load(run_dir)
        if state is None or (state.uri, state.experiment) != (uri, experiment):
            uid = uuid.uuid4().hex if state is None else state.uid
            state = MlflowState(uri=uri, experiment=experiment, run_name=run_name, tags=dict(tags), uid=uid)
            state.save(run_dir)
        # A resumed run writes a new report when it ends.
        state.sent_artifacts = [name for name in state.sent_artifacts if name != "report.html"]
        self._delivery = Delivery(run_dir, state)
        self.rewound((run_dir / METRICS_FILE).stat().st_size if (run_dir / METRICS_FILE).exists() else 0)
        self._on_trouble = on_trouble
        self._wake = threading.Event()
        self._wake.set()
        self._closing = threading.Event()
        self._status: RunStatus | None = None
        self._trouble: str | None = None
        self._delivered = False
        # A daemon: a server that never answers cannot keep the run's process alive.
        self._thread = threading.Thread(target=self._loop, name="mlflow", daemon=True)
        self._thread.start()

    def rewound(self, size: int) -> None:
        """``metrics.jsonl`` has been cut back to ``size`` bytes; call before anything is added."""
        self._delivery.cut = size

    def notify(self) -> None:
        """There is something new in the run directory. Returns at once."""
        self._wake.set()

    def close(self, status: RunStatus, timeout_s: float | None = None) -> str | None:
        """Let the thread finish, for ``timeout_s`` at most (none: 30 s, or 120 s for a local database).

        Returns None, or a sentence on what MLflow did not take and the remedy.
        """
        if timeout_s is None:
            # A local database is only ever slow (making its tables, a busy machine); a server may be gone for good.
            timeout_s = 120.0 if self._delivery.state.uri.startswith("sqlite:") else 30.0
        self._status = status
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._delivered:
            return None
        run_dir = self._delivery.run_dir
        reason = self._trouble or f"no answer within {timeout_s:g} s"
        return (
            f"MLflow at {self._delivery.state.uri} lacks {self._delivery.unsent_steps} steps or the end of the run ({reason}); nothing "
            f"is lost: send them later with `python -m areal_mega.observe.mlflow_sink {run_dir}`"
        )

    def _loop(self) -> None:
        pause: float | None = None
        while True:
            if pause is None:
                self._wake.wait()
            else:
                self._closing.wait(pause)
            self._wake.clear()
            status = self._status
            try:
                self._delivery.run() if status is None else self._delivery.finish(status)
            # Whatever a tracking client raises (its own, HTTP's, the database's), the run must not feel it; it is told to the user.
            except Exception as error:
                pause = min(2 * (pause or 1.0), _LONGEST_PAUSE_S)
                self._tell(f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else 'no message'}")
            else:
                pause = None
                self._tell(None)
                self._delivered = status is not None
            if status is not None:
                return

    def _tell(self, trouble: str | None) -> None:
        where = self._delivery.state.uri
        if trouble is not None and self._trouble is None:
            self._on_trouble(f"MLflow at {where} cannot be reached ({trouble}); metrics wait in {METRICS_FILE}")
        elif trouble is None and self._trouble is not None:
            self._on_trouble(f"MLflow at {where} answers again; what it missed has been sent")
        self._trouble = trouble


def replay(run_dir: Path) -> int:
    """Send everything that MLflow has not had of a run that has ended. Returns the number of steps sent.

    Raises:
        UserError: the run never used MLflow.
        Exception: what the tracking client raised; what was sent until then stays sent.
    """
    state = MlflowState.load(run_dir)
    if state is None:
        raise UserError(f"{run_dir} has no {STATE_FILE}: the run was not tracked with MLflow (observe.mlflow)")
    delivery = Delivery(run_dir, state)
    steps = delivery.unsent_steps
    status: RunStatus = "FAILED" if state.status == "FAILED" else "KILLED" if state.status == "KILLED" else "FINISHED"
    delivery.finish(status)
    return steps


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m areal_mega.observe.mlflow_sink RUN_DIRECTORY")
    try:
        print(f"sent {replay(Path(sys.argv[1]))} steps")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
