"""A checkpoint is read without this package: by any zarr3 reader, or with nothing but JSON and numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from checkpoint_models import write_model
from safetensors.numpy import load_file

from areal_mega.checkpoint.convert import from_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    return write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", dtype=torch.float32, shard_bytes=10**9, vocab_size=300)


@pytest.fixture(scope="module")
def place(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ck") / "ck"
    from_hf(model, place, strategy="megatron:(attn:d2t2|ffn:e2t2)")
    return place


def read_with_numpy(folder: Path) -> Any:
    """A zarr3 array of little-endian chunks, as its specification has it (zarr-specs.readthedocs.io, v3)."""
    about = json.loads((folder / "zarr.json").read_text())
    assert (about["zarr_format"], about["node_type"]) == (3, "array")
    assert [codec["name"] for codec in about["codecs"]] == ["bytes"]
    shape, chunk = about["shape"], about["chunk_grid"]["configuration"]["chunk_shape"]
    out = np.full(shape, np.nan, dtype=np.dtype(about["data_type"]).newbyteorder("<"))
    for index in np.ndindex(*(-(-size // part) for size, part in zip(shape, chunk, strict=True))):
        values = np.frombuffer((folder.joinpath("c", *map(str, index))).read_bytes(), out.dtype).reshape(chunk)
        region = tuple(slice(i * part, min((i + 1) * part, size)) for i, part, size in zip(index, chunk, shape, strict=True))
        out[region] = values[tuple(slice(0, r.stop - r.start) for r in region)]
    return out


def read_with_tensorstore(folder: Path) -> Any:
    return ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/"}, open=True).result().read().result()


@pytest.mark.parametrize("read", [read_with_numpy, read_with_tensorstore])
def test_global_arrays_hold_the_tensors_of_the_model(model: Path, place: Path, read: Any) -> None:
    hf, arrays = load_file(model / "model.safetensors"), place / "arrays"
    np.testing.assert_array_equal(read(arrays / "embedding.word_embeddings.weight"), hf["model.embed_tokens.weight"])
    gate_up = read(arrays / "decoder.layers.1.mlp.experts.linear_fc1.weight")
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}."
        np.testing.assert_array_equal(gate_up[expert], np.concatenate([hf[f"{name}gate_proj.weight"], hf[f"{name}up_proj.weight"]]))
    q, k, v = (hf[f"model.layers.0.self_attn.{name}_proj.weight"].reshape(2, -1, 32, 64) for name in "qkv")
    fused = np.concatenate([q, k, v], axis=1).reshape(-1, 64)
    np.testing.assert_array_equal(read(arrays / "decoder.layers.0.self_attention.linear_qkv.weight"), fused)


def test_every_array_of_the_manifest_describes_itself(place: Path) -> None:
    manifest = json.loads((place / "checkpoint.json").read_text())
    assert {path.name for path in (place / "arrays").iterdir()} == manifest["arrays"].keys()
    for name, entry in manifest["arrays"].items():
        array = ts.open({"driver": "zarr3", "kvstore": f"file://{place}/arrays/{name}/"}, open=True).result()
        assert (list(array.shape), array.dtype.name, list(array.chunk_layout.read_chunk.shape)) == (
            entry["shape"],
            entry["dtype"],
            entry["chunks"],
        )


@pytest.mark.parametrize("url", ["s3://bucket/run/ck/", "gs://bucket/run/ck/"])
def test_object_store_urls_are_those_of_the_drivers(url: str) -> None:
    from areal_mega.checkpoint.location import Location

    spec = ts.KvStore.Spec(Location.parse(url.rstrip("/")).url).to_json()
    assert (spec["driver"], spec["bucket"], spec["path"]) == ({"s3:": "s3", "gs:": "gcs"}[url[:3]], "bucket", "run/ck/")
