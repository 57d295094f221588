"""What the table says of layers and names, against Megatron-Core's own arithmetic and the names that Transformer Engine builds."""

from __future__ import annotations

import re

import pytest
from simulated_ranks import empty_shards, layout_of, plain_config
from tiny_models import FAMILIES, SPARSE, tiny_config

from areal_mega.models.ownership import layer_stages
from areal_mega.models.registry import family_for
from areal_mega.models.table import LOCAL, TRANSFORMER_ENGINE
from areal_mega.parallel.strategy import ParallelStrategy


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(8, 1, 1), (8, 2, 1), (12, 4, 1), (8, 2, 2), (24, 4, 3), (12, 2, 6)])
def test_stages_are_those_of_megatron(layers: int, pp: int, vpp: int) -> None:
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
    )
    theirs = {}
    for stage in range(pp):
        for chunk in range(vpp):
            which = chunk if vpp > 1 else None
            offset = get_transformer_layer_offset(config, vp_stage=which, pp_rank=stage)
            for layer in range(get_num_layers_to_build(config, vp_stage=which, pp_rank=stage)):
                theirs[offset + layer] = stage
    strategy = ParallelStrategy("megatron", pp=pp, vpp=vpp)
    assert layer_stages(layers, strategy) == tuple(theirs[layer] for layer in range(layers))


@pytest.mark.parametrize(
    ("pp", "vpp", "counts"), [(2, 1, (3, 5)), (3, 1, (1, 4, 2)), (2, 2, (1, 3, 2, 4)), (4, 2, (1, 1, 2, 3, 2, 1, 1, 1))]
)
def test_uneven_stages_are_those_of_megatron(pp: int, vpp: int, counts: tuple[int, ...]) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from areal_mega.megatron.model import _stage_layout

    strategy = ParallelStrategy("megatron", pp=pp, vpp=vpp, stage_layers=counts)
    theirs = PipelineParallelLayerLayout(_stage_layout(strategy), pp)
    theirs.validate_layer_layout(num_layers=sum(counts), mtp_num_layers=0)
    stages = [0] * sum(counts)
    offset = 0
    for chunk in range(vpp):
        for stage in range(pp):
            held = theirs.layout[stage][chunk].count(LayerType.decoder)
            stages[offset : offset + held] = [stage] * held
            offset += held
    assert layer_stages(sum(counts), strategy) == tuple(stages)


def fused_and_grouped(local: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The names that Transformer Engine's modules give to a model with these names, written here independently of the table."""
    out = {}
    for name, shape in local.items():
        layer = name.rpartition(".layers.")[2].partition(".")[0]
        prefix = f"decoder.layers.{layer}."
        latent, sparse = f"{prefix}self_attention.linear_kv_up_proj.weight" in local, f"{prefix}mlp.router.weight" in local
        fused = (
            {
                "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
                "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
            }
            if latent
            else {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
        )
        if not sparse:
            fused["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
        role = name.removeprefix(prefix)
        if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)", role):
            role = f"mlp.experts.{expert[2]}{expert[1]}"
        out[prefix + fused.get(role, role) if role != name else name] = shape
    return out


@pytest.mark.parametrize("name", [*FAMILIES, *SPARSE])
def test_transformer_engine_names_and_shapes_of_every_family(name: str) -> None:
    hf = plain_config(tiny_config(name, num_hidden_layers=3))
    family = family_for(hf)
    table = family.table(hf)
    layout = layout_of("megatron:d2t2p2[2,1]e2" if table.num_experts else "megatron:t2p2[2,1]")
    differing = 0
    for rank in range(layout.world_size):
        local, engine = (
            {n: tuple(tensor.shape) for n, tensor in empty_shards(table, layout, rank, naming=naming).items()}
            for naming in (LOCAL, TRANSFORMER_ENGINE)
        )
        assert engine == fused_and_grouped(local)
        assert len(engine) == len(local), "no two parameters share a name"
        differing += len(engine.keys() - local.keys())
    assert differing


def test_transformer_engine_names_and_shapes() -> None:
    """A dense layer fuses both norms; a sparse one keeps the second, which feeds the router and all experts. Experts are grouped."""
    hf = plain_config(tiny_config("qwen3_moe", mlp_only_layers=[0]))
    named = empty_shards(family_for(hf).table(hf), layout_of("megatron:t2e2"), 1, naming=TRANSFORMER_ENGINE)
    attention = {
        "self_attention.linear_qkv.layer_norm_weight": (64,),
        "self_attention.linear_qkv.weight": (128, 64),
        "self_attention.q_layernorm.weight": (32,),
        "self_attention.k_layernorm.weight": (32,),
        "self_attention.linear_proj.weight": (64, 64),
    }
    dense = {"mlp.linear_fc1.layer_norm_weight": (64,), "mlp.linear_fc1.weight": (128, 64), "mlp.linear_fc2.weight": (64, 64)}
    sparse = {"pre_mlp_layernorm.weight": (64,), "mlp.router.weight": (8, 64)}
    for expert in range(4, 8):
        sparse |= {f"mlp.experts.linear_fc1.weight{expert}": (128, 64), f"mlp.experts.linear_fc2.weight{expert}": (64, 64)}
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {
        "embedding.word_embeddings.weight": (256, 64),
        **{f"decoder.layers.0.{name}": shape for name, shape in (attention | dense).items()},
        **{f"decoder.layers.1.{name}": shape for name, shape in (attention | sparse).items()},
        "decoder.final_layernorm.weight": (64,),
        "output_layer.weight": (256, 64),
    }
