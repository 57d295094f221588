"""What stands around Megatron-Core's router: group scores, the correction bias in fp32, and how many tokens each expert got."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from areal_mega.core.metrics import Metrics, maximum, mean, minimum


def routers(chunks: Sequence[nn.Module]) -> Iterator[TopKRouter]:
    """The routers of this rank's layers, in order."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                yield module


def prepare_routers(chunks: Sequence[nn.Module], group_score_experts: int | None, *, spare_padding: bool = False) -> None:
    """Finish the routers of a model that was just built (and perhaps cast).

    Args:
        group_score_experts: under group-limited routing, experts whose scores add up to their group's.
        spare_padding: send padding to no expert. The all-to-all dispatcher counts on every token having its experts.
    """
    for router in routers(chunks):
        router._apply_aux_loss = MethodType(_balancing_loss, router)
        if router.expert_bias is not None:
            router._maintain_float32_expert_bias()
            # The bias moves by ``ExpertLoad`` alone: Megatron-Core counts padding, counts in bf16, and moves it in steps that are skipped.
            router.enable_expert_bias = False
            router.frozen_expert_bias = True
        if group_score_experts is not None:
            router.router_replay = GroupScores(group_score_experts)
        if spare_padding:
            router.register_forward_hook(_without_padding)


def _without_padding(router: TopKRouter, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Where micro-batches are padded to one length, padding is much, all alike, and would all go to the same few experts."""
    probs, routing_map = output
    padding = args[1]
    return probs, routing_map & ~padding.reshape(-1, 1)


def _balancing_loss(router: TopKRouter, probs: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False) -> Tensor:
    """``TopKRouter._apply_aux_loss`` for micro-batches with padding.

    Megatron-Core divides by the tokens of the micro-batch, and one that only fills the pipeline has none: nan. It also weighs each
    rank's part by the rank's own tokens, although padding is not spread evenly over them.
    """
    coefficient = router.get_aux_loss_coeff("aux_loss")
    if coefficient == 0:
        return probs
    group = router.tp_cp_group
    tokens_e, _, tokens = get_tokens_per_expert_and_token_count(
        routing_map=routing_map, reduce_group=group, topk=router.topk, with_padding_mask=with_padding_mask
    )
    loss = switch_load_balancing_loss_func(
        probs=scores,
        tokens_per_expert=tokens_e,
        total_num_tokens=torch.as_tensor(tokens).clamp_min(1),
        topk=router.topk,
        num_experts=router.config.num_moe_experts,
        moe_aux_loss_coeff=coefficient,
    )
    return router.attach_and_log_load_balancing_loss(
        probs, coefficient, loss, "load_balancing_loss", group, valid_token_count=tokens / group.size()
    )


class GroupScores:
    """Group-limited choice of experts (arXiv:2405.04434, section 2.2.2; arXiv:2412.19437, section 2.1.2).

    Megatron-Core scores a group by as many experts as a token takes from each group on average; the models by a fixed number, one in
    DeepSeek-V2 and two in V3. Stands where the router asks for a recorded choice.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.layer_number: int | None = None

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups: int, group_topk: int, _: Any) -> tuple[Tensor, Tensor]:
        """[T, experts] -> scores and indices of the chosen experts, [T, topk] both."""
        grouped = scores.unflatten(1, (num_groups, -1))
        group_scores = grouped.topk(self.experts, dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, group_scores.topk(group_topk, dim=-1).indices, True)
        return grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1).topk(topk, dim=-1)


class ExpertLoad:
    """Counts the tokens that each expert of this rank's layers gets in an update, padding apart.

    Args:
        chunks: the policy; none of its layers here need be sparse.
        has_capacity: tokens beyond an expert's capacity are dropped.
        bias_update_rate: how far a correction bias moves after an update, towards balance (arXiv:2408.15664); 0 leaves it.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], experts: int, bias_update_rate: float, device: torch.device, *, has_capacity: bool = False
    ) -> None:
        self._routers = list(routers(chunks))
        self._has_capacity = has_capacity
        self._rate = bias_update_rate
        self._counts_le = torch.zeros(len(self._routers), experts, dtype=torch.int64, device=device)
        self._chosen_l = torch.zeros(len(self._routers), dtype=torch.int64, device=device)
        """Choices made, of which those beyond an expert's capacity do not reach it."""
        for number, router in enumerate(self._routers):
            router.register_forward_hook(self._counter(number))

    def _counter(self, number: int) -> Any:
        def count(router: TopKRouter, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            # Without gradient: log-probabilities, or the first of two passes under recomputation.
            if not (router.training and torch.is_grad_enabled()):
                return
            routing_map, padding = output[1], args[1] if len(args) > 1 else None
            chosen = router.topk * routing_map.shape[0]
            if padding is not None:
                routing_map = routing_map & ~padding.reshape(-1, 1)
                chosen = router.topk * (~padding).sum()
            self._counts_le[number] += routing_map.sum(dim=0)
            self._chosen_l[number] += chosen

        return count

    def start(self) -> None:
        """Forget the last update's counts."""
        self._counts_le.zero_()
        self._chosen_l.zero_()

    def finish(self) -> None:
        """Add up the counts of all ranks that hold the same layers. Collective over them."""
        if self._routers:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(self._counts_le, group=group)
            dist.all_reduce(self._chosen_l, group=group)

    def move_bias(self) -> None:
        """One step of balancing without a loss: experts with fewer tokens than the mean become more likely to be chosen."""
        if self._rate:
            for router, load_e in zip(self._routers, self._counts_le.double(), strict=True):
                router.expert_bias += self._rate * torch.sign(load_e.mean() - load_e)

    def metrics(self) -> Metrics:
        """Load of the busiest and of the idlest expert, over the mean of their layer. Collective over the pipeline.

        ``router/load_max`` averages the busiest over layers, ``router/load_worst`` is the largest of them, ``router/load_min`` the
        smallest of the idlest; ``router/idle`` is the share of experts without a token. ``experts/dropped_fraction``, where experts have
        a capacity, is the share of all choices that it cut off.
        """
        counts_le = self._counts_le.double()
        relative_le = counts_le / counts_le.mean(dim=1, keepdim=True).clamp_min(1e-9)
        layers = counts_le.new_tensor(float(len(relative_le)))
        if self._routers:
            high_l, low_l = relative_le.amax(dim=1), relative_le.amin(dim=1)
            extremes = torch.stack([high_l.max(), -low_l.min()])
            chosen = self._chosen_l.sum().double()
            sums = torch.stack([high_l.sum(), (counts_le == 0).double().mean(dim=1).sum(), layers, chosen - counts_le.sum(), chosen])
        else:
            extremes, sums = counts_le.new_full((2,), -torch.inf), counts_le.new_zeros(5)
        stages = parallel_state.get_pipeline_model_parallel_group()
        dist.all_reduce(sums, group=stages)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=stages)
        (busiest, idle, count, dropped, chosen), (worst, idlest) = sums.tolist(), extremes.tolist()
        found = {
            "router/load_max": mean(busiest, count),
            "router/load_worst": maximum(worst),
            "router/load_min": minimum(-idlest),
            "router/idle": mean(idle, count),
        }
        return found | {"experts/dropped_fraction": mean(dropped, chosen)} if self._has_capacity else found
