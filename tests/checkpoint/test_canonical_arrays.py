"""Arrays and chunks, without weights: shards tile arrays, chunks belong to one shard, names are neutral."""

from __future__ import annotations

from math import prod

import pytest
import torch
from checkpoint_models import layout_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import _COMMON, _FAMILY

from areal_mega.checkpoint.arrays import ArraySpec, common_cut, fit_chunks
from areal_mega.checkpoint.canonical import array_name, logical_arrays, places, spans, whole_shape
from areal_mega.models.ownership import Ownership
from areal_mega.models.registry import family_for
from areal_mega.models.table import LOCAL, QKV, TRANSFORMER_ENGINE, HFTensor, Mapping, Param, Replicated, Split, Stacked, Table, Vocabulary


def table_of(family: str, **overrides: object) -> Table:
    config = {"model_type": family, **_COMMON, **_FAMILY[family], **overrides}
    return family_for(config).table(config)


def param(mapping: Mapping, *shapes: tuple[int, ...]) -> Param:
    return Param(role="x.weight", mapping=mapping, hf=tuple(HFTensor(f"t{i}", s) for i, s in enumerate(shapes)), stage="first")


@st.composite
def split_params(draw: st.DrawFn) -> tuple[Param, int]:
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kind = draw(st.sampled_from(["stacked", "split0", "split1", "vocabulary", "qkv", "replicated"]))
    share = draw(st.integers(1, 6))
    match kind:
        case "stacked":
            shapes = tuple((size * draw(st.integers(1, 5)), 3) for _ in range(draw(st.integers(1, 3))))
            return param(Stacked(), *shapes), size
        case "split0":
            return param(Split(), (size * share, 4)), size
        case "split1":
            return param(Split(along=1), (5, size * share)), size
        case "vocabulary":
            return param(Vocabulary(), (draw(st.integers(1, 700)), 2)), size
        case "qkv":
            groups = size * draw(st.integers(1, 2)) if draw(st.booleans()) else 1
            heads = max(groups, size) * draw(st.integers(1, 2))
            width = 4 if groups % size == 0 else 4 * size
            shapes = ((heads * width, 3), (groups * width, 3), (groups * width, 3))
            return param(QKV(heads=heads, groups=groups, head_dim=width), *shapes), size
        case _:
            return param(Replicated(), (share, 2)), 1


@given(split_params())
def test_shards_tile_the_array(case: tuple[Param, int]) -> None:
    p, size = case
    extent = whole_shape(p)[p.mapping.dim]
    assert extent == sum(t.shape[p.mapping.dim] for t in p.hf), "the array has every row of the HF files and no padding"
    seen: list[tuple[int, int]] = []
    for rank in range(size):
        at = 0
        for span in spans(p, size, rank):
            assert (span.at, span.length > 0) == (at, True)
            at += span.length
            if span.start is not None:
                seen.append((span.start, span.start + span.length))
        assert at == p.shard_shape(size, rank)[p.mapping.dim]
    end = 0
    for start, stop in sorted(seen):
        assert start == end
        end = stop
    assert end == extent


@given(split_params())
def test_spans_agree_with_pieces(case: tuple[Param, int]) -> None:
    """Element by element: the row of which HF tensor a shard's row is, through the array and directly."""
    p, size = case
    rows = {place.at + i: (place.source, place.start + i) for place in places(p) for i in range(place.length)}
    for rank in range(size):
        through = {s.at + i: None if s.start is None else rows[s.start + i] for s in spans(p, size, rank) for i in range(s.length)}
        direct = {
            piece.at + i: None if piece.source is None else (piece.source, piece.start + i)
            for piece in p.pieces(size, rank)
            for i in range(piece.length)
        }
        assert through == direct


@given(split_params(), st.integers(1, 2000))
def test_no_chunk_is_of_two_shards(case: tuple[Param, int], limit: int) -> None:
    p, size = case
    shape, dim = whole_shape(p), p.mapping.dim
    bounds = [b for r in range(size) for s in spans(p, size, r) if s.start is not None for b in (s.start, s.start + s.length)]
    cuts = list(shape)
    cuts[dim] = common_cut(bounds, shape[dim])
    chunk = fit_chunks(shape, cuts, 2, limit)[dim]
    assert all(bound % chunk == 0 for bound in bounds if bound != shape[dim])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=3), st.integers(1, 100_000))
def test_chunks_fit_where_they_can(shape: list[int], limit: int) -> None:
    chunks = fit_chunks(shape, shape, 4, limit)
    assert all(1 <= c <= s for c, s in zip(chunks, shape, strict=True))
    assert prod(chunks) * 4 <= max(limit, 4)


def test_a_shard_without_divisors_is_cut_along_columns_and_not_crumbled() -> None:
    assert fit_chunks((2 * 1009, 8), (1009, 8), 2, 8000) == (1009, 3)
    assert fit_chunks((2048, 8), (1024, 8), 2, 1000) == (32, 8)


def test_one_array_covers_both_namings_and_all_experts() -> None:
    table = table_of("qwen3_moe")
    arrays = logical_arrays(table)
    assert arrays["decoder.layers.1.mlp.experts.linear_fc1.weight"].shape == (8, 128, 64)
    assert arrays["decoder.layers.0.input_layernorm.weight"].shape == (64,)
    assert {array_name(p) for p in table.exported} == arrays.keys()
    spelled = {naming.name(p) for naming in (LOCAL, TRANSFORMER_ENGINE) for p in table.exported if p.layer == 1}
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in spelled
    assert len({array_name(p) for p in table.exported if p.layer == 1}) < len(spelled)


def test_tied_output_is_no_array_of_its_own() -> None:
    assert "output_layer.weight" not in logical_arrays(table_of("qwen2"))
    assert "output_layer.weight" in logical_arrays(table_of("llama"))


@pytest.mark.parametrize("strategy", ["megatron:d1", "megatron:d1t2p2", "megatron:(attn:d2t2|ffn:e4)", "megatron:(attn:d2t2|ffn:e2t2)"])
def test_chunks_are_the_shards_of_the_writer(strategy: str) -> None:
    table = table_of("qwen3_moe")
    ownership = Ownership(table, layout_of(strategy))
    etp, tp = ownership.layout.strategy.etp, ownership.layout.strategy.tp
    specs = {name: array.spec(torch.bfloat16, ownership) for name, array in logical_arrays(table).items()}
    assert specs["decoder.layers.0.mlp.experts.linear_fc2.weight"].chunks == (1, 64, 64 // etp)
    assert specs["decoder.layers.0.mlp.experts.linear_fc1.weight"].chunks == (1, 64 // etp if etp > 1 else 128, 64)
    assert specs["decoder.layers.0.mlp.router.weight"].chunks == (8, 64)
    assert specs["decoder.layers.0.self_attention.linear_qkv.weight"].chunks == (256 // tp, 64)
    # 320 rows are padded to 384 at tp 1 and to 512 at tp 2: the array has 320, the first rank's share of them is a chunk.
    assert specs["embedding.word_embeddings.weight"].shape == (320, 64)
    assert specs["embedding.word_embeddings.weight"].chunks == (320 if tp == 1 else 256, 64)


def test_chunk_keys() -> None:
    assert list(ArraySpec("a.b", (3, 4), torch.float32, (2, 4)).chunk_keys()) == ["arrays/a.b/c/0/0", "arrays/a.b/c/1/0"]
    assert list(ArraySpec("s", (), torch.float32, ()).chunk_keys()) == ["arrays/s/c"]
