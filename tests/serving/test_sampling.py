from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import forms
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.serving.native import choose
from areal_mega.serving.ops import Ops, make_ops
from areal_mega.serving.sampling import NotFinite, RowSampling, sample, uniforms


@pytest.fixture(scope="module", params=forms())
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(choose(request.param), torch.float32)


def params(rows: int, **columns: object) -> RowSampling:
    defaults: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 0, "position": 0}
    types = {"seed": np.uint64, "position": np.int64, "top_k": np.int64}
    filled = {k: np.broadcast_to(np.asarray(columns.get(k, v), types.get(k, np.float32)), (rows,)).copy() for k, v in defaults.items()}
    return RowSampling(**filled)


def frequencies(ops: Ops, logits: torch.Tensor, draws: int = 40_000, **columns: object) -> np.ndarray:
    tokens, _ = sample(logits.expand(draws, -1).contiguous(), params(draws, seed=np.arange(draws), **columns), ops)
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / draws


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    for u in (uniforms(np.arange(100_000), np.full(100_000, 7)), uniforms(np.full(100_000, 7), np.arange(100_000))):
        assert (u >= 0).all() and (u < 1).all()
        counts = np.histogram(u, 50, (0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 86  # chi-square, 49 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_their_probabilities(ops: Ops, temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, 0.5]])
    expected = torch.softmax(logits / temperature, -1)[0].numpy()
    observed = frequencies(ops, logits, temperature=temperature)
    assert ((observed - expected) ** 2 / expected).sum() * 40_000 < 20.5  # 5 degrees of freedom, p = 0.001


def test_a_large_vocabulary_is_drawn_with_its_probabilities(ops: Ops) -> None:
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(3))  # three blocks, the last one partly filled
    for columns in ({"temperature": 1.3}, {"top_k": 400}):
        weights = torch.softmax(logits / columns.get("temperature", 1.0), -1)[0].double()
        if "top_k" in columns:
            weights[weights.argsort(descending=True)[400:]] = 0.0
        expected = (weights / weights.sum()).numpy()
        observed, seen = frequencies(ops, logits, draws=20_000, **columns), expected > 0
        degrees = int(seen.sum()) - 1
        statistic = ((observed - expected)[seen] ** 2 / expected[seen]).sum() * 20_000
        assert observed[~seen].sum() == 0
        assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5  # p = 0.001


def test_limits_cut_and_keep_proportions(ops: Ops) -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]))
    for limit, kept in [({"top_k": 2}, 2), ({"top_p": 0.65}, 2), ({"top_p": 0.75}, 3), ({"min_p": 0.4}, 3), ({"top_k": 1}, 1)]:
        observed = frequencies(ops, logits, draws=20_000, **limit)
        expected = np.array([0.4, 0.3, 0.2, 0.06, 0.04]) * (np.arange(5) < kept)
        np.testing.assert_allclose(observed, expected / expected.sum(), atol=0.02)
        assert (observed[kept:] == 0).all()


def test_logprobs_are_scaled_by_temperature_and_not_by_limits(ops: Ops) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    rows = params(4, temperature=[0.0, 0.5, 1.0, 2.0], top_k=[-1, 1, 2, 3], seed=[1, 2, 3, 4])
    tokens, logprobs = sample(logits, rows, ops)
    scale = torch.tensor([1.0, 0.5, 1.0, 2.0])[:, None]
    expected = torch.log_softmax(logits / scale, -1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected)
    assert tokens[0] == logits[0].argmax() and tokens[1] == logits[1].argmax()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(2, 40), st.integers(0, 2**31), st.data())
def test_a_row_is_drawn_the_same_in_any_batch(ops: Ops, rows: int, vocab: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    columns = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7], rows),
        "top_p": rng.choice([0.2, 0.9, 1.0], rows),
        "top_k": rng.choice([-1, 1, 3, 100], rows),
        "min_p": rng.choice([0.0, 0.1], rows),
        "seed": rng.integers(0, 2**63, rows),
        "position": rng.integers(0, 1000, rows),
    }
    tokens, logprobs = sample(logits, params(rows, **columns), ops)
    assert (tokens >= 0).all() and (tokens < vocab).all() and torch.isfinite(logprobs).all()
    order = data.draw(st.permutations(range(rows)))
    again, _ = sample(logits[order], params(rows, **{k: v[order] for k, v in columns.items()}), ops)
    assert again.tolist() == tokens[order].tolist()


def test_impossible_tokens_are_never_drawn(ops: Ops) -> None:
    logits = torch.full((2000, 50), float("-inf"))
    logits[:, 49] = 0.0
    logits[:, 10] = -2.0
    tokens, _ = sample(logits, params(2000, seed=np.arange(2000)), ops)
    assert set(tokens.tolist()) == {10, 49}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 7, 299])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_named_by_row(ops: Ops, bad: float, where: int, temperature: float) -> None:
    logits = torch.zeros(3, 300)
    logits[1, where] = bad
    with pytest.raises(NotFinite, match="logits are not finite") as caught:
        sample(logits, params(3, temperature=temperature, seed=[1, 2, 3]), ops)
    assert caught.value.row == 1
