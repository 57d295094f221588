"""The script that makes SmolLM2 of a package: its pure parts (the whole of it needs the package)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from simulated_ranks import plain_config
from tiny_models import tiny_config

from areal_mega.core.errors import UserError
from areal_mega.models.registry import family_for


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "smollm2_from_package.py"
    spec = importlib.util.spec_from_file_location("smollm2_from_package", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gguf_names_are_the_whole_llama_table(script: ModuleType) -> None:
    hf = plain_config(tiny_config("llama"))
    wanted = {tensor.name for tensor in family_for(hf).table(hf).hf_tensors}
    names = [*script._OUTSIDE, *(f"blk.{layer}.{role}" for layer in range(2) for role in script._LAYER)]
    assert {script.hf_name(name) for name in names} == wanted
    with pytest.raises(UserError, match=r"blk\.0\.attn_norm_2\.weight is not one of a Llama model"):
        script.hf_name("blk.0.attn_norm_2.weight")


def test_rotary_pairs_become_halves(script: ModuleType) -> None:
    heads, head_dim, columns = 3, 8, 2
    halves = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(heads * head_dim, columns)
    pairs = halves.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(halves.shape)
    assert not np.array_equal(pairs, halves)
    assert np.array_equal(script.unpermute(pairs, heads), halves)
