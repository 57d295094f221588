"""Vocab-parallel log-probabilities equal a plain log-softmax, gradients included, whatever the chunk, padding or split."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from areal_mega.megatron.logprobs import vocab_parallel_logprobs

TOKENS, HIDDEN, VOCAB, PADDED = 37, 16, 40, 64


def make(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(PADDED, HIDDEN, generator=g)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=g), torch.randn(TOKENS, generator=g)


def plain(temperature: float) -> tuple[torch.Tensor, ...]:
    hidden, weight, targets, upstream = make()
    hidden.requires_grad_(), weight.requires_grad_()
    all_tv = (hidden @ weight[:VOCAB].T / temperature).log_softmax(-1)
    values = all_tv.gather(1, targets[:, None])[:, 0]
    (values * upstream).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    entropy = -(all_tv.exp() * all_tv).sum(-1)
    return values.detach(), entropy.detach(), hidden.grad, weight.grad


def compute(rank: int, world_size: int, *, temperature: float, chunk_rows: int) -> dict:
    hidden, weight, targets, upstream = make()
    rows = PADDED // world_size
    mine = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    group = torch.distributed.group.WORLD if world_size > 1 else None
    values, entropy = vocab_parallel_logprobs(
        hidden,
        mine,
        targets,
        temperature=temperature,
        vocab_start=rank * rows,
        vocab_size=VOCAB,
        group=group,
        chunk_bytes=chunk_rows * rows * 4,
    )
    assert not entropy.requires_grad
    (values * upstream).sum().backward()
    assert hidden.grad is not None and mine.grad is not None
    if group is not None:
        torch.distributed.all_reduce(hidden.grad)
    return {"values": values, "entropy": entropy, "hidden": hidden.grad, "weight": mine.grad}


def check(results: list[dict], temperature: float) -> None:
    values, entropy, grad_hidden, grad_weight = plain(temperature)
    for result in results:
        torch.testing.assert_close(torch.as_tensor(result["values"]), values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.as_tensor(result["entropy"]), entropy, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.as_tensor(result["hidden"]), grad_hidden, atol=1e-5, rtol=1e-5)
    whole = torch.cat([torch.as_tensor(r["weight"]) for r in results])
    torch.testing.assert_close(whole, grad_weight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("chunk_rows", [1, 10, 1000])
def test_one_rank(temperature: float, chunk_rows: int) -> None:
    check([compute(0, 1, temperature=temperature, chunk_rows=chunk_rows)], temperature)


@pytest.mark.parametrize("world_size", [2, 4])  # of four ranks one holds padding rows alone
def test_split_vocabulary(world_size: int) -> None:
    check(run_ranks(world_size, compute, temperature=0.7, chunk_rows=9), 0.7)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, 1), 1e4)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    values, entropy = vocab_parallel_logprobs(
        hidden, weight, torch.tensor([0, 1]), temperature=1.0, vocab_start=0, vocab_size=3, group=None
    )
    torch.testing.assert_close(values, torch.tensor([0.0, -2e4]))
    torch.testing.assert_close(entropy, torch.zeros(2))
