"""The entry that every process of ours goes through, run as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_children import alive, make_run, said

from areal_mega.core.errors import UserError, WorkerDied
from areal_mega.launch.commands import worker_spec
from areal_mega.launch.local import LocalLauncher, ProcessSpec
from areal_mega.launch.rundir import RunDir

SpecMaker = Callable[[str], ProcessSpec]

ROLE = """
import os, signal, subprocess, sys, time
from areal_mega.core.errors import UserError

def main(context):
    print("printed", flush=True)
    os.write(2, b"written by native code\\n")
    what = os.environ["WHAT"]
    if what == "announce":
        assert context.wait_for([(context.role, context.rank)] if False else [], 1) == {}
        context.announce("127.0.0.1:5", name=context.name, token=context.token, run=context.recipe.run.name)
        time.sleep(600)
    elif what == "user":
        raise UserError("model.path=x has no config.json")
    elif what == "bug":
        raise KeyError("missing")
    elif what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.fixture
def launcher(run_dir: RunDir) -> Iterator[LocalLauncher]:
    with LocalLauncher(run_dir, startup_timeout_s=60.0, shutdown_timeout_s=5.0) as launcher:
        yield launcher


@pytest.fixture
def echo(run_dir: RunDir, tmp_path: Path) -> SpecMaker:
    """Makes specs of a role `echo`, added to the package's roles from outside by a ``sitecustomize``."""
    (tmp_path / "echo.py").write_text(ROLE)
    hook = "import sys, importlib.util as u\nimport areal_mega.launch.roles as r\nr.__path__.append({!r})\n"
    (tmp_path / "sitecustomize.py").write_text(hook.format(str(tmp_path)))

    def make(what: str) -> ProcessSpec:
        path = os.pathsep.join([str(tmp_path), os.getcwd()])
        return worker_spec("echo", 0, run_dir=run_dir, recipe=run_dir.read_recipe(), device="cpu", env={"WHAT": what, "PYTHONPATH": path})

    return make


async def test_a_role_gets_its_context_and_announces_itself(launcher: LocalLauncher, run_dir: RunDir, echo: SpecMaker) -> None:
    launcher.start([echo("announce")])
    info = (await launcher.wait_ready([("echo", 0)]))["echo", 0]
    assert (info["address"], info["name"], info["token"], info["run"]) == ("127.0.0.1:5", "echo rank 0", run_dir.token, "one")
    log = run_dir.log_path("echo", 0)
    text = log.read_text()
    assert "printed\n" in text and "written by native code\n" in text and "ready at 127.0.0.1:5" in text
    os.kill(launcher.pid("echo", 0), signal.SIGUSR1)
    said(log, "in main")
    assert alive(launcher.pid("echo", 0))


async def test_a_users_mistake_is_raised_at_the_controller(launcher: LocalLauncher, run_dir: RunDir, echo: SpecMaker) -> None:
    launcher.start([echo("user")])
    with pytest.raises(UserError, match=r"^echo rank 0: model.path=x has no config.json$"):
        await launcher.wait_ready([("echo", 0)])
    assert launcher.exit_code("echo", 0) == 2
    assert "Traceback" not in run_dir.log_path("echo", 0).read_text()


@pytest.mark.parametrize(
    ("what", "cause", "words"),
    [
        ("bug", "exit code 1", "KeyError: 'missing'"),
        ("crash", "killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("nothing", "exit code 0", "finished"),
    ],
)
async def test_other_ends_are_deaths_with_a_trace_in_the_log(
    launcher: LocalLauncher,
    echo: SpecMaker,
    what: str,
    cause: str,
    words: str,
) -> None:
    launcher.start([echo(what)])
    with pytest.raises(WorkerDied) as caught:
        await launcher.wait_ready([("echo", 0)])
    assert caught.value.cause == cause and words in caught.value.last_lines


def test_a_worker_of_a_replaced_run_ends_at_once(run_dir: RunDir) -> None:
    argv = [sys.executable, "-m", "areal_mega.launch.worker", "train", "--rank=0", f"--run-dir={run_dir.path}", "--attempt=gone"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("train rank 0: no attempt gone in ") and done.stderr.count("\n") == 1


def test_importing_the_launcher_imports_no_heavy_library() -> None:
    code = "import sys, areal_mega.launch.worker, areal_mega.launch.commands, areal_mega.launch.local\n"
    code += "print(sorted({'torch', 'megatron', 'transformers', 'datasets', 'mlflow', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
