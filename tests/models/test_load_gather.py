"""HF files -> shards of every rank of a layout -> HF tensors, bit-equal, against models that transformers itself wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from simulated_ranks import empty_shards, gather_all, layout_of, load_all, save_model
from tiny_models import tiny_config

from areal_mega.core.errors import UserError
from areal_mega.models.gather import HFGatherer
from areal_mega.models.hf_io import HFSource
from areal_mega.models.loading import load_hf_weights
from areal_mega.models.ownership import Ownership, layer_stages
from areal_mega.models.registry import family_for, load_hf_config
from areal_mega.models.table import LOCAL, TRANSFORMER_ENGINE, Naming, padded_vocab_size
from areal_mega.parallel.strategy import parse

# 301 is divisible by no tensor parallelism; four layers for two stages of two virtual stages.
COMMON = {"vocab_size": 301, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": False},
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_moe-tied": {"tie_word_embeddings": True, "num_experts": 4},
}
DENSE_LAYOUTS = ["p2[1,3]", "p3[1,2,1]", "d1", "d2", "t2", "t4", "p2", "p4", "c2", "p2v2", "d2t2p2", "d2t4p2c2"]
MOE_LAYOUTS = ["d2e2", "d4e4", "t2p2d2e2", "t2e2", "d2t2p2v2c2e4"]
TWO_PART_LAYOUTS = ["(attn:d2t2|ffn:e2t2)", "(attn:d4t1p2|ffn:e2t2)", "(attn:t2|ffn:e1t2)", "(attn:t4|ffn:e2t1)"]
LAYOUTS = [
    *((name, f"megatron:{layout}") for name in MODELS for layout in DENSE_LAYOUTS),
    *((name, f"megatron:{layout}") for name in MODELS if "moe" in name for layout in MOE_LAYOUTS + TWO_PART_LAYOUTS),
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name, fields in MODELS.items():
        config = tiny_config(name.split("-")[0], **{**COMMON, **fields})
        out[name] = save_model(tmp_path_factory.mktemp(name) / "model", config)
    return out


def source_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(received: list[tuple[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    assert len(received) == len(wanted)
    assert {name for name, _ in received} == wanted.keys()
    for name, tensor in received:
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_every_layout_is_bit_equal(folders: dict[str, Path], name: str, layout: str) -> None:
    hf, ranks = load_hf_config(str(folders[name])), layout_of(layout)
    family = family_for(hf)
    with HFSource(folders[name]) as source:
        shards = load_all(family, hf, source, ranks)
    # Small parcels: several per stream, so that sends, receives and order are put to use.
    assert_same(gather_all(shards, family, hf, ranks, parcel_bytes=30_000), source_tensors(folders[name]))


@pytest.mark.parametrize("naming", [LOCAL, TRANSFORMER_ENGINE, Naming(fused_norms=False, grouped_experts=True)])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_every_naming_is_bit_equal(folders: dict[str, Path], name: str, naming: Naming) -> None:
    hf, ranks = load_hf_config(str(folders[name])), layout_of("megatron:d2t2p2" + ("e2" if "moe" in name else ""))
    family = family_for(hf)
    with HFSource(folders[name]) as source:
        shards = load_all(family, hf, source, ranks, naming=naming)
    assert_same(gather_all(shards, family, hf, ranks, naming=naming), source_tensors(folders[name]))


@pytest.mark.parametrize("root", [0, 3, 7])
def test_any_rank_may_be_the_root_and_any_parcel_size_works(folders: dict[str, Path], root: int) -> None:
    hf, ranks = load_hf_config(str(folders["qwen3_moe"])), layout_of("megatron:d2t2p2e2")
    family = family_for(hf)
    with HFSource(folders["qwen3_moe"]) as source:
        shards = load_all(family, hf, source, ranks)
    for parcel_bytes in (1, 100_000, 1 << 30):
        assert_same(gather_all(shards, family, hf, ranks, root=root, parcel_bytes=parcel_bytes), source_tensors(folders["qwen3_moe"]))


def test_dtypes_on_the_wire(folders: dict[str, Path]) -> None:
    """fp32 training sends bf16 on demand; bf16 training sends bf16 by default."""
    hf, ranks = load_hf_config(str(folders["qwen3_moe"])), layout_of("megatron:t2p2")
    family = family_for(hf)
    halved = {name: tensor.bfloat16() for name, tensor in source_tensors(folders["qwen3_moe"]).items()}
    with HFSource(folders["qwen3_moe"]) as source:
        fp32, bf16 = load_all(family, hf, source, ranks), load_all(family, hf, source, ranks, dtype=torch.bfloat16)
    assert_same(gather_all(fp32, family, hf, ranks, dtype=torch.bfloat16), halved)
    assert_same(gather_all(bf16, family, hf, ranks), halved)


def test_order_keeps_what_belongs_together(folders: dict[str, Path]) -> None:
    hf, ranks = load_hf_config(str(folders["llama"])), layout_of("megatron:d1")
    family = family_for(hf)
    named = empty_shards(family.table(hf), ranks, 0)
    names = [spec.name for spec in HFGatherer(named, family, hf, ranks, 0).plan]
    q = names.index("model.layers.1.self_attn.q_proj.weight")
    assert [n.split(".")[4] for n in names[q : q + 3]] == ["q_proj", "k_proj", "v_proj"]
    gate = names.index("model.layers.1.mlp.gate_proj.weight")
    assert names[gate + 1] == "model.layers.1.mlp.up_proj.weight"
    layers = [int(n.split(".")[2]) for n in names if n.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_a_gatherer_sees_parameters_that_were_assigned_anew(folders: dict[str, Path]) -> None:
    hf, ranks = load_hf_config(str(folders["qwen2"])), layout_of("megatron:d1")
    family = family_for(hf)
    named = empty_shards(family.table(hf), ranks, 0)
    gatherer = HFGatherer(named, family, hf, ranks, 0)
    before = gatherer.plan
    with HFSource(folders["qwen2"]) as source:
        load_hf_weights(named, source, family, hf, ranks, 0)
    for name in named:
        named[name] = named[name] * 2
    assert gatherer.plan == before == HFGatherer(named, family, hf, ranks, 0).plan
    wanted = {name: tensor * 2 for name, tensor in source_tensors(folders["qwen2"]).items()}
    assert_same([item for item in gatherer.stream() if item is not None], wanted)


# --- what lives where ----------------------------------------------------------------------------------------------------------------


def test_tied_embeddings_over_stages(folders: dict[str, Path]) -> None:
    """One stage: no output layer. Several: the last one holds a copy of the embedding, which is never sent."""
    hf = load_hf_config(str(folders["qwen2"]))
    family, table = family_for(hf), family_for(hf).table(hf)
    assert "output_layer.weight" not in empty_shards(table, layout_of("megatron:t2"), 0)
    two = layout_of("megatron:t2p2")
    with HFSource(folders["qwen2"]) as source:
        shards = load_all(family, hf, source, two)
    holders = [rank for rank, named in enumerate(shards) if "output_layer.weight" in named]
    assert holders == list(two.ranks(pp=1))
    for rank in holders:
        assert torch.equal(shards[rank]["output_layer.weight"], shards[rank - 2]["embedding.word_embeddings.weight"])
    names = [name for name, _ in gather_all(shards, family, hf, two)]
    assert "lm_head.weight" not in names
    assert names.count("model.embed_tokens.weight") == 1


def test_vocabulary_padding_is_zero_and_trimmed(folders: dict[str, Path]) -> None:
    hf = load_hf_config(str(folders["qwen3"]))
    family = family_for(hf)
    for tp in (1, 2, 4):
        ranks = layout_of(f"megatron:t{tp}")
        with HFSource(folders["qwen3"]) as source:
            shards = load_all(family, hf, source, ranks)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            whole = torch.cat([named[name] for named in shards])
            assert whole.shape[0] == padded_vocab_size(301, tp)
            assert whole[301:].abs().sum() == 0
        assert dict(gather_all(shards, family, hf, ranks))["lm_head.weight"].shape[0] == 301


def test_layers_are_dealt_as_megatron_does() -> None:
    assert layer_stages(8, parse("megatron:p2")) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert layer_stages(8, parse("megatron:p2v2")) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert layer_stages(8, parse("megatron:p2v4")) == (0, 1, 0, 1, 0, 1, 0, 1)
    assert layer_stages(8, parse("megatron:p2[3,5]")) == (0, 0, 0, 1, 1, 1, 1, 1)
    assert layer_stages(8, parse("megatron:p2[1,2,4,1]v2")) == (0, 1, 1, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("layers", "strategy", "line"),
    [
        (
            6,
            "megatron:d1p4",
            "the model has 6 layers, which do not divide by pipeline parallelism 4: 6/4 is not a whole number; "
            "give the layers of each stage, for example megatron:d1p4[1,2,2,1]",
        ),
        (6, "megatron:d1p2v2", "by pipeline parallelism 2 x 2 virtual stages: 6/4 is not a whole number; .* megatron:d1p2[1,2,2,1]v2"),
        (3, "megatron:d1p4", "3/4 is not a whole number; use pipeline parallelism of 1 or 3"),
        (3, "megatron:d1p2v2", "use fewer virtual stages"),
        (8, "megatron:d2p2[3,4]", "strategy megatron:d2p2[3,4] has 3 + 4 = 7 layers, but the model has 8; .* megatron:d2p2[4,4]"),
    ],
)
def test_layers_that_do_not_add_up_are_refused_with_the_arithmetic(layers: int, strategy: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        layer_stages(layers, parse(strategy))
    for part in line.split(" .* "):
        assert part in str(caught.value)
    if "example" in str(caught.value):
        assert len(layer_stages(layers, parse(str(caught.value).rpartition("for example ")[2]))) == layers


def test_experts_have_global_numbers(folders: dict[str, Path]) -> None:
    hf = load_hf_config(str(folders["qwen3_moe"]))
    ownership = Ownership(family_for(hf).table(hf), layout_of("megatron:d4e4"))
    for rank in range(4):
        experts = {shard.param.expert for shard in ownership.shards(rank) if shard.param.expert is not None}
        assert experts == {2 * rank, 2 * rank + 1}


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("qwen3_moe", "megatron:d3e3", "the model has 8 experts, which do not divide by expert parallelism 3; 1, 2, 4, 8 would"),
        ("llama", "megatron:d2e2", "has expert parallelism, but the model has no experts"),
        ("llama", "megatron:t8", "4 attention heads do not split over 8 ranks"),
        ("llama", "megatron:p3", "4 layers, which do not divide by pipeline parallelism 3"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_one_line(folders: dict[str, Path], name: str, layout: str, words: str) -> None:
    hf, ranks = load_hf_config(str(folders[name])), layout_of(layout)
    with pytest.raises(UserError, match=words) as caught:
        empty_shards(family_for(hf).table(hf), ranks, 0)
    assert "\n" not in str(caught.value)


# --- on real processes ---------------------------------------------------------------------------------------------------------------


def gather_on_a_rank(rank: int, world_size: int, *, folder: str, layout: str, dtype: str | None, root: int) -> dict[str, Any]:
    hf, ranks = load_hf_config(folder), layout_of(layout)
    family = family_for(hf)
    named = empty_shards(family.table(hf), ranks, rank)
    with HFSource(folder) as source:
        load_hf_weights(named, source, family, hf, ranks, rank)
    gatherer = HFGatherer(named, family, hf, ranks, rank, root=root, parcel_bytes=30_000)
    items = list(gatherer.stream(getattr(torch, dtype) if dtype else None))
    return {"count": len(items), "tensors": dict(item for item in items if item is not None)}


@pytest.mark.parametrize(
    ("layout", "dtype", "root"),
    [("megatron:t2p2e2", None, 0), ("megatron:d2p2e2", "bfloat16", 3), ("megatron:(attn:d2t2|ffn:e2t2)", None, 0)],
)
def test_over_gloo_on_four_processes(folders: dict[str, Path], layout: str, dtype: str | None, root: int) -> None:
    results = run_ranks(4, gather_on_a_rank, folder=str(folders["qwen3_moe"]), layout=layout, dtype=dtype, root=root)
    wanted = source_tensors(folders["qwen3_moe"])
    assert [result["count"] for result in results] == [len(wanted)] * 4
    assert [bool(result["tensors"]) for result in results] == [rank == root for rank in range(4)]
    received = results[root]["tensors"]
    assert received.keys() == wanted.keys()
    for name, tensor in wanted.items():
        expected = tensor.bfloat16().float() if dtype else tensor
        assert torch.equal(torch.from_numpy(received[name]), expected), name
