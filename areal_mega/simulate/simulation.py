"""The run itself: replicas that generate, a trainer that consumes, and between them the dispatch of a real run. Pure.

Admission, routing, the order of consumption, the strict bound and refills are `areal_mega.rollout.dispatch`, called as the rollout
controller calls it; only time is simulated.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.core.types import Group, Sample, SampleId, VersionCount
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.dispatch import Dispatch, DispatchSettings, Flight, ReadyBatch
from areal_mega.rollout.staleness import StalenessControl
from areal_mega.simulate.inputs import Setup
from areal_mega.simulate.replica import Episode, SimulatedReplica

_ROWS = 100_000
"""Prompts of the imagined data: so many that no run sees one twice at once."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One train step: when it ended, what it waited for rollouts and trained (seconds), what it trained on, and how old that was."""

    ended: float
    wait_s: float
    drain_s: float
    train_s: float
    samples: int
    tokens: int
    ages: Mapping[int, int]
    stale_tokens: int
    refilled: int


@dataclass
class Result:
    """What a simulated run did. Rates leave out the first ``skip`` steps, in which the pipeline fills."""

    steps: list[SimulatedStep]
    skip: int
    start: float
    """When the measured part began, seconds."""
    generated: float
    """Tokens generated in the measured part."""
    rollout_idle: float
    """Share of the replicas' time in it with nothing to do, or paused."""

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended - self.start

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens that were trained, per second."""
        return sum(step.tokens for step in self._measured) / self.seconds

    @property
    def samples_per_s(self) -> float:
        return sum(step.samples for step in self._measured) / self.seconds

    @property
    def train_idle(self) -> float:
        """Share of the trainer's time that it waited for rollouts."""
        return sum(step.wait_s + step.drain_s for step in self._measured) / self.seconds

    @property
    def ages(self) -> dict[int, int]:
        """Tokens that came in by age in versions, those beyond the bound included."""
        ages: Counter[int] = Counter()
        for step in self._measured:
            ages.update(step.ages)
        return dict(sorted(ages.items()))

    @property
    def mean_age(self) -> float:
        return sum(age * n for age, n in self.ages.items()) / sum(self.ages.values())

    @property
    def _measured(self) -> list[SimulatedStep]:
        return self.steps[self.skip :]


@dataclass
class _Trainer:
    """Where the trainer is, and until when."""

    state: Literal["waiting", "training", "draining", "syncing"] = "waiting"
    until: float = float("inf")
    since: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    drain_s: float = 0.0
    batch: ReadyBatch | None = None


@dataclass
class Simulation:
    """One simulated run.

    Args:
        steps: train steps that are looked at. The run would go on after them: its end, where nothing more is generated, is not measured.
        seed: of lengths and rewards.
    """

    setup: Setup
    recipe: Recipe
    algorithm: Algorithm
    steps: int
    seed: int = 1
    now: float = field(default=0.0, init=False)

    def run(self, skip: int | None = None) -> Result:
        """Run to the end. ``skip``: first steps left out of the rates; None: a fifth, and at least those of the bound's versions."""
        self._prepare()
        if skip is None:
            skip = min(self.steps - 1, max((self.recipe.staleness.max_staleness + 1) * self.recipe.sync.every_steps, self.steps // 5))
        marks = (0.0, 0.0, 0.0) if skip == 0 else None
        while len(self._done) < self.steps:
            self._act()
            if marks is None and len(self._done) >= skip:
                marks = (self.now, self._tokens, self._idle)
            while len(self._done) < self.steps and not self._pass_time():
                pass
        assert marks is not None, f"{skip} of {self.steps} steps were to be left out"
        start, tokens, idle = marks
        span = (self.now - start) * len(self._replicas)
        return Result(self._done, skip, start, self._tokens - tokens, (self._idle - idle) / span)

    def _prepare(self) -> None:
        recipe, setup = self.recipe, self.setup
        train, every = recipe.train, recipe.sync.every_steps
        total = train.batch_size * (self.steps + (recipe.staleness.max_staleness + 1) * every)
        staleness = StalenessControl(train.batch_size, recipe.staleness.max_staleness, every=every, total=total)
        rows = [{"id": str(i), "prompt": ""} for i in range(min(_ROWS, max(10 * train.batch_size, 2 * total)))]
        stream = PromptStream(rows, seed=self.seed, shuffle=False)
        self._dispatch = Dispatch(stream, staleness, DispatchSettings.of(recipe, self.algorithm))
        self._replicas = {
            f"replica {i}": SimulatedReplica(setup.decode, recipe.rollout.max_concurrent_prompts) for i in range(setup.replicas)
        }
        for name in self._replicas:
            self._dispatch.replica_joined(name)
        if recipe.run.overlap:
            self._dispatch.generate_always()
        self._rng = random.Random(self.seed)
        self._flights: dict[int, Flight] = {}
        self._trainer = _Trainer()
        self._done: list[SimulatedStep] = []
        self._version = 0

    @property
    def _tokens(self) -> float:
        return sum(replica.tokens for replica in self._replicas.values())

    @property
    def _idle(self) -> float:
        return sum(replica.idle_s for replica in self._replicas.values())

    def _act(self) -> None:
        """Do everything that can be done at this moment: the trainer's turn, then new submissions."""
        while self._turn():
            pass
        self._submit()

    def _turn(self) -> bool:
        """Let the trainer go on, if it can; whether it did."""
        trainer = self._trainer
        match trainer.state:
            case "waiting":
                batch = self._dispatch.take(self.recipe.train.batch_size)
                if batch is None:
                    return False
                tokens = sum(sample.length for group in batch.groups for sample in group.samples)
                trainer.batch, trainer.wait_s = batch, self.now - trainer.since
                trainer.train_s = tokens * self.setup.train_s_per_token + self.setup.step_s
                trainer.state, trainer.until = "training", self.now + trainer.train_s
            case "training" if self.now >= trainer.until:
                if (len(self._done) + 1) % self.recipe.sync.every_steps:
                    self._finish_step()
                    return True
                trainer.state, trainer.until, trainer.since = "draining", float("inf"), self.now
                for replica in self._replicas.values():
                    replica.closed = not self.setup.interruptible
            case "draining" if self.setup.interruptible or not any(replica.busy for replica in self._replicas.values()):
                trainer.drain_s = self.now - trainer.since
                trainer.state, trainer.until = "syncing", self.now + self.setup.sync_s
                for replica in self._replicas.values():
                    replica.paused = True
            case "syncing" if self.now >= trainer.until:
                self._version += 1
                self._dispatch.version_changed(self._version)
                for replica in self._replicas.values():
                    replica.paused = replica.closed = False
                    replica.new_version()
                    replica.fill()
                self._finish_step()
            case _:
                return False
        return True

    def _finish_step(self) -> None:
        trainer, batch = self._trainer, self._trainer.batch
        assert batch is not None
        samples = [sample for group in batch.groups for sample in group.samples]
        self._done.append(
            SimulatedStep(
                ended=self.now,
                wait_s=trainer.wait_s,
                drain_s=trainer.drain_s,
                train_s=trainer.train_s,
                samples=len(samples),
                tokens=sum(sample.loss_tokens for sample in samples),
                ages=batch.ages,
                stale_tokens=batch.stale_tokens,
                refilled=batch.refilled,
            )
        )
        self._trainer = _Trainer(since=self.now)

    def _submit(self) -> None:
        self._dispatch.discarded.clear()
        for flight in self._dispatch.submissions(self.now):
            self._flights[flight.ticket] = flight
            lengths = [self.setup.lengths(self._rng) for _ in range(self.recipe.rollout.group_size)]
            self._replicas[flight.replica].submit(Episode(flight.ticket, lengths))

    def _pass_time(self) -> bool:
        """Go to the next event: a sequence ends, or the trainer does. Whether there is something to act on."""
        step = min(replica.next_end() for replica in self._replicas.values())
        step = min(step, self._trainer.until - self.now)
        assert step < float("inf"), "nothing is under way and nothing can start"
        step = max(0.0, step)
        trainer_acts = self._trainer.until - self.now <= step
        # The trainer's own times are met exactly, whatever rounding the sum of steps has.
        self.now = self._trainer.until if trainer_acts else self.now + step
        delivered = [(replica, episode) for replica in self._replicas.values() for episode in replica.advance(step)]
        for replica, episode in delivered:
            self._deliver(replica, episode)
        return trainer_acts or bool(delivered) or self._trainer.state == "draining"

    def _deliver(self, replica: SimulatedReplica, episode: Episode) -> None:
        flight = self._flights.pop(episode.ticket)
        uniform = self._rng.random() < self.setup.uniform
        prompt_tokens = round(self.setup.prompt_tokens)
        group_id = f"{flight.prompt.id}/{episode.ticket}"
        samples = []
        for member, length in enumerate(episode.lengths):
            versions = tuple(VersionCount(version=v, tokens=n) for v, n in replica.versions_of(episode, length).items())
            samples.append(
                Sample(
                    id=SampleId(run="", step=0, prompt_id=flight.prompt.id, epoch=flight.prompt.epoch, group_id=group_id, member=member),
                    length=prompt_tokens + length,
                    prompt_length=prompt_tokens,
                    loss_tokens=length,
                    versions=versions,
                    reward=0.0 if uniform else float(member % 2),
                    finish_reason="stop",
                    scores={},
                    tensors={},
                )
            )
        group = Group(id=group_id, prompt=flight.prompt, samples=tuple(samples), worker=flight.replica, seconds=self.now - flight.since)
        self._dispatch.finished(episode.ticket, group, {})
