"""Which modules a model is built of: PyTorch's behind Megatron-Core's backend protocol, or Transformer Engine's."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset

from areal_mega.megatron.experts import LocalExperts
from areal_mega.megatron.latent import latent_attention_spec, norm_latents_alone
from areal_mega.megatron.layers import PackedAttention, build_norm


class PyTorchSpecProvider(LocalSpecProvider):
    """Megatron-Core's parallel linear layers with our norms, packed attention and expert loop."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return build_norm

    def core_attention(self) -> type:
        return PackedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        return partial(LocalExperts, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))


def block_spec(config: TransformerConfig, transformer_engine: bool, vp_stage: int | None) -> Any:
    """Spec of the layers that this pipeline stage (and chunk) builds."""
    if transformer_engine:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        return norm_latents_alone(spec) if config.multi_latent_attention else spec
    backend = PyTorchSpecProvider()
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [_layer_spec(config, backend, is_moe_layer(config, number)) for number in range(offset, offset + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=build_norm)


def is_moe_layer(config: TransformerConfig, layer: int) -> bool:
    """Whether global layer ``layer`` (from 0) has experts: ``moe_layer_freq`` is a period or one 0/1 per layer."""
    if config.num_moe_experts is None:
        return False
    frequency = config.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def _layer_spec(config: TransformerConfig, backend: PyTorchSpecProvider, moe: bool) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=build_norm,
            self_attention=latent_attention_spec(backend, build_norm)
            if config.multi_latent_attention
            else _attention_spec(config, backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=build_norm,
            mlp=get_mlp_module_spec_for_backend(backend, num_experts=config.num_moe_experts if moe else None),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(config: TransformerConfig, backend: PyTorchSpecProvider) -> ModuleSpec:
    qk_norm = build_norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
