from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from areal_mega.cli import doctor
from areal_mega.cli.main import app


def test_this_machine_is_fit_and_described() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert found["torch"]["state"] == "ok"
    assert torch.__version__ in found["torch"]["detail"]
    assert found["megatron-core"]["state"] == "ok"
    assert found["GPUs"]["state"] == ("ok" if torch.cuda.is_available() else "absent")
    assert all(finding["use"] and finding["detail"] for finding in found.values())
    assert {"Transformer Engine", "NVIDIA apex", "SGLang", "MLflow", "Slurm", "NCCL", "machine"} <= set(found)


def test_the_table_has_a_line_per_finding() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    for finding in doctor.examine():
        assert sum(line.split("  ")[0].strip() == finding.name for line in done.stdout.splitlines()) == 1


def test_nvidia_apex_is_told_from_the_other_one(tmp_path: Path) -> None:
    nvidia, other = tmp_path / "nvidia" / "apex", tmp_path / "other" / "apex"
    for folder in ("multi_tensor_apply", "optimizers", "normalization"):
        (nvidia / folder).mkdir(parents=True)
    (other / "templates").mkdir(parents=True)
    assert doctor.judge_apex([nvidia], has_kernels=True).state == "ok"
    assert doctor.judge_apex([nvidia], has_kernels=False).state == "broken"
    unrelated = doctor.judge_apex([other], has_kernels=True)
    assert unrelated.state == "unrelated"
    assert "uninstall" in unrelated.detail
    assert doctor.judge_apex([], has_kernels=False).state == "unrelated"


def test_the_other_apex_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert next(f for f in doctor.examine() if f.name == "NVIDIA apex").state == "unrelated"


def fake_interpreter(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "state", "detail"),
    [
        ("""echo '{"version": "0.5.2", "torch": "2.8.0", "gpus": 8}'""", "ok", "0.5.2 with torch 2.8.0, 8 GPUs"),
        ("""echo '{"version": null}'""", "absent", "not installed in"),
        ("echo 'ImportError: libcuda' >&2; exit 1", "broken", "ImportError: libcuda"),
    ],
)
def test_sglang_is_asked_in_its_own_interpreter(tmp_path: Path, body: str, state: str, detail: str) -> None:
    finding = doctor._sglang(fake_interpreter(tmp_path, body))
    assert finding.state == state
    assert detail in finding.detail


def test_missing_interpreter() -> None:
    assert doctor._sglang("/nowhere/python").state == "broken"


def test_slurm_is_all_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._slurm().state == "absent"
    for command in doctor.SLURM_COMMANDS:
        (tmp_path / command).write_text("#!/bin/sh\necho slurm 24.05\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    finding = doctor._slurm()
    assert (finding.state, finding.detail) == ("ok", "slurm 24.05")
    (tmp_path / "srun").unlink()
    if "srun" not in [f.name for f in Path("/usr/bin").iterdir()]:
        assert "not srun" in doctor._slurm().detail


def test_something_required_missing_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = doctor.Finding("torch", "broken", "gone", "nothing", required=True)
    monkeypatch.setattr(doctor, "examine", lambda python=None: [missing])
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
