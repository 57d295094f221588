"""Nothing is consumed twice, forgotten or left uninitialised: each such fault is an error that names the tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from simulated_ranks import empty_shards, gather_all, layout_of, load_all, plain_config, save_model
from tiny_models import tiny_config

from areal_mega.core.errors import UserError
from areal_mega.models import loading
from areal_mega.models.family import Family
from areal_mega.models.gather import HFGatherer
from areal_mega.models.hf_io import HFSource
from areal_mega.models.loading import load_hf_weights
from areal_mega.models.ownership import Ownership
from areal_mega.models.proof import prove_table
from areal_mega.models.qwen3_moe import Qwen3Moe
from areal_mega.models.registry import FAMILIES, family_for, load_hf_config
from areal_mega.models.table import LOCAL, HFTensor, Mapping, Param, Piece, Replicated, Shape, Split, Table, TableMismatch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", tiny_config("qwen3_moe"))


def edit(folder: Path, **change: torch.Tensor | None) -> None:
    """Replace (or with None remove) tensors of a one-file folder."""
    tensors = load_file(folder / "model.safetensors") | change
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, layout: str = "megatron:d1", rank: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    hf, ranks = load_hf_config(str(folder)), layout_of(layout)
    named = empty_shards(family_for(hf).table(hf), ranks, rank, dtype=dtype)
    with HFSource(folder) as source:
        load_hf_weights(named, source, family_for(hf), hf, ranks, rank)
    return named


UP = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({UP: None}, rf"tensor {UP} is missing"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias belongs to no"),
        ({"model.layers.2.input_layernorm.weight": torch.zeros(64)}, r"tensor model\.layers\.2\.input_layernorm\.weight belongs to no"),
        ({UP: torch.zeros(64, 32)}, rf"tensor {UP} has shape \[64, 32\] where config\.json gives \[64, 64\]"),
        ({UP: torch.full((64, 64), float("inf"))}, rf"tensor {UP} holds NaN or infinity"),
        ({UP: torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}, rf"tensor {UP} is stored as float8_e4m3fn"),
    ],
)
def test_a_fault_of_the_files_is_one_line_that_names_the_tensor(model: Path, change: dict[str, Any], words: str) -> None:
    edit(model, **change)
    with pytest.raises(UserError, match=words) as caught:
        load(model)
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_rank_sees_a_fault_even_of_a_tensor_it_does_not_hold(model: Path) -> None:
    edit(model, **{UP: None})
    for rank in range(4):
        with pytest.raises(UserError, match=UP):
            load(model, "megatron:d2p2e2", rank)


def test_rotary_buffers_and_a_tied_head_written_twice_are_ignored(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tied", tiny_config("qwen2"))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    wanted = load(folder)
    edit(folder, **{"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": embedding.clone()})
    again = load(folder)
    assert all(torch.equal(wanted[name], again[name]) for name in wanted)
    untied = save_model(tmp_path / "untied", tiny_config("qwen2", tie_word_embeddings=False))
    edit(untied, **{"lm_head.weight": None})
    with pytest.raises(UserError, match=r"tensor lm_head\.weight is missing"):
        load(untied)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_types[0])
def test_the_table_is_exactly_what_transformers_saves(family: Family, tmp_path: Path) -> None:
    for name, fields in {"plain": {}, "tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}}.items():
        folder = save_model(tmp_path / name, tiny_config(family.model_types[0], **fields))
        written = {key: tuple(tensor.shape) for key, tensor in load_file(folder / "model.safetensors").items()}
        hf = load_hf_config(str(folder))
        assert {tensor.name: tensor.shape for tensor in family.table(hf).hf_tensors} == written


def test_a_model_that_differs_from_the_table_is_named(model: Path) -> None:
    hf, ranks = load_hf_config(str(model)), layout_of("megatron:d1")
    family, name = family_for(hf), "decoder.layers.1.mlp.experts.local_experts.5.linear_fc2.weight"
    full = empty_shards(family.table(hf), ranks, 0)
    cases: dict[str, dict[str, torch.Tensor]] = {
        f"expects {name}, which the model lacks": {k: v for k, v in full.items() if k != name},
        "the model has decoder.layers.0.extra, which the table does not know": full | {"decoder.layers.0.extra": torch.zeros(1)},
        rf"{name} has shape \(3, 3\)": full | {name: torch.zeros(3, 3)},
    }
    for words, named in cases.items():
        with HFSource(model) as source, pytest.raises(TableMismatch, match=words):
            load_hf_weights(named, source, family, hf, ranks, 0)
        with pytest.raises(TableMismatch, match=words):
            HFGatherer(named, family, hf, ranks, 0)


def test_memory_that_nothing_fills_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the proofs overlook: shards, persistent buffers too, are NaN before the load and are looked at after it."""
    fill, forgotten = loading.fill_shard, "mlp.router.expert_bias"
    edit(model, **{f"model.layers.{layer}.mlp.gate.e_score_correction_bias": torch.zeros(8) for layer in range(2)})
    monkeypatch.setattr(loading, "fill_shard", lambda t, shard, s: None if shard.param.role == forgotten else fill(t, shard, s))
    hf, ranks, family = load_hf_config(str(model)), layout_of("megatron:d1"), WithExpertBias()
    with HFSource(model) as source, pytest.raises(TableMismatch, match=r"layers\.0\.mlp\.router\.expert_bias is not finite after the load"):
        load_hf_weights(empty_shards(family.table(hf), ranks, 0), source, family, hf, ranks, 0)


@dataclasses.dataclass(frozen=True)
class Fixed(Mapping):
    """Pieces given outright, to be wrong with."""

    given: tuple[tuple[Piece, ...], ...]

    def pieces(self, shapes: tuple[Shape, ...], size: int, rank: int) -> tuple[Piece, ...]:
        return self.given[rank]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((Piece(0, 0, 0, 2),), (Piece(0, 1, 0, 2),), "t is consumed twice at 1"),
        ((Piece(0, 0, 0, 1),), (Piece(0, 2, 0, 2),), "t is not consumed at 2"),
        ((Piece(0, 0, 0, 2),), (Piece(0, 2, 0, 1),), "t has 4 along dimension 0, of which 3 are consumed"),
        ((Piece(0, 0, 0, 2),), (Piece(0, 2, 1, 2),), "shard 1 of 2 has a hole or an overlap at 0"),
    ],
)
def test_the_proof_finds_wrong_pieces(first: tuple[Piece, ...], second: tuple[Piece, ...], words: str) -> None:
    param = Param(role="x", mapping=Fixed((first, second)), hf=(HFTensor("t", (4,)),), stage="first")
    table = Table((param, Param(role="y", mapping=Replicated(), hf=(HFTensor("u", (1,)),), layer=0)))
    with pytest.raises(TableMismatch, match=words):
        prove_table(table, Ownership(table, layout_of("megatron:t2")))


def test_the_proof_finds_a_tensor_consumed_twice_and_a_copy_of_nothing() -> None:
    def entry(role: str, hf: str, **more: Any) -> Param:
        return Param(role=role, mapping=Split(), hf=(HFTensor(hf, (4,)),), **more)

    twice = Table((entry("x", "t", layer=0), entry("y", "t", layer=0)))
    with pytest.raises(TableMismatch, match="HF tensor t is consumed twice: by x and by y"):
        prove_table(twice, Ownership(twice, layout_of("megatron:d1")))
    lost = Table((entry("x", "t", layer=0), entry("z", "t", layer=1), entry("y", "u", stage="last", copy=True)))
    lost = Table((lost.params[0], entry("z", "v", layer=1), lost.params[2]))
    with pytest.raises(TableMismatch, match="y is a copy of u, which no parameter owns"):
        prove_table(lost, Ownership(lost, layout_of("megatron:p2")))
    both = Table((entry("x", "t", layer=0),), frozenset({"t"}))
    with pytest.raises(TableMismatch, match="both consumed and ignorable"):
        prove_table(both, Ownership(both, layout_of("megatron:d1")))


class WithExpertBias(Qwen3Moe):
    """A family with a persistent fp32 buffer, as DeepSeek-V3 has it."""

    def layer(self, hf: Any, layer: int) -> list[Param]:
        bias = HFTensor(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (hf["num_local_experts"],))
        return [*super().layer(hf, layer), Param(role="mlp.router.expert_bias", mapping=Replicated(), hf=(bias,), layer=layer, fp32=True)]


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:t2p2e2"])
def test_fp32_islands_survive_a_bf16_model_and_a_bf16_export(model: Path, layout: str) -> None:
    name, exact = "model.layers.{}.mlp.gate.e_score_correction_bias", torch.tensor([1 + 2.0**-20] * 8)
    edit(model, **{name.format(layer): exact.clone() for layer in range(2)})
    hf, ranks, family = plain_config(tiny_config("qwen3_moe")), layout_of(layout), WithExpertBias()
    with HFSource(model) as source:
        shards = load_all(family, hf, source, ranks, dtype=torch.bfloat16)
        for dtype in (None, torch.bfloat16):
            received = dict(gather_all(shards, family, hf, ranks, dtype=dtype))
            assert torch.equal(received[name.format(1)], exact)
            assert received[UP].dtype == torch.bfloat16
        cast = {key: value.bfloat16() for key, value in shards[0].items()}
        with pytest.raises(TableMismatch, match=r"expert_bias must stay fp32"):
            load_hf_weights(cast, source, family, hf, ranks, 0)
        with pytest.raises(TableMismatch, match=r"expert_bias must stay fp32"):
            HFGatherer(cast, family, hf, ranks, 0)


def test_a_model_of_mixed_dtypes_is_refused_rather_than_guessed(model: Path) -> None:
    named = load(model)
    named["decoder.final_layernorm.weight"] = named["decoder.final_layernorm.weight"].bfloat16()
    hf = load_hf_config(str(model))
    with pytest.raises(TableMismatch, match="parameters of several dtypes"):
        HFGatherer(named, family_for(hf), hf, layout_of("megatron:d1"), 0)


def test_a_shard_that_nothing_fills_is_poison_and_not_what_memory_held(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "decoder.layers.1.mlp.experts.local_experts.5.linear_fc2.weight"
    fill = loading.fill_shard
    monkeypatch.setattr(loading, "fill_shard", lambda target, shard, source: LOCAL.name(shard.param) == name or fill(target, shard, source))
    with pytest.raises(TableMismatch, match=rf"{name} is not finite after the load"):
        load(model)


class WithFp32Router(Qwen3Moe):
    """A family whose router weight is an island, as a recipe of a whole fp32 model has it."""

    def layer(self, hf: Any, layer: int) -> list[Param]:
        return [dataclasses.replace(p, fp32=True) if p.role == "mlp.router.weight" else p for p in super().layer(hf, layer)]


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_router_weights_have_the_dtype_that_the_recipe_says_through_sync(model: Path, wire: str) -> None:
    """``model.dtype`` fp32 and ``rollout.dtype`` as said; an island is fp32 whatever they say. Bits below bf16's tell."""
    gate = "model.layers.1.mlp.gate.weight"
    exact = torch.full((8, 64), 1 + 2.0**-20)
    edit(model, **{gate: exact})
    hf, ranks = load_hf_config(str(model)), layout_of("megatron:d1")
    for family, kept in ((family_for(hf), wire == "float32"), (WithFp32Router(), True)):
        with HFSource(model) as source:
            (named,) = load_all(family, hf, source, ranks)
        gatherer = HFGatherer(named, family, hf, ranks, 0)
        plan = {spec.name: spec.dtype for spec in gatherer.plan_as(getattr(torch, wire))}
        assert (plan[gate] == torch.float32) == kept
        sent = dict(item for item in gatherer.stream(getattr(torch, wire)) if item is not None)
        assert torch.equal(sent[gate].float(), exact) == kept
