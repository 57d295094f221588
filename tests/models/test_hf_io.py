"""Model folders: reading whole and sliced, streaming shards, and never a half-written folder that looks whole."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from simulated_ranks import save_model
from tiny_models import tiny_config, tiny_model

from areal_mega.core.errors import UserError
from areal_mega.models.hf_io import HFSource, HFTensorSpec, HFWriter
from areal_mega.models.random_init import make_random_model
from areal_mega.models.registry import load_hf_config


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("sharded") / "model", tiny_config("qwen3_moe"), max_shard_size="200KB")
    (folder / "generation_config.json").write_text('{"temperature":   0.6}\n')
    return folder


def write_copy(source: Path, out: Path, **options: Any) -> list[HFTensorSpec]:
    with HFSource(source) as src:
        plan = [src.spec(name) for name in src.names()]
        with HFWriter(out, plan, source=source, **options) as writer:
            for spec in reversed(plan):
                writer.write(spec.name, src.read(spec.name))
    return plan


def test_one_file_and_shards_read_the_same(sharded: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole: dict[str, torch.Tensor] = {}
    for file in sharded.glob("*.safetensors"):
        whole |= load_file(file)
    write_copy(sharded, tmp_path / "one")
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    with HFSource(sharded) as many, HFSource(tmp_path / "one") as one:
        assert many.names() == one.names() == tuple(sorted(whole))
        for name, tensor in whole.items():
            assert many.spec(name) == one.spec(name) == HFTensorSpec(name, tuple(tensor.shape), tensor.dtype)
            assert torch.equal(many.read(name), tensor)
            assert torch.equal(one.read(name), tensor)
            for dim in range(tensor.ndim):
                stop = tensor.shape[dim] // 2 + 1
                assert torch.equal(one.read_slice(name, dim, 1, stop), tensor.narrow(dim, 1, stop - 1))


def test_written_shards_respect_their_size_and_the_index(sharded: Path, tmp_path: Path) -> None:
    plan = write_copy(sharded, tmp_path / "out", shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in plan)
    assert set(index["weight_map"]) == {spec.name for spec in plan}
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 5
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as handle:
            names = set(handle.keys())
            assert handle.metadata() == {"format": "pt"}
        assert names == {name for name, where in index["weight_map"].items() if where == file}
        size = sum(spec.nbytes for spec in plan if spec.name in names)
        assert size <= 100_000 or len(names) == 1


def test_everything_but_weights_is_copied_byte_for_byte(sharded: Path, tmp_path: Path) -> None:
    write_copy(sharded, tmp_path / "out")
    kept = {p.name for p in sharded.iterdir() if "safetensors" not in p.name}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= kept
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (sharded / name).read_bytes()
    assert {p.name for p in (tmp_path / "out").iterdir()} == kept | {"model.safetensors"}


def test_transformers_reads_what_was_written(sharded: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_copy(sharded, tmp_path / "out", shard_bytes=150_000)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits for f in (sharded, tmp_path / "out")]
    assert torch.equal(*logits)


def test_mixed_dtypes_stay_aligned(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    tensors = {
        "a": torch.randn(3).bfloat16(),
        "b": torch.randn(5, 3),
        "c": torch.tensor(2.5),
        "d": torch.randn(1, 3).half(),
        "e": torch.arange(4),
        "f": torch.empty(0, 4),
    }
    plan = [HFTensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    with HFWriter(tmp_path / "out", plan, source=source) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_an_interrupted_write_leaves_nothing(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HFSource(sharded) as source:
        plan = [source.spec(name) for name in source.names()]

        def interrupted() -> None:
            with HFWriter(tmp_path / "out", plan, source=sharded) as writer:
                writer.write(plan[0].name, source.read(plan[0].name))
                assert not (tmp_path / "out").exists(), "the folder has no name before it is complete"
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert list(tmp_path.iterdir()) == []

        def incomplete() -> None:
            with HFWriter(tmp_path / "out", plan, source=sharded) as writer:
                writer.write(plan[0].name, source.read(plan[0].name))

        with pytest.raises(AssertionError, match="tensors were never written"):
            incomplete()
    assert list(tmp_path.iterdir()) == []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("areal_mega.models.hf_io.copy_model_files", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device; free space"):
        write_copy(sharded, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_told(sharded: Path, tmp_path: Path) -> None:
    write_copy(sharded, tmp_path / "out")
    with pytest.raises(UserError, match="exists; remove it or choose another folder"):
        write_copy(sharded, tmp_path / "out")
    (tmp_path / "out" / "stale").write_text("")
    write_copy(sharded, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "stale").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_faults_of_a_folder_are_one_line(sharded: Path, tmp_path: Path) -> None:
    def broken(change: Any) -> str:
        folder = tmp_path / f"case-{len(list(tmp_path.iterdir()))}"
        write_copy(sharded, folder, shard_bytes=100_000)
        change(folder, sorted(folder.glob("*.safetensors"))[1])
        with pytest.raises(UserError) as caught:
            HFSource(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "model-00002-of" in broken(lambda _, shard: shard.unlink())
    assert "is truncated or damaged" in broken(lambda _, shard: shard.write_bytes(shard.read_bytes()[:-8]))
    assert "is truncated or damaged" in broken(lambda _, shard: shard.write_bytes(b""))
    assert "which lacks it" in broken(lambda _, shard: save_file({"other": torch.zeros(1)}, shard))
    assert "index.json is damaged" in broken(lambda folder, _: (folder / "model.safetensors.index.json").write_text("{"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        HFSource(tmp_path / "empty")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle and never read"):
        HFSource(tmp_path / "empty")
    with pytest.raises(UserError, match="does not exist"):
        HFSource(tmp_path / "nowhere")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_random_models_follow_their_seed(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_model(tmp_path, family)
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_random_model(source, tmp_path / out, seed)
    a, b, c = (load_file(tmp_path / out / "model.safetensors") for out in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    matrices = [name for name, tensor in a.items() if tensor.ndim == 2]
    assert not any(torch.equal(a[name], c[name]) for name in matrices)
    assert all(a[name].std() > 0.01 for name in matrices), "routers included"
    assert (tmp_path / "a" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(report.values())
    with pytest.raises(UserError, match="exists"):
        make_random_model(source, tmp_path / "a", 1)


def test_random_models_have_the_dtype_of_their_config(tmp_path: Path) -> None:
    source = tmp_path / "config-only"
    tiny_config("llama", dtype="bfloat16").save_pretrained(source)
    assert load_hf_config(str(source))["dtype"] == "bfloat16"
    make_random_model(source, tmp_path / "out", 0)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
