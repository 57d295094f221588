"""A train rank's calls for recover checkpoints: between the engine, which has the state, and the checkpoint room, which stores it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from torch import Tensor

from areal_mega.checkpoint.recover import RecoverSave, load_recovered
from areal_mega.megatron.engine import MegatronEngine
from areal_mega.megatron.recover_state import EngineStates
from areal_mega.rpc.rank_server import RankServer


class Recovering:
    """See ``controller.recover``, which calls these."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._saving: RecoverSave | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}
        """Kept from save to save on a CPU, where new memory costs more than the copying. Beside a GPU the copying costs more, and the
        memory, three times the fp32 weights, is given back between two saves."""

    def serve(self, server: RankServer) -> None:
        """Register all calls: those that touch the engine on its thread; those that wait for the disk beside it."""
        for call in (self.recover_begin, self.recover_load, self.recover_digest):
            server.register(call.__name__, call)
        for handler in (self.recover_done, self.recover_commit):
            server.register_async(handler.__name__, handler)

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
            buffers=self._buffers if engine.platform.is_cpu else {},
            naming=engine.naming,
        )
        return {"nbytes": self._saving.nbytes, "counters": states.counters()}

    async def recover_done(self) -> bool:
        """Whether this rank's part is stored. Answered at once, also during a train step."""
        assert self._saving is not None, "recover_begin comes first"
        return self._saving.done()

    async def recover_commit(self, state: str) -> None:
        """Rank 0 completes the checkpoint; the others forget theirs. In a thread of its own: it waits for the file system to store all that
        was written, which must hold up neither the next train step nor a health check."""
        assert self._saving is not None, "recover_begin comes first"
        saving, self._saving = self._saving, None
        if self._engine.rank == 0:
            await asyncio.to_thread(saving.commit, state)

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
