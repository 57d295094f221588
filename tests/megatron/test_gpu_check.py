"""``scripts/gpu_check.sh`` with small shapes on the CPU: its real path, its tables, and that it fails where parity does."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check(*args: str) -> tuple[int, str]:
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *args]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=540, check=False)
    return done.returncode, done.stdout


def test_parity_and_speed_on_the_cpu() -> None:
    code, text = check("--python", sys.executable, "--device", "cpu", "--model", "moe", "--steps", "1", "--peak-tflops", "1")
    assert code == 0, text
    lines = text.splitlines()
    for dtype in ("fp32", "bf16"):
        (row,) = [line for line in lines if line.startswith(f"moe cpu {dtype}")]
        assert row.endswith("ok")
        # Other micro-batches and, in bf16, another precision: not the same computation twice.
        assert float(row.split()[5]) > 0
    (row,) = [line for line in lines if line.startswith("moe  ")]
    assert all(unit in row for unit in (" M", "%", " GB"))
    assert "of 1 TFLOP/s as given" in text


def test_wrong_weights_fail() -> None:
    code, text = check("--python", sys.executable, "--device", "cpu", "--model", "dense", "--steps", "1", "--inject", "0.5")
    assert code == 1, text
    assert "parity failed: dense cpu fp32" in text
    assert "of a large bf16 matrix product here" in text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    code, text = check("--wheels", str(tmp_path))
    assert (code, text) == (2, f"{tmp_path} holds no wheel\n")
    with zipfile.ZipFile(tmp_path / "yaml-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("yaml/__init__.py", "")
    bare = tmp_path / "python"  # an interpreter without any package
    bare.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -S "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    code, text = check("--wheels", str(tmp_path), "--python", str(bare))
    assert code == 2
    assert text.startswith("missing here: torch, ") and "yaml" not in text.split(";")[0]
