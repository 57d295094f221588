"""config.json to Megatron settings: every field reaches the model or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_ranks import plain_config
from tiny_models import FAMILIES, tiny_config

from areal_mega.core.errors import UserError
from areal_mega.models.registry import family_for, load_hf_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MOE = BASE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def settings_of(hf: dict[str, Any]) -> dict[str, Any]:
    family = family_for(hf)
    return family.transformer_config(hf) | family.gpt_kwargs(hf) | family.config_attributes(hf)


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_takes_every_family(name: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    hf = plain_config(tiny_config(name))
    config = TransformerConfig(**family_for(hf).transformer_config(hf))
    assert config.layernorm_epsilon == 1e-6
    assert config.kv_channels == (hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
    roles = {param.role for param in family_for(hf).parameters(hf)}
    assert (config.add_qkv_bias or config.add_bias_linear) == ("self_attention.linear_qkv.bias" in roles)
    assert config.add_bias_linear == ("self_attention.linear_proj.bias" in roles)
    assert config.qk_layernorm == ("self_attention.q_layernorm.weight" in roles)
    assert config.moe_aux_loss_coeff == 0, "the model's own router_aux_loss_coef never leaks into training"
    assert config.attention_dropout == config.hidden_dropout == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_of_absent_fields_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(name, hidden_size=256, num_attention_heads=4, num_key_value_heads=4)
    full = plain_config(theirs)
    bare = {k: full.get(k, BASE.get(k)) for k in BASE} | {"model_type": name}
    del bare["rope_theta"]
    if name == "qwen3_moe":
        bare |= {k: full[k] for k in ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")}
    ours, wanted = settings_of(bare), settings_of(full)
    assert ours == wanted
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours["kv_channels"] == head_dim


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert settings_of(BASE)["kv_channels"] == 16
    assert settings_of(BASE | {"head_dim": 24})["kv_channels"] == 24
    with pytest.raises(UserError, match="hidden_size 64 is no multiple of num_attention_heads 5"):
        settings_of(BASE | {"num_attention_heads": 5})


def test_key_value_heads_default_to_heads() -> None:
    hf = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    assert settings_of(hf)["num_query_groups"] == 4


def test_llama_biases() -> None:
    biased = BASE | {"attention_bias": True, "mlp_bias": True}
    assert settings_of(biased)["add_bias_linear"] is True
    roles = {p.role for p in family_for(biased).parameters(biased)}
    assert {"self_attention.linear_proj.bias", "mlp.linear_fc1.bias", "mlp.linear_fc2.bias"} <= roles
    with pytest.raises(UserError, match="attention_bias=True with mlp_bias=False"):
        settings_of(BASE | {"attention_bias": True})


@pytest.mark.parametrize(("norm_topk", "pre_softmax"), [(True, False), (False, True)])
def test_router_normalisation(norm_topk: bool, pre_softmax: bool) -> None:
    assert settings_of(MOE | {"norm_topk_prob": norm_topk})["moe_router_pre_softmax"] is pre_softmax


@pytest.mark.parametrize(
    ("fields", "frequency"),
    [
        ({}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [0, 0, 0, 1]),
    ],
)
def test_dense_and_sparse_layers(fields: dict[str, Any], frequency: list[int]) -> None:
    hf = MOE | {"num_hidden_layers": 4} | fields
    assert settings_of(hf)["moe_layer_freq"] == frequency
    sparse = {p.layer for p in family_for(hf).parameters(hf) if p.role == "mlp.router.weight"}
    assert sparse == {layer for layer, is_sparse in enumerate(frequency) if is_sparse}


@pytest.mark.parametrize(
    ("hf", "words"),
    [
        (
            BASE | {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported: .*llama, .*qwen3_moe .to add one: docs/add-a-family.md",
        ),
        ({k: v for k, v in BASE.items() if k != "model_type"}, "model_type 'None' is not supported"),
        ({k: v for k, v in BASE.items() if k != "rms_norm_eps"}, "lacks rms_norm_eps"),
        ({k: v for k, v in MOE.items() if k != "num_experts"}, r"lacks num_experts \(or num_local_experts\)"),
        (BASE | {"hidden_act": "gelu"}, "hidden_act='gelu' cannot be honoured"),
        (BASE | {"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True cannot be honoured"),
        (BASE | {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        (BASE | {"model_type": "qwen3", "attention_bias": True}, "attention_bias=True cannot be honoured"),
        (MOE | {"mlp_only_layers": [0, 1]}, "leave no layer with experts"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(hf: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        settings_of(hf)
    assert "\n" not in str(caught.value)


def test_missing_folder_and_missing_or_broken_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_hf_config(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        load_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert load_hf_config(str(tmp_path)) == BASE


def test_an_unknown_hub_name_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="model 'nobody/nothing' is neither a folder nor reachable") as caught:
        load_hf_config("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_tables_and_layouts_need_no_torch() -> None:
    code = (
        "import sys; from areal_mega.models.registry import family_for; from areal_mega.models.proof import prove_table;"
        "import areal_mega.models.ownership; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- rotary embeddings ---------------------------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with the implied attention factor": YARN | {"attention_factor": 1.1386294361119891},
}
THETA, LENGTH = 500000.0, 64


def new_place(rope: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in BASE.items() if k != "rope_theta"} | {"rope_parameters": rope | {"rope_theta": THETA}}


def old_place(rope: dict[str, Any]) -> dict[str, Any]:
    renamed = {("type" if k == "rope_type" else k): v for k, v in rope.items()}
    return BASE | {"rope_theta": THETA} | ({} if rope["rope_type"] == "default" else {"rope_scaling": renamed})


@pytest.mark.parametrize("place", [new_place, old_place])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_angles_equal_those_of_transformers(name: str, place: Any) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
        _yarn_get_concentration_factor,
    )
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = place(ROPES[name])
    family = family_for(hf)
    gpt, extra = family.gpt_kwargs(hf), family.config_attributes(hf)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in hf.items() if k != "model_type"}))
    cos, sin = theirs(torch.zeros(1, 1, 16), torch.arange(LENGTH)[None])
    common = {"kv_channels": 16, "rotary_percent": gpt["rotary_percent"], "rotary_base": gpt["rotary_base"], "use_cpu_initialization": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        if gpt["position_embedding_type"] == "yarn":
            assert extra.keys() == {
                "yarn_rotary_scaling_factor",
                "yarn_original_max_position_embeddings",
                "yarn_beta_fast",
                "yarn_beta_slow",
                "yarn_mscale",
                "yarn_mscale_all_dim",
                "yarn_correction_range_round_to_int",
            }
            attributes = {key.removeprefix("yarn_"): value for key, value in extra.items()}
            attributes["scaling_factor"] = attributes.pop("rotary_scaling_factor")
            angles, _ = YarnRotaryEmbedding(**common, **attributes)(LENGTH)
            scale = _yarn_get_concentration_factor(attributes["scaling_factor"], attributes["mscale"], attributes["mscale_all_dim"])
        else:
            assert not extra
            options = {k: v for k, v in gpt.items() if k in ("rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor")}
            angles, scale = RotaryEmbedding(**common, **options)(LENGTH), 1.0
    assert torch.allclose(angles[:, 0, 0].cos() * scale, cos[0], atol=1e-5)
    assert torch.allclose(angles[:, 0, 0].sin() * scale, sin[0], atol=1e-5)


def test_theta_from_either_place_and_partial_rotary() -> None:
    assert settings_of(BASE | {"rope_theta": 5e5})["rotary_base"] == 5e5
    assert settings_of(new_place({"rope_type": "default"}))["rotary_base"] == THETA
    assert settings_of(BASE | {"partial_rotary_factor": 0.5})["rotary_percent"] == 0.5
    assert settings_of(new_place({"rope_type": "default", "partial_rotary_factor": 0.25}))["rotary_percent"] == 0.25


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' cannot be honoured; supported: default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}, "with wobble cannot be honoured"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor=8.0 cannot be honoured: Megatron-Core fixes it at 4.0"),
        ({"rope_scaling": YARN | {"attention_factor": 2.0}}, "attention_factor=2.0 cannot be honoured"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.5}, "yarn with partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_theta is 10000.0 at top level and 5.0 in the rope settings",
        ),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "rope_parameters and another rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope settings per layer type"),
    ],
)
def test_rope_that_would_not_reach_megatron_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        settings_of(BASE | fields)
