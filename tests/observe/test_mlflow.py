"""MLflow for real: a local store, a server that is down, one that never answers, replay, and the same run after a resume."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fabricate
import pytest

from areal_mega.config.schema import ObserveSection
from areal_mega.core.errors import UserError
from areal_mega.core.metrics import last
from areal_mega.observe.mlflow_sink import MlflowState, metric_key, replay
from areal_mega.observe.observer import Observer
from areal_mega.observe.record import read_records


def section(**settings) -> ObserveSection:
    return ObserveSection(console="plain", report=False, **settings)


def run_steps(run: Path, observe: ObserveSection, first: int, count: int) -> None:
    with Observer(observe, run, fabricate.RECIPE) as observer:
        for step in range(first, first + count):
            observer.log(step, {"reward/mean": last(step / 10), "reward/odd name!": last(1.0)})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_local_store_has_every_step_and_the_recipe_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking import MlflowClient

    run = tmp_path / "demo"
    run_steps(run, section(), first=1, count=3)
    state = MlflowState.load(run)
    assert state is not None and state.run_id and state.status == "FINISHED"
    run_steps(run, section(), first=4, count=2)
    resumed = MlflowState.load(run)
    assert resumed is not None and resumed.run_id == state.run_id

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("areal-mega")
    runs = client.search_runs([experiment.experiment_id])
    assert [found.info.run_id for found in runs] == [state.run_id]
    assert runs[0].info.run_name == "demo" and runs[0].info.status == "FINISHED"
    assert runs[0].data.tags["algorithm.name"] == "grpo"
    history = sorted((m.step, m.value) for m in client.get_metric_history(state.run_id, "reward/mean"))
    assert history == [(step, step / 10) for step in range(1, 6)]
    assert client.get_metric_history(state.run_id, "reward/odd name_")
    artifact = Path(client.download_artifacts(state.run_id, "recipe.yaml", str(tmp_path)))
    assert artifact.read_text() == (run / "recipe.yaml").read_text()

    # The answer to "create" got lost: the run is found again by its tag, and equal points are kept once.
    resumed.run_id, resumed.sent_bytes = None, 0
    resumed.save(run)
    assert replay(run) == 5
    assert len(client.search_runs([experiment.experiment_id])) == 1
    assert len(client.get_metric_history(state.run_id, "reward/mean")) == 5
    assert "Traceback" not in "".join(capfd.readouterr())


SILENT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_mlflow import run_steps, section
run_steps(Path(sys.argv[1]), section(mlflow_uri=sys.argv[2]), first=1, count=5)
print("went on")
"""


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections (the kernel does) and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["silent", "down"])
def test_a_server_that_hangs_or_is_down_stops_neither_the_run_nor_its_exit(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    with silent_server() if kind == "silent" else contextlib.nullcontext(f"http://127.0.0.1:{free_port()}") as uri:
        done = subprocess.run(
            [sys.executable, "-c", SILENT, str(run), uri, str(Path(__file__).parent)],
            env={**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "went on" in done.stdout and "Traceback" not in done.stderr
    assert [r.step for r in read_records(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert "lacks 5 steps" in done.stdout and "python -m areal_mega.observe.mlflow_sink" in done.stdout
    state = MlflowState.load(run)
    assert state is not None and state.run_id is None and state.sent_bytes == 0


@pytest.mark.slow
def test_what_a_server_missed_is_sent_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    uri, run = f"http://127.0.0.1:{port}", tmp_path / "demo"
    run_steps(run, section(mlflow_uri=uri), first=1, count=4)
    argv = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts")]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "mlflow", *argv], stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not _healthy(uri):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.3)
        sent = subprocess.run(
            [sys.executable, "-m", "areal_mega.observe.mlflow_sink", str(run)], capture_output=True, text=True, timeout=120, check=False
        )
        assert sent.returncode == 0, sent.stderr
        assert sent.stdout.strip() == "sent 4 steps"
        state = MlflowState.load(run)
        assert state is not None
        with urllib.request.urlopen(f"{uri}/api/2.0/mlflow/metrics/get-history?run_id={state.run_id}&metric_key=reward/mean") as answer:
            assert sorted(point["step"] for point in json.load(answer)["metrics"]) == [1, 2, 3, 4]
        with urllib.request.urlopen(f"{uri}/api/2.0/mlflow/artifacts/list?run_id={state.run_id}") as answer:
            assert [entry["path"] for entry in json.load(answer)["files"]] == ["recipe.yaml"]
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _healthy(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_an_address_that_is_no_server_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"observe.mlflow_uri './mlruns' is neither a server"):
        Observer(section(mlflow_uri="./mlruns"), tmp_path, fabricate.RECIPE)


def test_replaying_an_untracked_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not tracked with MLflow"):
        replay(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"), [("reward/mean", "reward/mean"), ("a//b", "a/b"), ("../x", "x"), ("/é,b%", "é_b_"), ("", "_"), ("n" * 300, "n" * 250)]
)
def test_odd_names_become_names_that_mlflow_takes(name: str, key: str) -> None:
    assert metric_key(name) == key


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "import sys, areal_mega.observe.observer; sys.exit(bool({'torch', 'mlflow', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
