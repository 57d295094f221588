"""The program as a user runs it: in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import areal_mega

MINIMAL = "run: {name: x, steps: 3}\nmodel: {path: p}\nalgorithm: {correction: decoupled}\n"
HEAVY = ("torch", "megatron", "transformers", "datasets", "mlflow", "matplotlib", "numpy", "aiohttp", "rich")


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"} | environment
    return subprocess.run(
        [sys.executable, "-m", "areal_mega", *arguments], capture_output=True, text=True, timeout=120, env=env, check=False
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    return path


def imported(code: str) -> set[str]:
    """Top-level packages in ``sys.modules`` after ``code`` ran in a fresh interpreter."""
    listing = "print(chr(10) + ' '.join({m.split('.')[0] for m in sys.modules}))"
    probe = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n{listing}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["config", "show", "--help"],
        ["doctor", "--help"],
        ["report", "--help"],
        ["convert", "to-hf", "--help"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    found = imported(f"sys.argv = {['areal-mega', *arguments]!r}; from areal_mega.cli.main import main; main()")
    assert not found & set(HEAVY)
    assert "typer" in found


def test_light_rooms_import_no_torch() -> None:
    found = imported(
        "import areal_mega, areal_mega.core.types, areal_mega.config.loader, areal_mega.parallel, areal_mega.launch, areal_mega.cli.main"
    )
    assert not found & {"torch", "megatron", "transformers", "datasets", "mlflow", "matplotlib"}


def test_version_and_help() -> None:
    assert program("--version").stdout == f"areal-mega {areal_mega.__version__}\n"
    shown = program("--help")
    assert shown.returncode == 0
    for verb in ("train", "config", "doctor", "serve", "report", "--install-completion"):
        assert verb in shown.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    done = program("--show-completion", shell)
    assert done.returncode == 0
    assert "COMPLETE" in done.stdout


def test_overrides_complete() -> None:
    words = "areal-mega train r.yaml train.optimizer.l"
    done = program(_AREAL_MEGA_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="3")
    assert "train.optimizer.lr=" in done.stdout


def test_a_users_mistake_is_one_line_and_exit_2(recipe: Path) -> None:
    for arguments, expected in [
        (["train", str(recipe), "trian.batch_size=3"], "error: override trian.batch_size=3: unknown key 'trian'; did you mean 'train'?\n"),
        (["config", "show", str(recipe), "train.strategy=megatron:d2e3"], "2/3 is not a whole number"),
        (["train", str(recipe.parent / "nowhere.yaml")], "error: no recipe "),
        (["config", "show", str(recipe), "algorithm.clip_low=2"], "algorithm.clip_low [override algorithm.clip_low=2] is 2"),
    ]:
        done = program(*arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_wrong_use_of_the_program_is_exit_2() -> None:
    assert program("train").returncode == 2
    assert program("trane").returncode == 2
    assert program("train", "--nonsense").returncode == 2


def test_config_show_lists_value_unit_and_origin(recipe: Path) -> None:
    done = program("config", "show", str(recipe), "train.batch_size=4")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert lines["train.batch_size"] == ["4", "prompts", "override", "train.batch_size=4"]
    assert lines["run.name"] == ['"x"', f"{recipe}:1"]
    assert lines["rollout.max_new_tokens"] == ["1024", "tokens", "default"]
    assert lines["advantage"] == ["group_norm"]
    assert "Prompts (groups) per train step" not in done.stdout
    assert "Prompts (groups) per train step" in program("config", "show", str(recipe), "--explain").stdout


def test_config_show_json_covers_every_leaf(recipe: Path) -> None:
    from areal_mega.config.loader import load_recipe
    from areal_mega.config.provenance import leaves

    shown = json.loads(program("config", "show", str(recipe), "--json").stdout)
    assert {path: setting["value"] for path, setting in shown["settings"].items()} == {x.path: x.value for x in leaves(load_recipe(recipe))}
    assert shown["settings"]["sync.bucket_mb"] == {"value": 256.0, "unit": "MiB", "from": "default", "help": "Bytes broadcast at once"}
    assert shown["algorithm"]["correction"] == "decoupled"


@pytest.mark.parametrize(
    ("raised", "code", "stderr"),
    [
        ("errors.UserError('wrong here')", 2, "error: wrong here\n"),
        ("errors.DeadlineExceeded('waited 3 s for rank 1')", 1, "error: waited 3 s for rank 1\n"),
        (
            "errors.WorkerDied(role='train', rank=1, cause='killed by SIGKILL', log='l.log', last_lines='a')",
            1,
            "error: train rank 1 died: killed by SIGKILL; log: l.log; its last lines:\n    a\n",
        ),
        ("KeyboardInterrupt()", 130, ""),
    ],
)
def test_exit_codes(raised: str, code: int, stderr: str) -> None:
    program_text = (
        "import sys\nfrom areal_mega.cli import main as cli\nfrom areal_mega.core import errors\n"
        f"@cli.app.command('fail')\ndef fail() -> None:\n    raise {raised}\n"
        "sys.argv = ['areal-mega', 'fail']\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program_text], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    if stderr:
        assert done.stderr == stderr
    assert "Traceback" not in done.stderr


def test_our_own_faults_keep_their_traceback() -> None:
    program_text = (
        "import sys\nfrom areal_mega.cli import main as cli\n"
        "@cli.app.command('fail')\ndef fail() -> None:\n    raise RuntimeError('a bug')\n"
        "sys.argv = ['areal-mega', 'fail']\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program_text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("RuntimeError: a bug\n")
