"""Starting the server: a mistake is one line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from areal_mega.core.errors import UserError
from areal_mega.serving.app import load, parser, serve
from areal_mega.serving.loader import load_weights, stop_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("start"), "qwen3", tie_word_embeddings=True)


def copied(folder: Path, target: Path, config: dict[str, object] | None = None, weights: dict[str, torch.Tensor] | None = None) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    if config is not None:
        (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    if weights is not None:
        save_file(weights, target / "model.safetensors")
    return target


def refuses(message: str, *args: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        serve([*args, "--port", "0"])
    assert "\n" not in str(error.value)


def test_flags_that_make_no_server(folder: Path) -> None:
    refuses("give the model once")
    refuses("give the model once", str(folder), "--model-path", str(folder))
    refuses("unrecognized arguments: --prot", str(folder), "--prot", "1")
    refuses("dtype 'int3' is not served", str(folder), "--dtype", "int3")
    refuses("--max-running-requests must be at least 1, got 0", str(folder), "--max-running-requests", "0")
    refuses(r"--context-length 513 is not in 1..512", str(folder), "--context-length", "513")
    refuses("--max-total-tokens 100 holds no request of the context length 512", str(folder), "--max-total-tokens", "100")
    refuses("qwen3 has no experts", str(folder), "--enable-return-routed-experts")
    refuses("cannot listen on 203.0.113.1", str(folder), "--host", "203.0.113.1")


def test_loading_leaves_no_threads_behind(folder: Path) -> None:
    """Or the engine's own would no longer be all there are, and sleep between operations."""
    had = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        before = len(list(Path("/proc/self/task").iterdir()))
        model, _, _ = load(parser().parse_args(["--model-path", str(folder), "--dtype", "bfloat16"]))
        end = time.monotonic() + 10
        while len(list(Path("/proc/self/task").iterdir())) > before and time.monotonic() < end:
            time.sleep(0.01)
        assert len(list(Path("/proc/self/task").iterdir())) <= before
        assert model.weights.digest()
    finally:
        torch.set_num_threads(had)


def test_folders_that_hold_no_model(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    refuses("model folder .*/nope does not exist", str(tmp_path / "nope"))
    refuses("'gpt9' is not supported; supported: .*llama", str(copied(folder, tmp_path / "a", {"model_type": "gpt9"})))
    refuses("hidden_act='gelu' cannot be honoured", str(copied(folder, tmp_path / "b", {"hidden_act": "gelu"})))
    refuses("quantised checkpoints are not served", str(copied(folder, tmp_path / "c", {"quantization_config": {"bits": 4}})))
    lacking = {k: v for k, v in weights.items() if k != "model.norm.weight"}
    refuses("lacks 1 tensors of this model: model.norm.weight", str(copied(folder, tmp_path / "d", weights=lacking)))
    refuses(
        "'model.extra.weight' is no parameter",
        str(copied(folder, tmp_path / "e", weights=weights | {"model.extra.weight": torch.zeros(1)})),
    )
    other = weights | {"model.norm.weight": torch.zeros(63)}
    refuses(r"'model.norm.weight' has shape \[63\], the model has \[64\]", str(copied(folder, tmp_path / "f", weights=other)))
    bare = copied(folder, tmp_path / "g")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    refuses("no tokenizer in .* add its files .* or start with --skip-tokenizer-init", str(bare))


def test_a_port_in_use_is_exit_2_and_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "areal_mega.serving", str(folder), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --host or --port\n"


def test_tied_heads_written_twice_and_rotary_buffers_are_no_error(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    extra = {"lm_head.weight": weights["model.embed_tokens.weight"].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    loaded, _ = load_weights(str(copied(folder, tmp_path / "tied", weights=weights | extra)), "auto")
    assert loaded.hf.keys() == weights.keys()
    assert all(torch.equal(loaded.hf[name], tensor) for name, tensor in weights.items())


def test_every_end_of_sequence_id_stops(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "eos", {"eos_token_id": 7})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert stop_tokens(str(path), json.loads((path / "config.json").read_text())) == (5, 6, 7)
