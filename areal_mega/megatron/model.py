"""Build a model's pipeline chunks from a HuggingFace config, and name what they hold."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from areal_mega.config.schema import OptimizerSection, RouterSection, TrainSection
from areal_mega.core.errors import UserError
from areal_mega.megatron.gpu import fp8_settings
from areal_mega.megatron.platform import Platform
from areal_mega.megatron.routing import prepare_routers
from areal_mega.megatron.specs import block_spec
from areal_mega.models.family import Family
from areal_mega.models.ownership import Ownership
from areal_mega.models.table import padded_vocab_size
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import ParallelStrategy

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def initialize_groups(strategy: ParallelStrategy, nccl_config: str | None = None) -> list[dist.ProcessGroup]:
    """Create Megatron-Core's process groups, of which a process has one set at a time; returns them for ``release_groups``.

    Args:
        nccl_config: YAML of Megatron-Core's options per communicator.
    """
    before = set(c10d._world.pg_map)
    assert not parallel_state.is_initialized(), "this process has a Megatron engine already; close it before another is made"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=strategy.tp,
        pipeline_model_parallel_size=strategy.pp,
        virtual_pipeline_model_parallel_size=strategy.vpp if strategy.vpp > 1 else None,
        context_parallel_size=strategy.cp,
        expert_model_parallel_size=strategy.ep,
        expert_tensor_parallel_size=strategy.etp,
        create_gloo_process_groups=False,
        nccl_communicator_config_path=nccl_config,
    )
    return [group for group in c10d._world.pg_map if group not in before]


def release_groups(groups: list[dist.ProcessGroup]) -> None:
    """Forget the groups and end them: Megatron-Core only forgets, and each group then keeps its threads and sockets for ever."""
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)


def check_fit(family: Family, hf_config: dict[str, Any], strategy: ParallelStrategy) -> None:
    """Refuse, before any weight exists, a strategy that the model's layers, experts, heads or rows do not divide by.

    Raises:
        UserError: naming the tensor and what would divide it.
    """
    ownership = Ownership(family.table(hf_config), RankLayout(strategy))
    for param in ownership.params:
        param.pieces(ownership.parts(param), 0)


def transformer_config(
    family: Family,
    hf_config: dict[str, Any],
    strategy: ParallelStrategy,
    train: TrainSection,
    router: RouterSection,
    dtype: torch.dtype,
    platform: Platform,
) -> TransformerConfig:
    """Architecture from the family, everything else from the recipe and the platform."""
    architecture = family.transformer_config(hf_config)
    _check_router(router, architecture)
    fused = platform.transformer_engine
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": strategy.tp,
        "pipeline_model_parallel_size": strategy.pp,
        "virtual_pipeline_model_parallel_size": strategy.vpp if strategy.vpp > 1 else None,
        "context_parallel_size": strategy.cp,
        "expert_model_parallel_size": strategy.ep,
        "expert_tensor_parallel_size": strategy.etp,
        "sequence_parallel": strategy.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Megatron-Core's all-gather dispatcher wants the same number of tokens on every rank: the engine pads to it.
        "variable_seq_lengths": router.dispatcher != "allgather",
        "batch_p2p_sync": False,
        # With two stages, interleaved, both neighbours are the same rank: only one direction at a time keeps messages apart.
        "batch_p2p_comm": strategy.vpp == 1,
        "overlap_p2p_comm": strategy.vpp > 1,
        # Losses arrive divided by the global denominator: gradients are plain sums, and nothing may rescale them.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": _finalize,
        "perform_initialization": False,
        "use_cpu_initialization": platform.is_cpu,
        "gradient_accumulation_fusion": platform.fused_weight_gradients,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": fused or platform.is_cpu,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": fused and not architecture.get("multi_latent_attention", False),
        "persist_layer_norm": False,
        "moe_permute_fusion": fused,
        "moe_grouped_gemm": fused,
        "moe_token_dispatcher_type": router.dispatcher,
        "moe_router_dtype": "fp32" if router.fp32 else None,
        "moe_router_load_balancing_type": "aux_loss" if router.aux_loss_coef else "none",
        "moe_aux_loss_coeff": router.aux_loss_coef,
        "moe_z_loss_coeff": router.z_loss_coef or None,
        "moe_expert_capacity_factor": router.capacity_factor,
        "moe_token_drop_policy": router.drop_policy,
    }
    if strategy.stage_layers and strategy.pp > 1:
        settings["pipeline_model_parallel_layout"] = _stage_layout(strategy)
    settings |= _RECOMPUTE[train.recompute] | fp8_settings(train.fp8)
    kind = MLATransformerConfig if architecture.get("multi_latent_attention") else TransformerConfig
    config = kind(**architecture, **settings)
    for name, value in family.config_attributes(hf_config).items():
        setattr(config, name, value)
    return config


def _stage_layout(strategy: ParallelStrategy) -> list[list[str]]:
    """What each virtual stage holds, in the order of the layers, as Megatron-Core takes it."""
    stages = [["decoder"] * count for count in strategy.stage_layers]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _check_router(router: RouterSection, architecture: dict[str, Any]) -> None:
    if router.capacity_factor is None and router.drop_policy != "probs":
        raise UserError(f"router.drop_policy is {router.drop_policy}, but nothing is dropped: set router.capacity_factor, or leave it out")
    if router.capacity_factor is not None and router.dispatcher == "allgather":
        raise UserError(
            f"router.capacity_factor is {router.capacity_factor}, but router.dispatcher allgather pads micro-batches, and padding would "
            "count as load; set router.dispatcher to alltoall"
        )
    if "num_moe_experts" not in architecture:
        for name in ("aux_loss_coef", "z_loss_coef", "expert_bias_update_rate"):
            if getattr(router, name):
                raise UserError(f"router.{name} is {getattr(router, name)}, but the model has no experts; set it to 0")
        if router.capacity_factor is not None:
            raise UserError(f"router.capacity_factor is {router.capacity_factor}, but the model has no experts; leave it out")
        if router.dispatcher != "alltoall":
            raise UserError(f"router.dispatcher is {router.dispatcher}, but the model has no experts; leave it at alltoall")
    elif router.expert_bias_update_rate and not architecture.get("moe_router_enable_expert_bias"):
        raise UserError(
            f"router.expert_bias_update_rate is {router.expert_bias_update_rate}, but the model's router has no correction bias; "
            "set it to 0, or balance with router.aux_loss_coef"
        )


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _finalize(model: list[nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron-Core's reduction of gradients over DP, CP, sequence-parallel norms and tied embeddings, without its division by tokens."""
    finalize_model_grads(model, None, **kwargs)


def build_chunks(config: TransformerConfig, gpt_kwargs: dict[str, Any], strategy: ParallelStrategy, platform: Platform) -> list[nn.Module]:
    """This rank's model: one chunk, or one per virtual stage. bf16 models are wrapped for Megatron-Core's casts."""
    kwargs = dict(gpt_kwargs)
    kwargs["vocab_size"] = padded_vocab_size(kwargs["vocab_size"], strategy.tp)
    # It warns, on every rank, that GPTModel gets no new features; nothing here can be done about that.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    chunks: list[nn.Module] = []
    for vp_stage in range(strategy.vpp) if strategy.vpp > 1 else [None]:
        chunk: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, platform.transformer_engine, vp_stage),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            vp_stage=vp_stage,
            **kwargs,
        ).to(platform.device)
        if config.bf16:
            chunk = Float16Module(config, chunk)
        chunks.append(chunk)
    prepare_routers(chunks, getattr(config, "group_score_experts", None), spare_padding=config.moe_token_dispatcher_type == "allgather")
    return chunks


def wrap_for_training(config: TransformerConfig, chunks: list[nn.Module], optimizer: OptimizerSection) -> list[nn.Module]:
    """Megatron-Core's data parallelism around each chunk: gradients in fp32 buffers, summed over DP and CP."""
    wrapped: list[nn.Module] = []
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for number, chunk in enumerate(chunks):
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=optimizer.distributed,
            overlap_grad_reduce=optimizer.overlap,
            check_for_nan_in_grad=False,
        )
        layout = None
        if optimizer.distributed:
            parameters = [p for p in chunk.parameters() if p.requires_grad]
            layout = DistributedOptimizer.compute_full_param_layout(
                parameters, None, groups.dp_cp.size(), ddp, expert_data_parallel_world_size=groups.expt_dp.size()
            )
        wrapped.append(DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0, full_param_layout=layout))
    if optimizer.overlap:
        # Gradients are reduced in the last micro-batch's backward pass, not in each.
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def unwrap(chunk: nn.Module) -> GPTModel:
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)$")


def named_tensors(chunks: Sequence[nn.Module], local_experts: int, expert_rank: int) -> Iterator[tuple[str, Tensor]]:
    """Live parameters and persistent buffers with global layer and expert numbers, all chunks together."""
    for chunk in chunks:
        model = unwrap(chunk)
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        persistent = {name for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        found = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in persistent}
        for name, tensor in found.items():
            if match := _LAYER.match(name):
                rest = match[2]
                if expert := _EXPERT.match(rest):
                    rest = f"{expert[1]}{int(expert[2]) + expert_rank * local_experts}{expert[3]}"
                name = f"decoder.layers.{layers[int(match[1])]}.{rest}"
            yield name, tensor
