"""One rank of the training engine: log-probabilities, gradients and updates of a Megatron-Core model.

Every public method is collective: all ranks of the strategy call it, in the same order. Ranks of one data-parallel index get the same
batches. Per-token results are aligned to the token they describe; the shift from predicting to predicted position happens here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal_mega.algorithms.measure import Measured, to_metrics
from areal_mega.config.schema import ModelSection, RouterSection, TrainSection
from areal_mega.core.errors import UserError
from areal_mega.core.metrics import Metrics
from areal_mega.megatron.gpu import check_gpu_settings, token_multiple
from areal_mega.megatron.microbatch import MicroBatch, TokenLogProbs, equal_lengths
from areal_mega.megatron.model import (
    DTYPES,
    build_chunks,
    check_fit,
    initialize_groups,
    named_tensors,
    release_groups,
    transformer_config,
    wrap_for_training,
)
from areal_mega.megatron.optimizer import Optimizer, learning_rate
from areal_mega.megatron.packing import PackedBatch, pack
from areal_mega.megatron.platform import Platform
from areal_mega.megatron.routing import ExpertLoad
from areal_mega.models.gather import HFGatherer
from areal_mega.models.hf_io import HFSource, HFWriter
from areal_mega.models.loading import load_hf_weights
from areal_mega.models.ownership import Ownership, Share
from areal_mega.models.registry import family_for, load_hf_config
from areal_mega.models.table import LOCAL, TRANSFORMER_ENGINE
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse
from areal_mega.sync.shares import shares

ModelName = Literal["policy", "reference"]
LossFn = Callable[[Tensor, Mapping[str, Tensor], Tensor, int], tuple[Tensor, Measured]]
"""(logprobs_t with graph, fields, sequence_t, num_sequences) -> (loss, measurements). The loss is over the global denominator already."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer update did. ``metrics`` cover this data-parallel rank's tokens, and are empty but on reporters."""

    grad_norm: float
    """Of the whole model and batch, before clipping."""
    lr: float
    metrics: Metrics
    skipped: bool
    """The gradient norm was not finite; no parameter changed."""


class MegatronEngine:
    """A policy in training and, optionally, a frozen reference.

    Args:
        total_steps: train steps of the run, for the learning-rate schedule.
        rank: this rank of ``train.strategy``; torch.distributed's default group has exactly its ranks.
        model_path: HuggingFace folder (or hub name) whose config is the architecture and whose weights are loaded.

    Raises:
        UserError: the strategy does not fit the model, or the folder is not a complete model.
    """

    def __init__(
        self,
        *,
        model: ModelSection,
        train: TrainSection,
        router: RouterSection,
        total_steps: int,
        seed: int,
        rank: int,
        model_path: str,
        platform: Platform,
    ) -> None:
        self.rank, self.platform, self.model_path, self.train_section = rank, platform, model_path, train
        self._total_steps, self.updates = total_steps, 0
        self._router_section, self._dtype = router, DTYPES[model.dtype]
        self.layout = RankLayout(parse(train.strategy))
        self.strategy = self.layout.strategy
        assert dist.get_world_size() == self.layout.world_size, f"{dist.get_world_size()} ranks run {train.strategy}"
        self.coords = self.layout.coords(rank)
        self.hf_config = load_hf_config(model_path)
        self.family = family_for(self.hf_config)
        check_fit(self.family, self.hf_config, self.strategy)
        check_gpu_settings(train, self._dtype, platform)
        self.naming = TRANSFORMER_ENGINE if platform.transformer_engine else LOCAL
        with ExitStack() as undo:
            undo.enter_context(platform.activate())
            undo.callback(release_groups, initialize_groups(self.strategy, train.nccl_config))
            model_parallel_cuda_manual_seed(seed)
            self._config, chunks = self._build()
            # Set when the modules have their own copies of the config: a copy would copy this engine.
            self._config.moe_grad_scale_func = self._router_loss_scale
            self._router_scale = 1.0
            self._chunks = wrap_for_training(self._config, chunks, train.optimizer)
            experts = self._config.num_moe_experts
            self._expert_load: ExpertLoad | None = None
            if experts:
                rate, has_capacity = router.expert_bias_update_rate, router.capacity_factor is not None
                self._expert_load = ExpertLoad(chunks, experts, rate, platform.device, has_capacity=has_capacity)
            self._reference: list[nn.Module] | None = None
            self.optimizer = Optimizer(train.optimizer, self._chunks, self._dtype)
            self.load_hf(model_path)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Forget the process groups and put the platform's redirections back."""
        self._undo.close()

    # --- who this rank is

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.strategy.pp - 1

    @property
    def is_reporter(self) -> bool:
        """One rank of each data-parallel index: the one whose metrics count."""
        return self.is_last_stage and self.coords.tp == 0 and self.coords.cp == 0

    def pack(self, samples: Sequence[Mapping[str, np.ndarray]], indices: Sequence[int]) -> PackedBatch:
        """Pack with the padding that this strategy needs."""
        multiple = self.strategy.sequence_multiple
        return pack(samples, indices, self.strategy.tp * multiple * token_multiple(self.train_section.fp8), multiple)

    # --- weights

    def named_shards(self, model: ModelName = "policy") -> dict[str, Tensor]:
        """This rank's live parameters and persistent buffers by global name."""
        experts = self._config.num_moe_experts or 0
        return dict(named_tensors(self._model(model), experts // self.strategy.ep, self.coords.ep))

    def load_hf(self, path: str) -> None:
        """Load the policy's weights from a HuggingFace folder or hub name; the optimizer's master copy follows."""
        self._load("policy", path)
        self.optimizer.reload_parameters()

    def set_reference(self, path: str) -> None:
        """Build (once) and load the frozen reference model.

        Raises:
            UserError: its architecture is not the policy's.
        """
        hf_config = load_hf_config(path)
        if family_for(hf_config) is not self.family or self._architecture(hf_config) != self._architecture(self.hf_config):
            raise UserError(f"model.reference_path {path} has another architecture than model.path {self.model_path}; give one of the same")
        if self._reference is None:
            _, self._reference = self._build()
            for chunk in self._reference:
                chunk.requires_grad_(False).eval()
        self._load("reference", path)

    def gather_hf(self, share: Share | None = None) -> HFGatherer:
        """A gatherer over the live weights, of all to rank 0 or of one share; its ``stream`` is collective."""
        named = self.named_shards()
        return HFGatherer(named, self.family, self.hf_config, self.layout, self.rank, share=share, naming=self.naming)

    def sync_shares(self, most: int) -> tuple[Share, ...]:
        """Who sends which weights, where several may; at most ``most`` ranks of a pipeline stage."""
        return shares(Ownership(self.family.table(self.hf_config), self.layout), most)

    def export_hf(self, out: str | Path) -> None:
        """Write the policy as a HuggingFace folder (by rank 0, in the training dtype)."""
        gatherer = self.gather_hf()
        if self.rank == 0:
            with HFWriter(out, gatherer.plan, source=self.model_path) as writer:
                for item in gatherer.stream():
                    assert item is not None
                    writer.write(*item)
        else:
            for _ in gatherer.stream():
                pass
        dist.barrier()

    def _architecture(self, hf_config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        family = self.family
        return family.transformer_config(hf_config), family.config_attributes(hf_config), family.gpt_kwargs(hf_config)

    def _build(self) -> tuple[TransformerConfig, list[nn.Module]]:
        section = self.train_section
        config = transformer_config(self.family, self.hf_config, self.strategy, section, self._router_section, self._dtype, self.platform)
        return config, build_chunks(config, self.family.gpt_kwargs(self.hf_config), self.strategy, self.platform)

    def _load(self, model: ModelName, path: str) -> None:
        with HFSource(path) as source:
            load_hf_weights(self.named_shards(model), source, self.family, self.hf_config, self.layout, self.rank, naming=self.naming)

    def _model(self, model: ModelName) -> list[nn.Module]:
        if model == "policy":
            return self._chunks
        assert self._reference is not None, "set_reference comes first"
        return self._reference

    # --- log-probabilities

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float, model: ModelName = "policy") -> list[Tensor] | None:
        """Log-probability of tokens given those before them, without gradient.

        Of the tokens under the field ``loss_mask`` where a batch has it, else of all; 0 elsewhere and at each sequence's first token.

        Returns:
            One [T] fp32 tensor per batch, on the host; None off the last pipeline stage.
        """

        def collect(work: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            values_t, _ = work.align(output)
            return output.sum(), torch.zeros((), dtype=torch.int, device=output.device), values_t

        chunks = self._model(model)
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            results = self._run(chunks, batches, self._projection(temperature), collect, forward_only=True)
        if not self.is_last_stage:
            return None
        # Micro-batches may have been lengthened on their way.
        return [value[: len(batch.input_ids_t)].cpu() for value, batch in zip(results, batches, strict=False)]

    # --- training

    def train_minibatch(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        temperature: float,
        lr_override: float | None = None,
        step: int | None = None,
    ) -> UpdateResult:
        """One optimizer update over this data-parallel rank's micro-batches (possibly none, where another rank has some).

        Args:
            loss_fn: called once per micro-batch on the last pipeline stage, with token-aligned tensors; ``fields`` are the batch's own
                plus ``entropy``; log-probabilities and entropies are as in ``logprobs``. Losses and gradients are summed over
                micro-batches and ranks: the denominator is in the loss already.
            temperature: of the policy that generated.
            lr_override: learning rate of this update alone; the schedule does not count it.
            step: train step that the schedule looks at; None: counted here, ``train.minibatches`` updates to a step.
        """
        measured = self.compute_gradients(batches, loss_fn, temperature)
        if lr_override is None:
            counted = self.updates // self.train_section.minibatches
            lr = learning_rate(counted if step is None else step, self.train_section.optimizer, self._total_steps)
            self.updates += 1
        else:
            lr = lr_override
        outcome = self.optimizer.step(lr)
        metrics = to_metrics(measured)
        if self._expert_load is not None:
            metrics |= self._expert_load.metrics()
            if not outcome.skipped:
                self._expert_load.move_bias()
        metrics = metrics if self.is_reporter else {}
        return UpdateResult(grad_norm=outcome.grad_norm, lr=lr, metrics=metrics, skipped=outcome.skipped)

    def compute_gradients(self, batches: Sequence[PackedBatch], loss_fn: LossFn, temperature: float) -> list[Measured]:
        """Forward and backward over all micro-batches, reduced over ranks, into the gradient buffers. See ``train_minibatch``."""

        def consume(work: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Measured]:
            no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
            if not work.batch.lengths:
                return output.sum() * 0.0, no_tokens, {}
            logprobs_t, entropy_t = work.align(output)
            fields = {**work.batch.fields, "entropy": entropy_t.detach()}
            loss, measured = loss_fn(logprobs_t, fields, work.batch.sequence_t, work.batch.num_sequences)
            return loss, no_tokens, measured

        for chunk in self._chunks:
            chunk.train()
            cast(Any, chunk).zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        self._set_router_scale(batches)
        if self._expert_load is not None:
            self._expert_load.start()
        measured = self._run(self._chunks, batches, self._projection(temperature), consume, forward_only=False)
        if self._expert_load is not None:
            self._expert_load.finish()
        return measured

    def named_gradients(self) -> dict[str, Tensor]:
        """This rank's gradient buffers by global name, fp32; the model's buffers have none.

        Whole only where ``optimizer.distributed`` is off or DP is 1.
        """
        return {name: p.main_grad for name, p in self.named_shards().items() if hasattr(p, "main_grad")}

    # --- the pipeline

    def _run(
        self,
        chunks: list[nn.Module],
        batches: Sequence[PackedBatch],
        project: Callable[..., Tensor],
        consume: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """All micro-batches through the pipeline; what ``consume`` returns third, in order, on the last stage."""
        count = self._common_count(len(batches))
        filler = self.pack([], [])
        padded = [*batches, *([filler] * (count - len(batches)))]
        if self._router_section.dispatcher == "allgather":
            padded = equal_lengths(padded, self.strategy.sequence_multiple, self.strategy.pp > 1, self.platform.device)
        plan = not self.platform.transformer_engine
        work = [MicroBatch(batch.to(self.platform.device), self.strategy.cp, self.coords.cp, plan) for batch in padded]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, project=project, consume=consume),
            data_iterator=[iter(work) for _ in chunks] if len(chunks) > 1 else iter(work),
            model=chunks,
            num_microbatches=count,
            seq_length=len(padded[0].input_ids_t),  # read only where all have this length
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def _forward_step(
        self, iterator: Iterator[MicroBatch], chunk: nn.Module, *, project: Callable[..., Tensor], consume: Callable[..., Any]
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        work = next(iterator)
        output = chunk(
            input_ids=work.input_ids,
            position_ids=work.position_ids,
            attention_mask=None,
            packed_seq_params=work.layout,
            padding_mask=self._padding_mask(work, chunk),
            output_processor=project,
            output_processor_context=work,
        )
        return output, partial(consume, work)

    def _common_count(self, count: int) -> int:
        """The number of micro-batches that every rank runs: the largest, and whole rounds of an interleaved pipeline."""
        common = torch.tensor([count], device=self.platform.device)
        dist.all_reduce(common, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        most = int(common.item())
        assert most > 0, "no data-parallel rank has a micro-batch"
        rounds = self.strategy.microbatch_multiple
        return -(-most // rounds) * rounds

    def _projection(self, temperature: float) -> TokenLogProbs:
        return TokenLogProbs(
            temperature=temperature,
            vocab_size=self.hf_config["vocab_size"],
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            sequence_parallel=self._config.sequence_parallel,
        )

    # --- the router's own losses

    @property
    def _has_router_loss(self) -> bool:
        return bool(self._config.num_moe_experts) and bool(self._router_section.aux_loss_coef or self._router_section.z_loss_coef)

    def _set_router_scale(self, batches: Sequence[PackedBatch]) -> None:
        """Megatron-Core multiplies these losses by tokens; dividing by the update's tokens makes them means over its micro-batches."""
        if self._has_router_loss:
            tokens = torch.tensor([float(sum(b.num_tokens for b in batches))], device=self.platform.device)
            dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
            self._router_scale = 1.0 / float(tokens.item())

    def _router_loss_scale(self) -> Tensor:
        return torch.full((1,), self._router_scale, device=self.platform.device)

    def _padding_mask(self, work: MicroBatch, chunk: nn.Module) -> Tensor | None:
        """[1, tokens] bool, True on padding, for the router's losses and counts. Later stages get their sequence-parallel part."""
        if self._expert_load is None:
            return None
        mask = work.padding_mask
        pre_process = self.coords.pp == 0 and getattr(chunk, "vp_stage", None) in (None, 0)
        if not pre_process and self._config.sequence_parallel:
            mask = mask.chunk(self.strategy.tp, dim=1)[self.coords.tp]
        return mask
