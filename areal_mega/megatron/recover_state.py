"""An engine's weights and optimizer state by global name, as recover checkpoints store them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_mega.megatron.adam_state import ParamState, param_states, set_steps, steps_taken
from areal_mega.models.table import KINDS

if TYPE_CHECKING:
    from areal_mega.megatron.engine import MegatronEngine


class EngineStates:
    """The policy of one engine: parameters with their optimizer state, and persistent buffers, which have weights alone."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._named = engine.named_shards()
        by_param = {id(state.param): state for state in param_states(engine.optimizer.megatron)}
        self._states: dict[str, ParamState] = {name: by_param[id(tensor)] for name, tensor in self._named.items() if id(tensor) in by_param}
        trained = {name for name, tensor in self._named.items() if tensor.requires_grad}
        assert trained == self._states.keys(), f"without optimizer state: {sorted(trained ^ self._states.keys())[:3]}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._named.items()}

    def holds_with(self, name: str, rank: int) -> bool:
        state = self._states.get(name)
        if state is None or state.group is None:
            return rank == dist.get_rank()
        return rank in dist.get_process_group_ranks(state.group)

    def whole(self, name: str, kind: str, dst: int) -> Tensor | None:
        state = self._states.get(name)
        if state is not None:
            return state.whole(kind, dst)
        value = self._named[name].detach().float()
        return value if kind == "weights" else torch.zeros_like(value)

    @torch.no_grad()
    def fill(self, name: str, kind: str, whole: Tensor) -> None:
        if kind == "weights":
            self._named[name].copy_(whole)
        if name in self._states:
            self._states[name].fill(kind, whole)

    # --- what is not by parameter

    def counters(self) -> dict[str, Any]:
        """Plain values that are equal on all ranks. There is no random state: nothing in a train step draws (no model has dropout), and
        every sample's seed is a hash."""
        return {"optimizer_steps": steps_taken(self._engine.optimizer.megatron), "updates": self._engine.updates}

    def restore_counters(self, values: dict[str, Any]) -> None:
        """Call after the moments are filled. Also where no update was made: an optimizer that has moments wants its count beside them."""
        set_steps(self._engine.optimizer.megatron, values["optimizer_steps"])
        self._engine.updates = values["updates"]

    def digest(self) -> str:
        """Of this rank's weights and moments, to tell whether two runs are in the same state."""
        from areal_mega.sync.digest import combine, tensor_digest

        digests = {f"{kind}/{name}": tensor_digest(state.local(kind)) for name, state in sorted(self._states.items()) for kind in KINDS}
        return combine(digests | {f"counters {json.dumps(self.counters(), sort_keys=True)}": ""})
