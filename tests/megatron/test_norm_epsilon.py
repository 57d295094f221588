"""``rms_norm_eps`` reaches every norm, those of queries and keys too: at an epsilon that matters, logits are still transformers'."""

from __future__ import annotations

from pathlib import Path

import engine_cases as cases
import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import tiny_model


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "moonlight"])
def test_a_large_epsilon_reaches_every_norm(family: str, tmp_path: Path) -> None:
    logprobs = {}
    for eps in (1e-6, 0.5):
        folder = str(tiny_model(tmp_path / str(eps), family, rms_norm_eps=eps))
        (ours,) = run_ranks(1, cases.parity, folder=folder, strategy="megatron:d1")
        (theirs,) = run_ranks(1, cases.hf_logits, folder=folder)
        for index, values in enumerate(theirs["logprobs"]):
            np.testing.assert_allclose(ours["logprobs"][index], values, atol=1e-4)
        logprobs[eps] = theirs["logprobs"]
    apart = max(float(np.abs(logprobs[1e-6][index] - values).max()) for index, values in enumerate(logprobs[0.5]))
    assert apart > 1e-2, "the epsilon changes something"
