"""A packed batch on its way through the model, and what the last stage makes of hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from areal_mega.megatron.layers import PackedLayout, packed_layout
from areal_mega.megatron.logprobs import vocab_parallel_logprobs
from areal_mega.megatron.packing import PackedBatch, lengthen, unzigzag_index, zigzag_index


def equal_lengths(batches: Sequence[PackedBatch], sequence_multiple: int, one_length: bool, device: torch.device) -> list[PackedBatch]:
    """This rank's micro-batches, as many as every rank has, lengthened to those of the other data-parallel ranks. Collective over them.

    Args:
        one_length: the same for all micro-batches, as a pipeline without ``variable_seq_lengths`` needs; else only across ranks.
    """
    lengths = torch.tensor([len(batch.input_ids_t) for batch in batches], device=device)
    torch.distributed.all_reduce(lengths, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    wanted = lengths.amax().expand(len(batches)) if one_length else lengths
    return [lengthen(batch, total, sequence_multiple) for batch, total in zip(batches, wanted.tolist(), strict=True)]


@dataclass(frozen=True)
class MicroBatch:
    """A packed batch as this context-parallel rank sees it."""

    batch: PackedBatch
    cp_size: int
    cp_rank: int
    plan_attention: bool = True
    """False where the attention kernel takes ``cu_seqlens`` itself."""

    @cached_property
    def layout(self) -> PackedLayout:
        return packed_layout(self.batch.cu_seqlens, self.batch.max_seqlen, self.cp_size, plan=self.plan_attention)

    @cached_property
    def input_ids(self) -> Tensor:
        """[1, T/cp]."""
        return self._mine(self.batch.input_ids_t)[None]

    @cached_property
    def position_ids(self) -> Tensor:
        """[1, T/cp]."""
        return self._mine(self.batch.position_ids_t)[None]

    @cached_property
    def padding_mask(self) -> Tensor:
        """[1, T/cp] bool, True on padding."""
        return self._mine(self.batch.padding_t)[None]

    @cached_property
    def targets_t(self) -> Tensor:
        """[T/cp]: the token after each (of no meaning at a sequence's last token)."""
        return self._mine(self.batch.input_ids_t.roll(-1))

    @cached_property
    def scored(self) -> Tensor | None:
        """Predicting positions, of this rank's [T/cp], whose next token is trained; None where the batch has no ``loss_mask``.

        The output layer is computed for these alone: prompts are often the larger part, and it is the largest matrix.
        """
        mask_t = self.batch.fields.get("loss_mask")
        return None if mask_t is None else self._mine(mask_t.bool().roll(-1)).nonzero()[:, 0]

    def _mine(self, values_t: Tensor) -> Tensor:
        if self.cp_size == 1:
            return values_t
        return values_t[zigzag_index(self.batch.cu_seqlens, self.cp_size, self.cp_rank)]

    def align(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The last stage's output [2, T/cp] as log-probabilities and entropies [T], each at the token that was predicted;
        0 where nothing was.

        Under context parallelism every rank gets the whole: losses over sequences need it. The gradient of a rank's own tokens flows
        back to it alone, so that the ranks' equal losses add up to one.
        """
        if self.cp_size > 1:
            gathered = gather_from_sequence_parallel_region(
                output.T.contiguous(), tensor_parallel_output_grad=False, group=parallel_state.get_context_parallel_group()
            )
            output = gathered.index_select(0, unzigzag_index(self.batch.cu_seqlens, self.cp_size)).T
        shifted = torch.nn.functional.pad(output[:, :-1], (1, 0))
        logprobs_t, entropy_t = shifted.masked_fill((self.batch.position_ids_t == 0) | self.batch.padding_t, 0.0)
        return logprobs_t, entropy_t


@dataclass(frozen=True)
class TokenLogProbs:
    """Megatron-Core's output hook: hidden states in, [2, T/cp] log-probabilities and entropies out; never all logits."""

    temperature: float
    vocab_size: int
    tp_group: torch.distributed.ProcessGroup
    sequence_parallel: bool

    def __call__(
        self, *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: MicroBatch, **_: Any
    ) -> Tensor:
        """``hidden_states`` is [T/cp (/tp under sequence parallelism), 1, hidden]."""
        weight = output_weight
        if weight is None:
            weight = output_layer.get_parameter("weight")
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=self.tp_group)
        hidden_th, targets_t, scored = hidden_states[:, 0], context.targets_t, context.scored
        if scored is not None:
            hidden_th, targets_t = hidden_th.index_select(0, scored), targets_t[scored]
        values_2t = torch.stack(
            vocab_parallel_logprobs(
                hidden_th,
                weight,
                targets_t,
                temperature=self.temperature,
                vocab_start=self.tp_group.rank() * weight.shape[0],
                vocab_size=self.vocab_size,
                group=self.tp_group,
            )
        )
        if scored is None:
            return values_2t
        return values_2t.new_zeros(2, hidden_states.shape[0]).index_copy(1, scored, values_2t)
