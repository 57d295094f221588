"""Any order of submit, step, pause, update, resume and abort: no token is lost, made twice, or stamped with another version.

The updates here bring a new version of equal weights, so that a sample must be, token for token, what it is when nothing interrupts it.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from engines import Driven, sequence
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_models import tiny_model

from areal_mega.serving.sequence import Sequence

PROMPTS = [list(range(5, 5 + n)) for n in (1, 9, 30)] + [list(range(60, 110)), [*range(60, 100), *range(7, 30)]]


@cache
def folder() -> Path:
    return tiny_model(Path(tempfile.mkdtemp(prefix="interleavings-")), "qwen3_moe")


@cache
def undisturbed(prompt: int, seed: int, budget: int) -> tuple[int, ...]:
    driven = Driven(folder())
    s = sequence("alone", PROMPTS[prompt], seed=seed, max_new_tokens=budget)
    driven.submit(s)
    driven.run()
    return tuple(s.output_ids.tolist())


class Interleavings(RuleBasedStateMachine):
    """The engine, and what each token's version must be."""

    @initialize(rows=st.integers(1, 5), chunk=st.sampled_from([7, 64]), tokens=st.sampled_from([192, 2048]), kept=st.sampled_from([0, 300]))
    def start(self, rows: int, chunk: int, tokens: int, kept: int) -> None:
        self.driven = Driven(folder(), max_rows=rows, chunk=chunk, max_tokens=max(tokens, 192), context_length=128, prefixes=kept)
        self.engine, self.version = self.driven.engine, 0
        self.submitted: list[tuple[Sequence, tuple[int, int, int]]] = []
        self.versions: dict[str, list[str]] = {}

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), seed=st.integers(0, 3), budget=st.integers(1, 24), members=st.integers(1, 3))
    def submit(self, prompt: int, seed: int, budget: int, members: int) -> None:
        for member in range(members):
            s = sequence(f"r{len(self.submitted)}", PROMPTS[prompt], seed=seed + 10 * member, max_new_tokens=budget)
            self.submitted.append((s, (prompt, seed + 10 * member, budget)))
            self.versions[s.rid] = []
            self.driven.submit(s)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driven.step()
            self._stamp()

    def _stamp(self) -> None:
        for s, _ in self.submitted:
            stamped = self.versions[s.rid]
            stamped += [str(self.version)] * (self._made(s) - len(stamped))

    def _made(self, s: Sequence) -> int:
        return int(self.engine.rows.made[s.row]) if s.row >= 0 else len(s.output_ids)

    @precondition(lambda self: self.engine.paused is None)
    @rule(mode=st.sampled_from(["retract", "in_place"]))
    def pause(self, mode: str) -> None:
        before = {s.rid: self._made(s) for s, _ in self.submitted}
        with torch.inference_mode():
            self.engine.pause(mode)  # type: ignore[arg-type]
        assert {s.rid: self._made(s) for s, _ in self.submitted} == before

    @rule()
    def update(self) -> None:
        self.version += 1
        self.engine.weights_changed(str(self.version))

    @rule()
    def resume(self) -> None:
        self.engine.resume()

    @precondition(lambda self: self.submitted)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        target = self.submitted[which % len(self.submitted)][0]
        made, ended = self._made(target), target.finish
        with torch.inference_mode():  # as on the engine's thread: rows are moved
            assert self.engine.abort(lambda s: s is target) == (ended is None)
        assert self._made(target) == made and target.finish is not None

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "engine"):
            assert len(self.engine.rows) <= self.engine.limits.max_rows
            assert self.engine.prefixes.tokens <= self.engine.limits.prefixes

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.resume()
        while self.engine._runnable():
            self.step(1)
        delivered = [s.rid for s in self.driven.told if s.finish is not None]
        assert sorted(delivered) == sorted(s.rid for s, _ in self.submitted), "every sequence ends once"
        for s, (prompt, seed, budget) in self.submitted:
            expected, made = undisturbed(prompt, seed, budget), len(s.output_ids)
            assert s.finish is not None and made == len(s.output_logprobs)
            assert tuple(s.output_ids.tolist()) == expected[:made]
            assert s.finish["type"] == "abort" or made == budget
            spans = s.version_spans()
            assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == self.versions[s.rid]
            assert np.isfinite(s.output_logprobs).all()


Interleavings.TestCase.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
TestInterleavings = Interleavings.TestCase
