"""Checkpoints written by all ranks of one strategy and read by any other, on disk and in an object store."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import FILES, blank_shards, layout_of, loaded_shards, model_bytes, write_model
from ranks import run_ranks

from areal_mega.checkpoint.convert import from_hf, to_hf
from areal_mega.checkpoint.location import Location
from areal_mega.checkpoint.model import Checkpoint, load, save
from areal_mega.core.errors import UserError
from areal_mega.models.registry import family_for, load_hf_config
from areal_mega.models.table import LOCAL, TRANSFORMER_ENGINE, Naming, TableMismatch

# 8 heads, 2 groups of keys: tp 4 exceeds the groups. 4 layers: pp 2 with vpp 2.
SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 300}
STRATEGIES = [
    "megatron:d1",
    "megatron:d1t4",
    "megatron:d1t2p2v2",
    "megatron:d1p2[1,3]",
    "megatron:(attn:d2t2|ffn:e4)",
    "megatron:(attn:d4|ffn:e2t2)",
    "megatron:(attn:d1t2p2|ffn:t2p2)",
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", **SHAPE)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tied") / "model", "qwen2", **SHAPE)


def arguments(folder: Path, strategy: str, rank: int) -> dict[str, Any]:
    config = load_hf_config(str(folder))
    return {"family": family_for(config), "hf_config": config, "layout": layout_of(strategy), "rank": rank}


def save_rank(rank: int, world_size: int, *, folder: str, out: str, strategy: str, naming: str = "local") -> list[str]:
    """One rank of a collective save; the chunk files that it wrote itself."""
    from areal_mega.checkpoint import model

    naming_of = {"local": LOCAL, "te": TRANSFORMER_ENGINE}[naming]
    written: list[str] = []
    write = model.write_shard

    def noting(store: Any, specs: Any, item: Any) -> None:
        written.append(f"{item[0].param.hf[0].name} {item[0].rank}")
        write(store, specs, item)

    model.write_shard = noting
    named = loaded_shards(Path(folder), strategy, rank, naming=naming_of)
    save(named, out, source=folder, naming=naming_of, **arguments(Path(folder), strategy, rank))
    return written


def assert_loads(folder: Path, place: str | Path, strategy: str, dtype: torch.dtype = torch.bfloat16, naming: Naming = LOCAL) -> None:
    """Every rank of a strategy gets from the checkpoint what it gets from the HuggingFace files, bit by bit."""
    for rank in range(layout_of(strategy).world_size):
        named = blank_shards(folder, strategy, rank, dtype, naming)
        load(named, place, naming=naming, **arguments(folder, strategy, rank))
        for name, tensor in loaded_shards(folder, strategy, rank, dtype, naming).items():
            assert torch.equal(named[name], tensor), f"rank {rank} of {strategy}: {name}"


@pytest.mark.parametrize(
    "writer", ["megatron:(attn:d2t2|ffn:e4)", "megatron:d1t2p2v2", "megatron:d1p2[3,1]e1", "megatron:(attn:d1t2p2|ffn:t2p2)"]
)
def test_what_ranks_saved_loads_into_every_strategy(moe: Path, tmp_path: Path, writer: str) -> None:
    world = layout_of(writer).world_size
    wrote = run_ranks(world, save_rank, folder=str(moe), out=str(tmp_path / "ck"), strategy=writer)
    everything = [entry for rank in wrote for entry in rank]
    assert len(everything) == len(set(everything)), "replicas are written once"
    assert all(wrote), "every rank has its share"
    for reader in STRATEGIES:
        assert_loads(moe, tmp_path / "ck", reader)
    to_hf(tmp_path / "ck", tmp_path / "hf")
    assert model_bytes(tmp_path / "hf") == model_bytes(moe)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("writer", STRATEGIES)
def test_converted_checkpoints_load_into_every_strategy(moe: Path, tmp_path: Path, writer: str) -> None:
    from_hf(moe, tmp_path / "ck", strategy=writer)
    for reader in STRATEGIES[::2] if writer == STRATEGIES[0] else STRATEGIES[:2]:
        assert_loads(moe, tmp_path / "ck", reader)


def test_tied_output_layers_of_the_last_stage_are_loaded_and_not_stored(tied: Path, tmp_path: Path) -> None:
    run_ranks(4, save_rank, folder=str(tied), out=str(tmp_path / "ck"), strategy="megatron:d1t2p2")
    assert "output_layer.weight" not in Checkpoint(tmp_path / "ck").manifest.arrays
    assert_loads(tied, tmp_path / "ck", "megatron:d1p2t4")
    assert_loads(tied, tmp_path / "ck", "megatron:d1")
    to_hf(tmp_path / "ck", tmp_path / "hf")
    assert model_bytes(tmp_path / "hf") == model_bytes(tied)


def test_both_namings_share_a_checkpoint(moe: Path, tmp_path: Path) -> None:
    run_ranks(2, save_rank, folder=str(moe), out=str(tmp_path / "ck"), strategy="megatron:(attn:d2|ffn:e2)", naming="te")
    assert_loads(moe, tmp_path / "ck", "megatron:d1t2", naming=LOCAL)
    assert_loads(moe, tmp_path / "ck", "megatron:d1", naming=TRANSFORMER_ENGINE)


def test_loading_converts_to_the_shards_dtype(moe: Path, tmp_path: Path) -> None:
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1")
    assert_loads(moe, tmp_path / "ck", "megatron:d1t2", dtype=torch.float32)


def test_one_process_needs_no_group_and_stores_have_urls(moe: Path) -> None:
    named = loaded_shards(moe, "megatron:d1", 0)
    save(named, "memory://bucket/run/ck", source=moe, **arguments(moe, "megatron:d1", 0))
    assert_loads(moe, "memory://bucket/run/ck/", "megatron:d1t2p2v2")
    with pytest.raises(UserError, match="exists; remove it or choose another place"):
        save(named, "memory://bucket/run/ck", source=moe, **arguments(moe, "megatron:d1", 0))


def test_file_urls_are_folders(moe: Path, tmp_path: Path) -> None:
    from_hf(moe, f"file://{tmp_path}/a%20b/ck", strategy="megatron:d1t2")
    assert_loads(moe, tmp_path / "a b" / "ck", "megatron:d1")
    assert Checkpoint(tmp_path / "a b" / "ck").files.keys() == FILES.keys() | {"config.json"}


def test_places() -> None:
    assert Location.parse("s3://bucket/x/").url == "s3://bucket/x/"
    assert Location.parse("gs://bucket/x").path is None
    for text, message in (("ftp://x/y", "scheme 'ftp' is not supported"), ("file://host/x", "names host 'host'")):
        with pytest.raises(UserError, match=message):
            Location.parse(text)


def test_a_store_is_complete_only_with_its_manifest_and_foreign_keys_stay(moe: Path) -> None:
    place = Location.parse("memory://commit/ck")
    from_hf(moe, "memory://commit/ck", strategy="megatron:d1")
    manifest = place.read("checkpoint.json")
    assert manifest is not None
    place.remove("checkpoint.json")
    with pytest.raises(UserError, match="never completed"):
        Checkpoint("memory://commit/ck")
    with pytest.raises(UserError, match="is no checkpoint"):
        Checkpoint("memory://commit/nothing")
    foreign = Location.parse("memory://foreign/")
    foreign.write("thesis.txt", b"x")
    with pytest.raises(UserError, match="exists"):
        from_hf(moe, "memory://foreign/", strategy="megatron:d1")
    assert foreign.read("thesis.txt") == b"x"


def test_damage_is_named(moe: Path, tmp_path: Path) -> None:
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1t2")
    chunk = "arrays/decoder.layers.1.mlp.experts.linear_fc2.weight/c/3/0/0"

    def damaged(change: Any) -> str:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "ck", folder)
        change(folder)
        with pytest.raises(UserError) as caught:
            Checkpoint(folder)
            assert_loads(moe, folder, "megatron:d1")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert chunk in damaged(lambda f: (f / chunk).unlink())
    assert "truncated" in damaged(lambda f: (f / chunk).write_bytes(b"xyz"))
    assert "files/tokenizer.json" in damaged(lambda f: (f / "files" / "tokenizer.json").unlink())
    assert "checkpoint.json is damaged" in damaged(lambda f: (f / "checkpoint.json").write_text("{"))
    for version, remedy in ((9, "use a newer areal-mega"), (1, "use the areal-mega that wrote it")):
        other = json.loads((tmp_path / "ck" / "checkpoint.json").read_text()) | {"version": version}
        assert remedy in damaged(lambda f, other=other: (f / "checkpoint.json").write_text(json.dumps(other)))  # type: ignore[misc]
    # Without the listing (every rank of a load goes without) a chunk that is gone is an error too, never zeros.
    folder = tmp_path / "damaged"
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "ck", folder)
    (folder / chunk).unlink()
    with pytest.raises(UserError, match="is missing; take another copy"):
        assert_loads(moe, folder, "megatron:d1")


def test_another_models_checkpoint_is_refused(moe: Path, tied: Path, tmp_path: Path) -> None:
    from_hf(tied, tmp_path / "ck", strategy="megatron:d1")
    with pytest.raises(UserError, match="they are of different models"):
        load(blank_shards(moe, "megatron:d1", 0), tmp_path / "ck", **arguments(moe, "megatron:d1", 0))


def fail_rank(rank: int, world_size: int, *, folder: str, out: str, strategy: str) -> str:
    from areal_mega.checkpoint import model

    def broken(store: Any, specs: Any, item: Any) -> None:
        raise UserError("cannot write x: No space left on device; free space")

    if rank == 1:
        model.write_shard = broken
    try:
        save(loaded_shards(Path(folder), strategy, rank), out, source=folder, **arguments(Path(folder), strategy, rank))
    except UserError as error:
        return str(error)
    return "saved"


def test_one_ranks_failure_is_everybodys_and_leaves_no_checkpoint(tied: Path, tmp_path: Path) -> None:
    said = run_ranks(2, fail_rank, folder=str(tied), out=str(tmp_path / "ck"), strategy="megatron:d1t2")
    assert said == ["cannot write x: No space left on device; free space"] * 2
    assert not (tmp_path / "ck").exists()
    with pytest.raises(UserError, match="never completed"):
        Checkpoint(tmp_path / "ck")
    run_ranks(2, save_rank, folder=str(tied), out=str(tmp_path / "ck"), strategy="megatron:d1t2")
    assert_loads(tied, tmp_path / "ck", "megatron:d1")


def test_islands_stay_fp32(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any family may mark a parameter: here the router, in a folder where it is stored so."""
    family = family_for(load_hf_config(str(moe)))
    plain = type(family).parameters
    island = lambda self, hf: tuple(replace(p, fp32=p.role == "mlp.router.weight") for p in plain(self, hf))  # noqa: E731
    monkeypatch.setattr(type(family), "parameters", island)
    source = write_model(tmp_path / "source", "qwen3_moe", **SHAPE)
    router, other = "decoder.layers.0.mlp.router.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
    from_hf(source, tmp_path / "kept", strategy="megatron:d1")
    from_hf(source, tmp_path / "cast", strategy="megatron:d1", dtype=torch.float16)
    for name, dtype in (("kept", torch.bfloat16), ("cast", torch.float16)):
        arrays = Checkpoint(tmp_path / name).manifest.arrays
        assert (arrays[router].dtype, arrays[other].dtype) == (torch.float32, dtype)
        assert_loads(source, tmp_path / name, "megatron:d1t2") if name == "kept" else None
    to_hf(tmp_path / "kept", tmp_path / "hf", dtype=torch.float32)
    before, after = model_bytes(source), model_bytes(tmp_path / "hf")
    gate = "model.layers.0.mlp.gate.weight"
    assert after[gate] == before[gate]
    assert {v[0] for v in after.values() if isinstance(v, tuple)} == {torch.float32}
    to_hf(tmp_path / "kept", tmp_path / "same")
    assert model_bytes(tmp_path / "same") == before
    named = blank_shards(source, "megatron:d1", 0)
    named[router] = named[router].bfloat16()
    with pytest.raises(TableMismatch, match="must stay fp32"):
        load(named, tmp_path / "kept", **arguments(source, "megatron:d1", 0))
