"""Rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "areal_mega"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 400, 60
# These run code when they read data, so no message, checkpoint or cache of ours may use them.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
IDS = [str(path.relative_to(ROOT)) for path in MODULES]


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines besides its docstring"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        return first.end_lineno - first.lineno + 1
    return 0


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_nothing_unpickles(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & FORBIDDEN_IMPORTS
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            safe = {"weights_only": True, "allow_pickle": False}
            given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            assert any(given.get(name) is value for name, value in safe.items()), f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_nothing_is_left_to_write(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            assert ast.unparse(raised) != "NotImplementedError", f"line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert not swallows(node), f"line {node.lineno} catches everything and says nothing"


def swallows(handler: ast.ExceptHandler) -> bool:
    """A broad handler that neither raises, nor uses what it caught, nor logs it with its traceback."""
    if handler.type is not None and ast.unparse(handler.type) not in ("Exception", "BaseException"):
        return False
    inner = [node for statement in handler.body for node in ast.walk(statement)]
    uses = any(isinstance(node, ast.Name) and node.id == handler.name for node in inner)
    raises = any(isinstance(node, ast.Raise) for node in inner)
    logs = any(isinstance(node, ast.Attribute) and node.attr in ("exception", "format_exc") for node in inner)
    return not (uses or raises or logs)


def test_every_module_of_tests_has_a_name_of_its_own() -> None:
    """They are imported by their bare names: of two that share one, the second cannot be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= {"conftest.py", "__init__.py"}


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert len(text.splitlines()) > 150


def test_the_lock_is_pinned_hashed_and_names_no_registry() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*--?(index|extra-index|find-links|trusted)", text, re.MULTILINE)
    packages = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    pinned = [package for package in packages if re.match(r"[A-Za-z0-9]", package)]
    assert len(pinned) > 50
    for package in pinned:
        assert re.match(r"[A-Za-z0-9._-]+(\[[^\]]+\])?==[^\s\\]+", package), package[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package[:80]


def test_the_lock_covers_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    normal = re.compile(r"[-_.]+")
    locked = {
        normal.sub("-", m).lower()
        for m in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]+\])?==", (ROOT / "requirements.lock").read_text(), re.M)
    }
    names = {normal.sub("-", re.match(r"[A-Za-z0-9._-]+", w)[0]).lower() for w in wanted}  # type: ignore[index]
    assert names <= locked
    assert "apex" not in locked, "the apex of PyPI is not NVIDIA's"


def test_every_room_is_bound_by_the_import_contracts() -> None:
    """A room that no contract names could import anything."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = set(re.findall(r"areal_mega\.\w+", config["importlinter:contract:layers"]["layers"]))
    rooms = {f"areal_mega.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= layers


def test_imports_point_one_way() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_suite_runs_by_one_script() -> None:
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
    for script in sorted((ROOT / "scripts").glob("*.sh")):
        assert script.read_text().startswith("#!/usr/bin/env bash\n"), script.name
        assert "set -euo pipefail" in script.read_text(), script.name
        subprocess.run(["bash", "-n", script], check=True, timeout=30)
