"""A train rank's calls for recover checkpoints: between the engine, which has the state, and the checkpoint room, which stores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from areal_mega.checkpoint.recover import RecoverSave, load_recovered
from areal_mega.megatron.engine import MegatronEngine
from areal_mega.megatron.recover_state import EngineStates


class Recovering:
    """See ``controller.recover``, which calls these."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._saving: RecoverSave | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._counters: dict[str, Any] = {}

    def recover_begin(self, place: str) -> dict[str, Any]:
        """Copy this rank's part of a checkpoint, and begin to write it. Collective."""
        engine = self._engine
        states = EngineStates(engine)
        self._saving = RecoverSave(
            states,
            Path(place),
            family=engine.family,
            hf_config=engine.hf_config,
            layout=engine.layout,
            rank=engine.rank,
            source=engine.model_path,
            device=engine.platform.device,
            buffers=self._buffers,
            naming=engine.naming,
        )
        return {"nbytes": self._saving.nbytes, "counters": states.counters()}

    async def recover_done(self) -> bool:
        """Whether this rank's part is stored. Answered at once, also during a train step."""
        assert self._saving is not None, "recover_begin comes first"
        return self._saving.done()

    def recover_commit(self, state: str) -> None:
        """Rank 0 completes the checkpoint; the others forget theirs."""
        assert self._saving is not None, "recover_begin comes first"
        if self._engine.rank == 0:
            self._saving.commit(state)
        self._saving = None

    def recover_load(self, place: str, counters: dict[str, Any]) -> str:
        """Go on from a checkpoint of any strategy; a digest of what this rank now has."""
        engine = self._engine
        states = EngineStates(engine)
        load_recovered(
            states,
            Path(place),
            family=engine.family,
            hf_config=engine.hf_config,
            layout=engine.layout,
            rank=engine.rank,
            naming=engine.naming,
        )
        states.restore_counters(counters)
        return states.digest()

    def recover_digest(self) -> str:
        """Of this rank's weights and optimizer state."""
        return EngineStates(self._engine).digest()
