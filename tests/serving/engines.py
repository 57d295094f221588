"""An engine inside the test's process, driven step by step, and transformers as the judge of its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_mega.serving import native
from areal_mega.serving.engine import Engine, EngineLimits
from areal_mega.serving.loader import load_weights
from areal_mega.serving.model import Model
from areal_mega.serving.sequence import SamplingParams, Sequence, Wanted


def forms() -> list[str]:
    """What this machine can compute with, for ``--kernels``."""
    try:
        native.load()
    except native.Unavailable:
        return ["torch"]
    return ["torch", "native"]


def multiplies() -> bool:
    """Whether this machine's kernels multiply bf16."""
    return "native" in forms() and native.multiplies(native.load())


class Driven:
    """An engine without its thread: ``run`` steps until nothing is left to do."""

    def __init__(
        self, folder: Path, *, dtype: str = "fp32", eos: tuple[int, ...] = (), decode: Any = None, kernels: str = "auto", **limits: Any
    ) -> None:
        weights, _ = load_weights(str(folder), dtype, kernels)
        defaults: dict[str, Any] = {"max_rows": 32, "max_tokens": 32 * 512, "context_length": 512, "chunk": 2048}
        chosen = EngineLimits(**{**defaults, **limits})
        self.told: list[Sequence] = []
        self.engine = Engine(
            Model(weights, chosen.context_length),
            chosen,
            eos=eos,
            version="0",
            decode=decode or (lambda ids: ""),
            deliver=self.told.extend,
            on_failure=lambda error: None,
        )

    def submit(self, *sequences: Sequence) -> None:
        self.engine.waiting.extend(sequences)

    def step(self, count: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(count):
                if self.engine._runnable():
                    self.engine._next()

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.engine._runnable():
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


def sequence(rid: str, prompt: Any, *, seed: int = 0, wanted: Wanted | None = None, **params: Any) -> Sequence:
    return Sequence(rid, np.asarray(prompt, dtype=np.int64), SamplingParams(**params), wanted or Wanted(logprobs=True), seed)


class Judge:
    """transformers' model of the same folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, ids: Any) -> torch.Tensor:
        """[tokens, vocab]"""
        return self.model(torch.as_tensor(np.asarray(ids))[None]).logits[0].float()

    def check(self, s: Sequence, atol: float = 1e-4) -> None:
        """Greedy tokens and every log-probability are those of transformers."""
        ids, n = np.concatenate([s.prompt, s.output_ids]), len(s.prompt)
        logits = self.logits(ids)[n - 1 : -1]
        temperature = s.params.temperature or 1.0
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.from_numpy(s.output_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.from_numpy(s.output_logprobs), expected, atol=atol, rtol=0)
        if s.params.temperature == 0.0:
            assert s.output_ids.tolist() == logits.argmax(-1).tolist()
