"""Every mapping splits and merges back exactly, at every legal size; what cannot be split is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_mega.core.errors import UserError
from areal_mega.models.table import (
    LOCAL,
    QKV,
    TRANSFORMER_ENGINE,
    HFTensor,
    Mapping,
    Param,
    Replicated,
    Split,
    Stacked,
    Vocabulary,
    padded_vocab_size,
)


def split(param: Param, whole: list[Tensor], size: int) -> list[Tensor]:
    shards = []
    for rank in range(size):
        shard = torch.full(param.shard_shape(size, rank), float("nan"))
        for piece in param.pieces(size, rank):
            target = shard.narrow(param.mapping.dim, piece.at, piece.length)
            if piece.source is None:
                target.zero_()
            else:
                target.copy_(whole[piece.source].narrow(param.mapping.dim, piece.start, piece.length))
        assert torch.isfinite(shard).all()
        shards.append(shard)
    return shards


def merge(param: Param, shards: list[Tensor]) -> list[Tensor]:
    whole = [torch.full(tensor.shape, float("nan")) for tensor in param.hf]
    for rank, shard in enumerate(shards):
        for piece in param.pieces(len(shards), rank):
            if piece.source is not None:
                part = shard.narrow(param.mapping.dim, piece.at, piece.length)
                whole[piece.source].narrow(param.mapping.dim, piece.start, piece.length).copy_(part)
    return whole


def param_of(mapping: Mapping, *shapes: tuple[int, ...]) -> Param:
    return Param(role="x.weight", mapping=mapping, hf=tuple(HFTensor(f"t{i}", s) for i, s in enumerate(shapes)), layer=0)


def random_like(param: Param) -> list[Tensor]:
    return [torch.randn(tensor.shape) for tensor in param.hf]


CASES = {
    "replicated": param_of(Replicated(), (7,)),
    "column": param_of(Split(along=0), (8, 3)),
    "column bias": param_of(Split(along=0), (8,)),
    "row": param_of(Split(along=1), (3, 8)),
    "gate and up": param_of(Stacked(), (8, 3), (8, 3)),
    "gate and up bias": param_of(Stacked(), (8,), (8,)),
    "vocabulary": param_of(Vocabulary(), (301, 3)),
    "vocabulary that needs no padding": param_of(Vocabulary(), (512, 3)),
    "attention": param_of(QKV(heads=4, groups=4, head_dim=2), (8, 3), (8, 3), (8, 3)),
    "grouped attention": param_of(QKV(heads=8, groups=4, head_dim=6), (48, 5), (24, 5), (24, 5)),
    "fewer key-value heads than ranks": param_of(QKV(heads=8, groups=2, head_dim=2), (16, 5), (4, 5), (4, 5)),
    "one key-value head": param_of(QKV(heads=4, groups=1, head_dim=4), (16, 5), (4, 5), (4, 5)),
    "qkv bias": param_of(QKV(heads=4, groups=2, head_dim=2), (8,), (4,), (4,)),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_split_then_merge_is_the_identity(case: str, size: int) -> None:
    param = CASES[case]
    whole = random_like(param)
    shards = split(param, whole, size)
    if param.mapping.replicated:
        assert all(torch.equal(shard, whole[0]) for shard in shards)
    assert all(torch.equal(a, b) for a, b in zip(whole, merge(param, shards), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    groups=st.integers(1, 12),
    heads_per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    vocab=st.integers(1, 2000),
)
def test_any_legal_attention_and_vocabulary_round_trips(size: int, groups: int, heads_per_group: int, head_dim: int, vocab: int) -> None:
    heads = groups * heads_per_group
    for param in (
        param_of(QKV(heads=heads, groups=groups, head_dim=head_dim), (heads * head_dim, 1), (groups * head_dim, 1), (groups * head_dim, 1)),
        param_of(Vocabulary(), (vocab, 1)),
    ):
        try:
            param.shard_shape(size, 0)
        except UserError:
            assert heads % size or (groups % size and size % groups) or groups * (heads_per_group + 2) * head_dim % size
            continue
        whole = random_like(param)
        assert all(torch.equal(a, b) for a, b in zip(whole, merge(param, split(param, whole, size)), strict=True))


def test_grouped_attention_is_interleaved_as_megatron_has_it() -> None:
    """Megatron views the fused rows as [groups, (q.. k v), head]; written here independently of the pieces."""
    heads, groups, head_dim, hidden = 8, 4, 6, 5
    param = CASES["grouped attention"]
    q, k, v = random_like(param)
    fused = torch.cat(
        [
            q.view(groups, heads // groups, head_dim, hidden),
            k.view(groups, 1, head_dim, hidden),
            v.view(groups, 1, head_dim, hidden),
        ],
        dim=1,
    ).reshape(-1, hidden)
    for size in (1, 2, 4, 8):
        assert torch.equal(torch.cat(split(param, [q, k, v], size)), fused), size


def test_gate_and_up_are_stacked_per_rank() -> None:
    gate, up = torch.arange(8.0).view(8, 1), torch.arange(100.0, 108.0).view(8, 1)
    shards = split(param_of(Stacked(), (8, 1), (8, 1)), [gate, up], 2)
    assert shards[1].flatten().tolist() == [4, 5, 6, 7, 104, 105, 106, 107]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_is_padded_with_zeros_at_any_size(size: int) -> None:
    param = CASES["vocabulary"]
    shards = split(param, random_like(param), size)
    padded = padded_vocab_size(301, size)
    assert padded % (128 * size) == 0
    assert padded - 301 < 128 * size
    assert torch.cat(shards).shape[0] == padded
    assert torch.cat(shards)[301:].abs().sum() == 0


def test_a_rank_may_hold_nothing_but_padding() -> None:
    param = param_of(Vocabulary(), (5, 3))
    shards = split(param, random_like(param), 4)
    assert [shard.shape[0] for shard in shards] == [128] * 4
    assert shards[3].abs().sum() == 0


@pytest.mark.parametrize(
    ("param", "size", "words"),
    [
        (param_of(Split(along=0), (10, 3)), 4, "10 rows or columns do not split over 4 ranks; tensor parallelism of 1 or 2 or 5 would"),
        (param_of(Stacked(), (6, 3), (6, 3)), 4, "6 rows or columns do not split over 4 ranks"),
        (param_of(QKV(heads=6, groups=3, head_dim=2), (12, 1), (6, 1), (6, 1)), 2, "3 key-value heads and tensor parallelism 2"),
        (param_of(QKV(heads=6, groups=3, head_dim=2), (12, 1), (6, 1), (6, 1)), 4, "6 attention heads do not split over 4 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_arithmetic(param: Param, size: int, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        param.pieces(size, 0)
    assert str(caught.value).startswith("t0"), "the message names the tensor"
    assert "\n" not in str(caught.value)


def test_both_namings_of_the_same_entries() -> None:
    norm = Param(
        role="input_layernorm.weight", fused_role="self_attention.linear_qkv.layer_norm_weight", mapping=Replicated(), hf=(), layer=3
    )
    expert = Param(role="linear_fc1.weight", mapping=Stacked(), hf=(), layer=3, expert=11)
    final = Param(role="decoder.final_layernorm.weight", mapping=Replicated(), hf=(), stage="last")
    assert LOCAL.name(norm) == "decoder.layers.3.input_layernorm.weight"
    assert TRANSFORMER_ENGINE.name(norm) == "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    assert LOCAL.name(expert) == "decoder.layers.3.mlp.experts.local_experts.11.linear_fc1.weight"
    assert TRANSFORMER_ENGINE.name(expert) == "decoder.layers.3.mlp.experts.linear_fc1.weight11"
    assert LOCAL.name(final) == TRANSFORMER_ENGINE.name(final) == "decoder.final_layernorm.weight"
