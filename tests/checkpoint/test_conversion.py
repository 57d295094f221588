"""HuggingFace folders to checkpoints and back: bit-equal, bounded, resumable, and never half-written output that looks whole."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import model_bytes, write_model
from ranks import RankFailed, run_ranks

from areal_mega.checkpoint import convert, journal
from areal_mega.checkpoint.arrays import fit_chunks
from areal_mega.checkpoint.convert import finite, from_hf, to_hf
from areal_mega.checkpoint.journal import exclusive
from areal_mega.checkpoint.location import Location
from areal_mega.checkpoint.model import Checkpoint
from areal_mega.checkpoint.pool import run_units
from areal_mega.core.errors import UserError
from areal_mega.models.hf_io import HFTensorSpec, HFWriter

CASES = [
    ("llama", "megatron:d1t2p2", {}),
    ("llama", "megatron:d1", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("qwen2", "megatron:d1t4", {"vocab_size": 301}),
    ("qwen3", "megatron:d1p2", {}),
    ("qwen3_moe", "megatron:(attn:d2t2|ffn:e4)", {"num_hidden_layers": 4, "mlp_only_layers": [0]}),
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe")


@pytest.mark.parametrize(("family", "strategy", "overrides"), CASES)
def test_there_and_back_is_bit_equal(family: str, strategy: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", family, **overrides)
    from_hf(source, tmp_path / "ck", strategy=strategy)
    to_hf(tmp_path / "ck", tmp_path / "hf", shard_bytes=50_000)
    assert model_bytes(tmp_path / "hf") == model_bytes(source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "hf", "source"]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "hf").glob("*.safetensors")}
    assert sizes.keys() == set(index["weight_map"].values())
    weights = [v for v in model_bytes(source).values() if isinstance(v, tuple)]
    assert index["metadata"]["total_size"] == sum(len(v[2]) for v in weights)
    assert len(index["weight_map"]) == len(weights)


def test_large_arrays_have_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_chunks, "__defaults__", (1000,))
    source = write_model(tmp_path / "source", "qwen3_moe")
    manifest = from_hf(source, tmp_path / "ck", strategy="megatron:d1t2")
    assert max(len(list(spec.chunk_keys())) for spec in manifest.arrays.values()) > 20
    to_hf(tmp_path / "ck", tmp_path / "hf")
    assert model_bytes(tmp_path / "hf") == model_bytes(source)


def test_through_an_object_store(moe: Path, tmp_path: Path) -> None:
    from_hf(moe, "memory://conversions/a", strategy="megatron:d1t2p2")
    assert "journal.json" not in Location.parse("memory://conversions/a").listing()
    to_hf("memory://conversions/a/", tmp_path / "hf")
    assert model_bytes(tmp_path / "hf") == model_bytes(moe)
    with pytest.raises(UserError, match="is written to a local path"):
        to_hf("memory://conversions/a/", "memory://conversions/hf")


def test_dtype_policy(moe: Path, tmp_path: Path) -> None:
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1", dtype=torch.float32)
    to_hf(tmp_path / "ck", tmp_path / "hf32")
    assert {v[0] for v in model_bytes(tmp_path / "hf32").values() if isinstance(v, tuple)} == {torch.float32}
    to_hf(tmp_path / "ck", tmp_path / "hf16", dtype=torch.bfloat16)
    assert model_bytes(tmp_path / "hf16") == model_bytes(moe)


def test_mixed_dtypes_in_one_parameter_need_a_choice(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = write_model(tmp_path / "source", "llama", shard_bytes=10**9)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].float()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match=r"gate_proj.weight is bfloat16 but .*up_proj.weight float32.*give --dtype"):
        from_hf(source, tmp_path / "ck", strategy="megatron:d1")
    from_hf(source, tmp_path / "ck", strategy="megatron:d1", dtype=torch.bfloat16)
    to_hf(tmp_path / "ck", tmp_path / "hf")
    written = model_bytes(tmp_path / "hf")["model.layers.0.mlp.up_proj.weight"]
    assert written[2] == tensors["model.layers.0.mlp.up_proj.weight"].bfloat16().view(torch.uint8).numpy().tobytes()


def test_no_whole_model_is_ever_in_memory(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes under way stay within the pool's bound, whatever the model's size."""
    under_way, most = 0, 0

    def watched(units: Any, work: Any, *, workers: int, cost: Any, done: Any) -> None:
        def counting(unit: Any) -> None:
            nonlocal under_way, most
            under_way += cost(unit)
            most = max(most, under_way)
            work(unit)
            under_way -= cost(unit)

        run_units(units, counting, workers=workers, cost=cost, done=done, in_flight=200_000)

    monkeypatch.setattr(convert, "run_units", watched)
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1", workers=4)
    total = Checkpoint(tmp_path / "ck").manifest.nbytes
    assert 0 < most <= 200_000 < total


@pytest.mark.parametrize("workers", [1, 3])
def test_pool_stops_at_the_first_failure(workers: int) -> None:
    begun: list[int] = []

    def work(unit: int) -> None:
        begun.append(unit)
        if unit == 5:
            raise UserError("five")

    with pytest.raises(UserError, match="five"):
        run_units(range(1000), work, workers=workers, cost=lambda unit: 1)
    assert len(begun) < 100


# --- interruptions


def convert_killed(rank: int, world_size: int, *, direction: str, source: str, out: str) -> None:
    """A process of its own that ends by SIGKILL in the middle."""

    class Killing(convert.Silent):
        count = 0

        def advance(self, nbytes: int) -> None:
            self.count += 1
            if self.count == 9:
                os.kill(os.getpid(), signal.SIGKILL)

    journal.FLUSH_BYTES = 40_000
    if direction == "from-hf":
        from_hf(source, out, strategy="megatron:d1t2", workers=2, meter=Killing())
    else:
        to_hf(source, out, shard_bytes=100_000, workers=2, meter=Killing())


class Counting(convert.Silent):
    total = done = later = 0

    def begin(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def advance(self, nbytes: int) -> None:
        self.later += nbytes


def test_killed_conversions_go_on(moe: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="ended with -9"):
        run_ranks(1, convert_killed, distributed=False, direction="from-hf", source=moe, out=tmp_path / "ck")
    assert [p.name for p in tmp_path.iterdir()] == [".ck.partial"]
    with pytest.raises(UserError, match="the checkpoint was never completed; run what writes it again"):
        Checkpoint(tmp_path / "ck")
    with pytest.raises(UserError, match="was begun from other input or with other options"):
        from_hf(moe, tmp_path / "ck", strategy="megatron:d1")
    meter = Counting()
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1t2", meter=meter)
    assert 0 < meter.done < meter.total
    assert meter.done + meter.later == meter.total
    with pytest.raises(RankFailed, match="ended with -9"):
        run_ranks(1, convert_killed, distributed=False, direction="to-hf", source=tmp_path / "ck", out=tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hf.partial", "ck"]
    meter = Counting()
    to_hf(tmp_path / "ck", tmp_path / "hf", shard_bytes=100_000, meter=meter)
    assert 0 < meter.done < meter.total
    assert model_bytes(tmp_path / "hf") == model_bytes(moe)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "hf"]
    assert {p.name for p in (tmp_path / "ck").iterdir()} == {"arrays", "files", "checkpoint.json"}


def test_interrupted_store_conversions_go_on(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FLUSH_BYTES", 1)

    class Interrupting(convert.Silent):
        count = 0

        def advance(self, nbytes: int) -> None:
            self.count += 1
            if self.count == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        from_hf(moe, "memory://halted/ck", strategy="megatron:d1", workers=2, meter=Interrupting())
    with pytest.raises(UserError, match="never completed"):
        Checkpoint("memory://halted/ck")
    meter = Counting()
    from_hf(moe, "memory://halted/ck", strategy="megatron:d1", meter=meter)
    assert meter.done > 0
    Checkpoint("memory://halted/ck")


def test_two_conversions_into_one_folder(moe: Path, tmp_path: Path) -> None:
    holder = exclusive(Location.parse(tmp_path / "ck").aside)
    with holder, pytest.raises(UserError, match="another conversion is writing"):
        from_hf(moe, tmp_path / "ck", strategy="megatron:d1")
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1")
    with pytest.raises(UserError, match="exists; remove it or choose another place"):
        from_hf(moe, tmp_path / "ck", strategy="megatron:d1")
    with pytest.raises(UserError, match="exists; remove it or choose another place"):
        to_hf(tmp_path / "ck", tmp_path / "ck")


# --- disks


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a small disk needs rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_small_disk_is_told_before_the_first_byte_and_a_full_one_when_it_is(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1")
    with small_disk(tmp_path / "disk", "400k") as disk:
        for direction in (lambda: from_hf(moe, disk / "out", strategy="megatron:d1"), lambda: to_hf(tmp_path / "ck", disk / "hf")):
            with pytest.raises(UserError, match=r"are still to be written and .* are free; free .* then run the same again"):
                direction()
        monkeypatch.setattr(convert, "_check_space", lambda place, needed: None)
        for direction in (lambda: from_hf(moe, disk / "out", strategy="megatron:d1"), lambda: to_hf(tmp_path / "ck", disk / "hf")):
            with pytest.raises(UserError, match=r"No space left on device; free space") as caught:
                direction()
            assert "\n" not in str(caught.value)
            assert not (disk / "out").exists()
            assert not (disk / "hf").exists()
            for path in disk.iterdir():
                subprocess.run(["rm", "-r", path], check=True)


def convert_limited(rank: int, world_size: int, *, direction: str, source: str, out: str) -> str:
    """A process of its own that may write files of 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        if direction == "from-hf":
            from_hf(source, out, strategy="megatron:d1")
        else:
            to_hf(source, out)
    except UserError as error:
        return str(error)
    return "converted"


def test_a_limit_on_file_sizes_is_one_line(moe: Path, tmp_path: Path) -> None:
    from_hf(moe, tmp_path / "ck", strategy="megatron:d1")
    for direction, source, out in (("from-hf", moe, "ck2"), ("to-hf", tmp_path / "ck", "hf")):
        said = run_ranks(1, convert_limited, distributed=False, direction=direction, source=source, out=tmp_path / out)[0]
        assert "File too large; raise the limit on file sizes (ulimit -f)" in said
        assert "\n" not in said
        assert not (tmp_path / out).exists()


# --- broken sources


def test_nan_is_refused_both_ways(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "llama", shard_bytes=10**9)
    from_hf(source, tmp_path / "ck", strategy="megatron:d1")
    checkpoint = Checkpoint(tmp_path / "ck")
    spec = checkpoint.manifest.arrays["decoder.layers.1.mlp.linear_fc2.weight"]
    checkpoint.store.write(spec, (3, 5), torch.tensor([[float("nan")]], dtype=torch.bfloat16))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        to_hf(tmp_path / "ck", tmp_path / "hf")
    huge = torch.full((2, 64), 3e38, dtype=torch.bfloat16)
    checkpoint.store.write(spec, (0, 0), huge)  # a sum that overflows though every value is finite
    checkpoint.store.write(spec, (3, 5), torch.tensor([[1.0]], dtype=torch.bfloat16))
    to_hf(tmp_path / "ck", tmp_path / "hf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finite_is_isfinite(dtype: torch.dtype) -> None:
    """Every bit pattern of 16 bits, and of 32 bits those around each edge."""
    if dtype.itemsize == 2:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    else:
        edges = torch.tensor([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF])
        bits = torch.cat([edges, edges - 2**31]).to(torch.int32)
    for value in bits.view(dtype):
        assert finite(value[None]) == bool(torch.isfinite(value))
    assert finite(torch.empty(0, dtype=dtype))


def test_unmapped_reads_are_the_files_rows(moe: Path, tmp_path: Path) -> None:
    from areal_mega.models.hf_io import HFSource

    with HFSource(moe) as source:
        name = "model.layers.0.mlp.gate.weight"
        out = torch.empty(3, 64, dtype=torch.bfloat16)
        source.read_rows(name, 2, out)
        assert torch.equal(out, source.read(name)[2:5])
    plan = [HFTensorSpec("x", (4, 2), torch.float32)]
    with HFWriter(tmp_path / "rows", plan, source={"config.json": b"{}"}) as writer:
        writer.write_rows("x", 2, torch.ones(2, 2))
        writer.write_rows("x", 0, torch.zeros(2, 2))
        with pytest.raises(AssertionError, match="written already"):
            writer.write_rows("x", 0, torch.zeros(2, 2))
    with HFSource(tmp_path / "rows") as source:
        assert source.read("x").tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
