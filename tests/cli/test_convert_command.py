"""``areal-mega convert`` as a user runs it: exit codes, one line for each mistake, and real weights there and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_models import model_bytes, write_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from areal_mega.cli.convert import parse_size
from areal_mega.cli.main import app
from areal_mega.core.errors import UserError

SMOLLM2 = Path(os.environ.get("AREAL_MEGA_SMOLLM2", ""))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", "llama")


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output, in this process; a mistake's message is what ``main`` prints after ``error:``."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    if isinstance(result.exception, UserError):
        return 2, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_there_back_and_verified(llama: Path, tmp_path: Path) -> None:
    code, said = run("from-hf", llama, tmp_path / "ck", "--strategy", "megatron:d1t2p2", "--workers", "2")
    assert (code, said) == (0, f"{tmp_path / 'ck'}: 15 arrays, 0.00 GB\n")
    assert run("to-hf", tmp_path / "ck", tmp_path / "hf", "--shard-size", "60KB")[0] == 0
    assert model_bytes(tmp_path / "hf") == model_bytes(llama)
    assert run("verify", llama, tmp_path / "ck") == (0, "equal: every tensor, every config field, every file\n")
    assert run("to-hf", tmp_path / "ck", tmp_path / "hf32", "--dtype", "fp32")[0] == 0
    code, said = run("verify", tmp_path / "hf32", tmp_path / "hf")
    assert code == 1
    assert "tensor model.norm.weight is float32 in" in said


def test_a_mistake_is_one_line_and_exit_code_2(llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_mega", "convert", "from-hf", str(llama), str(tmp_path / "ck"), "--strategy", "megatron:d1t3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "3" in done.stderr
    assert list(tmp_path.iterdir()) == []


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _truncated(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])


def _no_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"].pop("model.norm.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)


def _forgotten_tensor(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(shard) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, shard)


def _twice(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file(load_file(second) | dict(list(load_file(first).items())[:1]), second)


def _other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_config, "has no config.json"),
        (_no_shard, "is missing, but model.safetensors.index.json names it"),
        (_truncated, "is truncated or damaged"),
        (_no_tensor, "tensor model.norm.weight is missing"),
        (_forgotten_tensor, "tensor model.layers.0.self_attn.q_proj.bias belongs to no"),
        (_twice, "tensor model.embed_tokens.weight is in model-00001-of-"),
        (_other_config, "they are of different models"),
    ],
    ids=["no config.json", "no shard", "truncated shard", "no tensor", "not in the index", "in two shards", "other config"],
)
def test_damaged_models(llama: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder)
    code, said = run("from-hf", folder, tmp_path / "ck", "--strategy", "megatron:d1")
    assert code == 2
    assert message in said
    assert "\n" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["damaged"]


def test_mistakes_of_arguments(llama: Path, tmp_path: Path) -> None:
    assert "is no checkpoint" in run("to-hf", llama, tmp_path / "out")[1]
    assert "does not exist" in run("from-hf", "./nowhere", tmp_path / "out", "--strategy", "megatron:d1")[1]
    assert "exists; remove it" in run("from-hf", llama, tmp_path, "--strategy", "megatron:d1")[1]
    assert "scheme 'ftp'" in run("to-hf", "ftp://x/y", tmp_path / "out")[1]
    assert "not a size" in run("to-hf", llama, tmp_path / "out", "--shard-size", "many")[1]
    assert run("from-hf", llama, tmp_path / "out", "--strategy", "megatron:d1", "--dtype", "int3")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    assert [parse_size(t) for t in ("5GiB", "500mb", "1.5 KB", "12")] == [5 * 2**30, 500 * 10**6, 1500, 12]
    for text in ("", "0", "-1GB", "inf", "4TB?"):
        with pytest.raises(UserError, match="not a size"):
            parse_size(text)


@pytest.mark.skipif(not (SMOLLM2 / "config.json").is_file(), reason="AREAL_MEGA_SMOLLM2 names no folder with SmolLM2's weights")
def test_smollm2_there_and_back(tmp_path: Path) -> None:
    # 9 heads: tensor parallelism of 3.
    assert run("from-hf", SMOLLM2, tmp_path / "ck", "--strategy", "megatron:d1t3p2")[0] == 0
    assert run("to-hf", tmp_path / "ck", tmp_path / "hf")[0] == 0
    assert model_bytes(tmp_path / "hf") == model_bytes(SMOLLM2)
    assert run("verify", SMOLLM2, tmp_path / "hf")[0] == 0
