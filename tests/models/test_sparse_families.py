"""The families that are trained and not served here: shards and back bit-equal, names of both backends, settings that reach Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from simulated_ranks import empty_shards, gather_all, layout_of, load_all, plain_config, save_model
from tiny_models import SPARSE, tiny_config

from areal_mega.core.errors import UserError
from areal_mega.models.hf_io import HFSource
from areal_mega.models.registry import family_for, load_hf_config
from areal_mega.models.table import LOCAL, TRANSFORMER_ENGINE, Naming, TableMismatch

LAYOUTS = ["d1", "t2", "d2e2", "p2v2", "t2c2e2", "d2t2p2e2", "(attn:d2t2|ffn:e2t2)", "(attn:t4|ffn:e4t1)"]


@pytest.fixture(scope="session")
def sparse_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sparse")
    # 301 is divisible by no tensor parallelism; four layers for two stages of two virtual stages.
    return {name: save_model(root / name, tiny_config(name, vocab_size=301, num_hidden_layers=4)) for name in SPARSE}


@pytest.mark.parametrize("name", SPARSE)
def test_every_layout_is_bit_equal(sparse_folders: dict[str, Path], name: str) -> None:
    folder = sparse_folders[name]
    hf, wanted = load_hf_config(str(folder)), load_file(folder / "model.safetensors")
    family = family_for(hf)
    for layout in LAYOUTS:
        with HFSource(folder) as source:
            shards = load_all(family, hf, source, layout_of(f"megatron:{layout}"))
        received = dict(gather_all(shards, family, hf, layout_of(f"megatron:{layout}"), parcel_bytes=30_000))
        assert received.keys() == wanted.keys(), layout
        assert all(torch.equal(received[name], wanted[name]) for name in wanted), layout


@pytest.mark.parametrize("layout", ["p2[2,5]", "p2[1,3,2,1]v2", "d2t2p3[3,3,1]e2"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe"])
def test_uneven_stages_of_dense_then_sparse_layers_are_bit_equal(name: str, layout: str, tmp_path: Path) -> None:
    dense = {"first_k_dense_replace": 3} if name == "deepseek_v3" else {"mlp_only_layers": [0, 1, 4], "tie_word_embeddings": True}
    folder = save_model(tmp_path / name, tiny_config(name, vocab_size=301, num_hidden_layers=7, **dense))
    hf, wanted, ranks = load_hf_config(str(folder)), load_file(folder / "model.safetensors"), layout_of(f"megatron:{layout}")
    for naming in (LOCAL, TRANSFORMER_ENGINE):
        with HFSource(folder) as source:
            shards = load_all(family_for(hf), hf, source, ranks, naming=naming)
        received = dict(gather_all(shards, family_for(hf), hf, ranks, naming=naming))
        assert received.keys() == wanted.keys()
        assert all(torch.equal(received[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", SPARSE)
def test_every_naming_is_bit_equal(sparse_folders: dict[str, Path], name: str) -> None:
    folder = sparse_folders[name]
    hf, wanted = load_hf_config(str(folder)), load_file(folder / "model.safetensors")
    family, ranks = family_for(hf), layout_of("megatron:d2t2p2e2")
    for naming in (TRANSFORMER_ENGINE, Naming(fused_norms=False, grouped_experts=True)):
        with HFSource(folder) as source:
            shards = load_all(family, hf, source, ranks, naming=naming)
        received = dict(gather_all(shards, family, hf, ranks, naming=naming))
        assert received.keys() == wanted.keys()
        assert all(torch.equal(received[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_the_correction_bias_is_an_fp32_island(sparse_folders: dict[str, Path], name: str) -> None:
    hf, ranks = load_hf_config(str(sparse_folders[name])), layout_of("megatron:d2e2")
    family, wanted = family_for(hf), load_file(sparse_folders[name] / "model.safetensors")
    with HFSource(sparse_folders[name]) as source:
        shards = load_all(family, hf, source, ranks, dtype=torch.bfloat16)
        cast = empty_shards(family.table(hf), ranks, 0)
        cast = {n: t.bfloat16() for n, t in cast.items()}
        with pytest.raises(TableMismatch, match=r"expert_bias must stay fp32 but the model has it in torch\.bfloat16"):
            from areal_mega.models.loading import load_hf_weights

            load_hf_weights(cast, source, family, hf, ranks, 0)
    for dtype in (None, torch.bfloat16):
        for tensor_name, tensor in gather_all(shards, family, hf, ranks, dtype=dtype):
            island = tensor_name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if island else torch.bfloat16), tensor_name
            assert not island or torch.equal(tensor, wanted[tensor_name])


def test_transformer_engine_names_of_latent_attention() -> None:
    """Up projections carry the norms of their inputs; down projections are whole; the input norm stands alone, being used twice."""
    hf = plain_config(tiny_config("deepseek_v3"))
    named = empty_shards(family_for(hf).table(hf), layout_of("megatron:t2e2"), 1, naming=TRANSFORMER_ENGINE)
    prefix = "decoder.layers.1."
    shapes = {name.removeprefix(prefix): tuple(t.shape) for name, t in named.items() if name.startswith(prefix)}
    experts = {f"mlp.experts.linear_fc1.weight{e}": (48, 32) for e in range(4, 8)}
    experts |= {f"mlp.experts.linear_fc2.weight{e}": (32, 24) for e in range(4, 8)}
    assert shapes == experts | {
        "input_layernorm.weight": (32,),
        "self_attention.linear_q_down_proj.weight": (24, 32),
        "self_attention.linear_q_up_proj.layer_norm_weight": (24,),
        "self_attention.linear_q_up_proj.weight": (40, 24),
        "self_attention.linear_kv_down_proj.weight": (24, 32),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (16,),
        "self_attention.linear_kv_up_proj.weight": (64, 16),
        "self_attention.linear_proj.weight": (32, 40),
        "pre_mlp_layernorm.weight": (32,),
        "mlp.router.weight": (8, 32),
        "mlp.router.expert_bias": (8,),
        "mlp.shared_experts.linear_fc1.weight": (24, 32),
        "mlp.shared_experts.linear_fc2.weight": (32, 12),
    }


def test_both_down_projections_share_a_bucket(sparse_folders: dict[str, Path]) -> None:
    from areal_mega.models.gather import HFGatherer
    from areal_mega.sync.plan import plan_buckets

    hf, ranks = load_hf_config(str(sparse_folders["deepseek_v3"])), layout_of("megatron:d1")
    family = family_for(hf)
    plan = HFGatherer(empty_shards(family.table(hf), ranks, 0), family, hf, ranks, 0).plan
    specs = [type("Spec", (), {"name": s.name, "shape": s.shape, "dtype": str(s.dtype).removeprefix("torch.")})() for s in plan]
    buckets = plan_buckets(specs, max_bytes=1)
    pairs = [b.names for b in buckets if any("q_a_proj" in n for n in b.names)]
    assert pairs == [tuple(f"model.layers.{layer}.self_attn.{n}.weight" for n in ("q_a_proj", "kv_a_proj_with_mqa")) for layer in range(4)]


# --- settings ------------------------------------------------------------------------------------------------------------------------


def settings_of(hf: dict[str, Any]) -> dict[str, Any]:
    family = family_for(hf)
    return family.transformer_config(hf) | family.gpt_kwargs(hf) | family.config_attributes(hf)


@pytest.mark.parametrize("name", SPARSE)
def test_megatron_takes_every_family(name: str) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    hf = plain_config(tiny_config(name))
    family = family_for(hf)
    settings = family.transformer_config(hf)
    config = (MLATransformerConfig if "multi_latent_attention" in settings else TransformerConfig)(**settings)
    assert config.layernorm_epsilon == hf["rms_norm_eps"]
    assert config.moe_aux_loss_coeff == 0, "the model's own router_aux_loss_coef never leaks into training"
    sparse = {p.layer for p in family.parameters(hf) if p.role == "mlp.router.weight"}
    frequency = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1, 1]
    assert sparse == {layer for layer, is_sparse in enumerate(frequency) if is_sparse}


def test_router_settings() -> None:
    def router(name: str, **fields: Any) -> dict[str, Any]:
        settings = settings_of(plain_config(tiny_config(name)) | fields)
        return {k.removeprefix("moe_router_"): v for k, v in settings.items() if k.startswith("moe_router_")}

    assert router("mixtral") == {"topk": 2, "score_function": "softmax", "pre_softmax": False}
    assert router("qwen2_moe")["pre_softmax"] and not router("qwen2_moe-renormalised")["pre_softmax"]
    v2, v3 = router("deepseek_v2-groups"), router("deepseek_v3")
    assert (v2["score_function"], v2["pre_softmax"], v2["num_groups"], v2["group_topk"], v2["topk_scaling_factor"]) == (
        "softmax",
        True,
        4,
        1,
        16,
    )
    assert (v3["score_function"], v3["enable_expert_bias"], v3["num_groups"], v3["group_topk"]) == ("sigmoid", True, 4, 2)
    assert "num_groups" not in router("deepseek_v2", n_group=4, topk_group=1), "the greedy method does not look at groups"
    assert "num_groups" not in router("deepseek_v3", topk_group=4), "all groups may be chosen"
    assert "num_groups" not in router("moonlight")
    assert settings_of(plain_config(tiny_config("deepseek_v3")))["group_score_experts"] == 2
    assert settings_of(plain_config(tiny_config("deepseek_v2-groups")))["group_score_experts"] == 1


def test_defaults_of_absent_fields() -> None:
    mixtral, glm = plain_config(tiny_config("mixtral")), plain_config(tiny_config("glm4_moe"))
    assert settings_of(mixtral | {"rope_parameters": None})["rotary_base"] == 1e6
    assert settings_of(glm | {"rope_parameters": None})["rotary_percent"] == 0.5
    assert settings_of(glm)["qk_layernorm"] and not settings_of(plain_config(tiny_config("glm4_moe-plain")))["qk_layernorm"]


KIMI_K2 = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def test_a_kimi_k2_config() -> None:
    """A config of the size and form that the hub has: table and settings need no weights."""
    from areal_mega.models.ownership import Ownership
    from areal_mega.models.proof import prove_table

    settings = settings_of(KIMI_K2)
    assert (settings["beta_fast"], settings["rotary_scaling_factor"], settings["rope_type"]) == (1.0, 32.0, "yarn")
    assert settings["moe_layer_freq"] == [0] + [1] * 60
    table = family_for(KIMI_K2).table(KIMI_K2)
    assert table.num_experts == 384
    prove_table(table, Ownership(table, layout_of("megatron:t8d8e32")))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tiny_config("deepseek_v3", vocab_size=301, num_nextn_predict_layers=1))
    hf, file = load_hf_config(str(folder)), folder / "model.safetensors"
    whole = load_file(file)
    extra = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in whole.items() if ".layers.1." in n}
    extra |= {f"model.layers.2.{n}.weight": torch.ones(2) for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")}
    save_file(whole | extra, file, {"format": "pt"})
    family, ranks = family_for(hf), layout_of("megatron:d1")
    with HFSource(folder) as source:
        shards = load_all(family, hf, source, ranks)
    assert {name for name, _ in gather_all(shards, family, hf, ranks)} == whole.keys()


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096 cannot be honoured"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 cannot be honoured"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False cannot be honoured"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "leave no layer with experts; use model_type qwen2"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False cannot be honoured"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' cannot be honoured"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False cannot be honoured"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 cannot be honoured"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace 2 leaves none of 2 layers with experts"),
        ("deepseek_v3", {"n_group": 3}, "8 experts in n_group 3 groups"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "a group needs the same number of experts, at least 2"),
        ("deepseek_v3", {"topk_group": 1}, "hold fewer than num_experts_per_tok experts"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 cannot be honoured"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not trained"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope type 'linear' .* in latent attention"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=false cannot be honoured"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim and no mscale"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True cannot be honoured"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' cannot be honoured"),
        ("glm4_moe", {"moe_layer_freq": 2}, "moe_layer_freq=2 cannot be honoured"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(name: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        settings_of(plain_config(tiny_config(name)) | fields)
    assert "\n" not in str(caught.value)


def test_a_missing_query_rank_is_not_guessed() -> None:
    hf = plain_config(tiny_config("deepseek_v3"))
    del hf["q_lora_rank"]
    with pytest.raises(UserError, match="lacks q_lora_rank"):
        settings_of(hf)


def test_heads_do_not_split_over_more_ranks_than_there_are() -> None:
    hf = plain_config(tiny_config("deepseek_v3"))
    with pytest.raises(UserError, match="4 attention heads do not split over 8 ranks"):
        empty_shards(family_for(hf).table(hf), layout_of("megatron:t8"), 0, naming=LOCAL)
