"""One real Slurm for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))  # these runs are those of tests/e2e, on tasks

from lab import LabUnavailable, SlurmLab
from submitted import Submitted


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab | None]:
    """The lab; None where AREAL_MEGA_TEST_SLURM=existing says that this machine's own Slurm is to be used."""
    if os.environ.get("AREAL_MEGA_TEST_SLURM") == "existing":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    lab = SlurmLab(folder / "lab")
    before = os.environ.get("SLURM_CONF")
    try:
        lab.up()
        os.environ.update(lab.env)
        yield lab
    except LabUnavailable as error:
        pytest.skip(f"no Slurm for these tests: {error}")
    finally:
        lab.down()
        shutil.rmtree(folder, ignore_errors=True)
        if before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = before


@pytest.fixture
def runs() -> Iterator[list[Submitted]]:
    """Runs put here are ended after the test."""
    found: list[Submitted] = []
    yield found
    for run in found:
        run.clean_up()
