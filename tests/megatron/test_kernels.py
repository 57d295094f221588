"""Gradients written out by hand equal autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_mega.megatron import kernels
from areal_mega.megatron.logprobs import vocab_parallel_logprobs

EPS = 1e-5


def same(mine: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 2e-6) -> None:
    """Results and gradients, for a random gradient of the result."""
    results = []
    for function in (mine, plain):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        torch.manual_seed(5)
        out.backward(torch.randn_like(out))
        results.append([out.detach(), *[leaf.grad for leaf in leaves]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_rms_norm() -> None:
    x, weight = torch.randn(7, 3, 48), torch.rand(48) + 0.5
    same(lambda x, w: kernels.rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, w.shape, w, EPS), x, weight, tolerance=1e-5)


def test_rms_norm_in_bf16_keeps_its_statistics_in_fp32() -> None:
    x, weight = (100 * torch.randn(5, 512)).bfloat16(), torch.rand(512).bfloat16()
    exact = F.rms_norm(x.float(), weight.shape, weight.float(), EPS)
    assert torch.equal(kernels.rms_norm(x, weight, EPS), exact.bfloat16())


@pytest.mark.parametrize("rotary", [16, 8])
def test_rotation(rotary: int) -> None:
    angles = torch.randn(9, 1, rotary // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def plain(t: Tensor) -> Tensor:
        first, rest = t[..., :rotary], t[..., rotary:]
        swapped = torch.cat((-first[..., rotary // 2 :], first[..., : rotary // 2]), dim=-1)
        return torch.cat((first * cos + swapped * sin, rest), dim=-1)

    same(lambda t: kernels.rotate(t, cos, sin), plain, torch.randn(9, 4, 16))


@pytest.mark.parametrize("bias", [False, True])
def test_gated_activation(bias: bool) -> None:
    def plain(x: Tensor, *b: Tensor) -> Tensor:
        gate, up = (x + b[0] if b else x).chunk(2, dim=-1)
        return F.silu(gate) * up

    inputs = [torch.randn(6, 1, 20), *([torch.randn(20)] if bias else [])]
    same(lambda x, *b: kernels.bias_swiglu(x, b[0] if b else None), plain, *inputs)


def test_experts() -> None:
    counts, hidden, width = [3, 0, 5], 12, 10
    weights = [torch.randn(2 * width, hidden) for _ in counts] + [torch.randn(hidden, width) for _ in counts]

    def mine(tokens: Tensor, probs: Tensor, *weights: Any) -> Tensor:
        return kernels.gated_experts(tokens, probs, counts, list(weights[:3]), list(weights[3:]))

    def plain(tokens: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        out = []
        for part, p, up, down in zip(tokens.split(counts), probs.split(counts), weights[:3], weights[3:], strict=True):
            gate, value = (part @ up.T).chunk(2, dim=-1)
            out.append((F.silu(gate) * value * p[:, None]) @ down.T)
        return torch.cat(out)

    same(mine, plain, torch.randn(8, hidden), torch.rand(8), *weights, tolerance=2e-5)


def test_gradients_go_into_the_buffer_where_there_is_one() -> None:
    weight = nn.Parameter(torch.randn(6, 4).bfloat16())
    grad, tokens = torch.randn(5, 6).bfloat16(), torch.randn(5, 4).bfloat16()
    expected = kernels.add_weight_gradient(weight, grad, tokens)
    assert expected is not None
    weight.main_grad = torch.ones(6, 4)  # type: ignore[attr-defined]
    assert kernels.add_weight_gradient(weight, grad, tokens) is None
    torch.testing.assert_close(weight.main_grad, 1 + expected.float())
    table = nn.Parameter(torch.randn(9, 4))
    ids = torch.tensor([[1, 3, 1]])
    kernels.Functional.embedding(ids, table).sum().backward()
    assert table.grad is not None and table.grad[:, 0].tolist() == [0, 2, 0, 1, 0, 0, 0, 0, 0]
    table.grad, table.main_grad = None, torch.zeros(9, 4)  # type: ignore[attr-defined]
    for _ in range(2):
        kernels.Functional.embedding(ids, table).sum().backward()
    assert table.grad is None and table.main_grad[:, 0].tolist() == [0, 4, 0, 2, 0, 0, 0, 0, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kept_and_recomputed_logits_give_the_same_gradients(temperature: float) -> None:
    targets = torch.randint(0, 30, (11,))

    def with_keep(keep_bytes: int) -> Callable[..., Tensor]:
        def function(hidden: Tensor, weight: Tensor) -> Tensor:
            return vocab_parallel_logprobs(
                hidden,
                weight,
                targets,
                temperature=temperature,
                vocab_start=0,
                vocab_size=30,  # two rows of padding
                group=None,
                chunk_bytes=4 * 32 * 4,
                keep_bytes=keep_bytes,
            )[0]

        return function

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight[:30].T / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    inputs = torch.randn(11, 8), torch.randn(32, 8)
    for keep_bytes in (0, 1 << 20):
        same(with_keep(keep_bytes), plain, *inputs, tolerance=1e-5)
