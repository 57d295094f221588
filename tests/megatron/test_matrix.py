"""The parity matrix: every family at every kind of layout has transformers' logits and gradients, and exports what it loaded."""

from __future__ import annotations

from pathlib import Path

import parity_matrix as matrix
import pytest


@pytest.mark.parametrize("name", matrix.NAMES)
def test_a_family_equals_transformers_at_every_layout(name: str, tmp_path: Path) -> None:
    folder, reference = matrix.model(tmp_path, name)
    found = matrix.measure(folder, reference, matrix.layouts(name))
    assert found.keys() == set(matrix.layouts(name))
