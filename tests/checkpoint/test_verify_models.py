"""What differs between two models is named: tensors, config fields, files; what is spelled otherwise but the same is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal_mega.checkpoint.convert import from_hf
from areal_mega.checkpoint.verify import verify
from areal_mega.core.errors import UserError


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", shard_bytes=10**9)


@pytest.fixture(scope="module")
def checkpoint(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ck") / "ck"
    from_hf(moe, place, strategy="megatron:(attn:d2t2|ffn:e4)")
    return place


def changed(
    source: Path, out: Path, config: dict[str, Any] | None = None, tensors: Callable[[dict[str, Tensor]], None] | None = None
) -> Path:
    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    if config:
        have = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({k: v for k, v in (have | config).items() if v is not None}))
    if tensors:
        content = load_file(out / "model.safetensors")
        tensors(content)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, out / "model.safetensors")
    return out


def test_the_same_model_in_any_form(moe: Path, checkpoint: Path, tmp_path: Path) -> None:
    from_hf(moe, tmp_path / "other", strategy="megatron:d1p2")
    from_hf(moe, "memory://verify/ck", strategy="megatron:d1")
    for a, b in ((moe, moe), (moe, checkpoint), (checkpoint, moe), (checkpoint, tmp_path / "other"), (checkpoint, "memory://verify/ck")):
        assert verify(a, b) == []


def test_a_value_is_found_and_named(moe: Path, checkpoint: Path, tmp_path: Path) -> None:
    def nudge(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.5.up_proj.weight"][7, 3] += 2.0
        tensors["model.layers.0.self_attn.v_proj.weight"][0, 0] += 1.0
        tensors["model.norm.weight"][0] = 0.0

    other = changed(moe, tmp_path / "other", tensors=nudge)
    for lines in (verify(moe, other), verify(checkpoint, other)):
        assert len(lines) == 3
        assert lines[0].startswith("tensor model.layers.0.self_attn.v_proj.weight: 1 of 4096 values differ, by at most")
        assert lines[1].startswith("tensor model.layers.1.mlp.experts.5.up_proj.weight: 1 of 4096 values differ, by at most")
        assert lines[2].startswith("tensor model.norm.weight: 1 of 64 values differ")


def test_a_zeros_sign_is_a_difference(moe: Path, tmp_path: Path) -> None:
    plus = changed(moe, tmp_path / "plus", tensors=lambda t: t["model.norm.weight"].zero_())
    minus = changed(plus, tmp_path / "minus", tensors=lambda t: t["model.norm.weight"].zero_().neg_())
    assert verify(plus, minus) == ["tensor model.norm.weight: zeros differ in sign"]


def test_missing_reshaped_recast(moe: Path, tmp_path: Path) -> None:
    def less(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.mlp.gate.weight"]
        tensors["extra"] = torch.zeros(2)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)

    lines = verify(moe, changed(moe, tmp_path / "other", tensors=less))
    assert lines == [
        f"tensor model.layers.0.self_attn.q_norm.weight has shape [3] in {tmp_path / 'other'}, whose own config gives [32]",
        f"tensor extra is only in {tmp_path / 'other'}",
        f"tensor model.layers.0.mlp.gate.weight is only in {moe}",
        f"tensor model.layers.0.self_attn.q_norm.weight has shape [32] in {moe} and [3] in {tmp_path / 'other'}",
        f"tensor model.norm.weight is bfloat16 in {moe} and float32 in {tmp_path / 'other'}",
    ]


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"rope_theta": 500000.0}, "config: rotary_base comes to 10000"),
    ({"rms_norm_eps": 1e-5}, "config: layernorm_epsilon comes to 1e-06"),
    ({"tie_word_embeddings": True}, "config: share_embeddings_and_output_weights comes to False"),
    ({"num_experts_per_tok": 4}, "config: moe_router_topk comes to 2"),
    ({"norm_topk_prob": False}, "config: moe_router_pre_softmax comes to False"),
    ({"num_attention_heads": 8, "head_dim": 16}, "config: kv_channels comes to 32"),
    ({"vocab_size": 319}, "config: vocab_size comes to 320"),
    ({"bos_token_id": 7}, "config.json: bos_token_id is"),
]


@pytest.mark.parametrize(("change", "line"), FIELDS, ids=[next(iter(f)) for f, _ in FIELDS])
def test_config_fields(moe: Path, tmp_path: Path, change: dict[str, Any], line: str) -> None:
    other = changed(moe, tmp_path / "other", config=change)
    assert any(found.startswith(line) for found in verify(moe, other)), verify(moe, other)


def test_spelling_is_no_difference(moe: Path, tmp_path: Path) -> None:
    spelled = {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_experts": None,
        "num_local_experts": 8,
        "transformers_version": "9.9",
        "torch_dtype": "bfloat16",
    }
    assert verify(moe, changed(moe, tmp_path / "other", config=spelled)) == []


def test_files(moe: Path, tmp_path: Path) -> None:
    other = changed(moe, tmp_path / "other")
    (other / "tokenizer.json").write_bytes(b"{}")
    (other / "chat_template.jinja").unlink()
    assert verify(moe, other) == [f"file chat_template.jinja is only in {moe}", "file tokenizer.json differs"]


def test_what_is_neither(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        verify(tmp_path / "empty", tmp_path / "empty")
    with pytest.raises(UserError, match="is no checkpoint"):
        verify("memory://verify/none", tmp_path)
