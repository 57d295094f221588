"""What becomes of every prompt: the state machine of rollout. Pure: events in, decisions out, the time as an argument.

A prompt is in exactly one place at any time:

    stream ──submissions──▶ flying ──finished──▶ ready ──take──▶ consumed
      ▲                       │  ▲                 ▲                 │
      │                       │  └── retry ◀── failed, timed_out, withdrawn, replica_lost
      │                       │                    └── give_back ◀───┤
      └── put back ◀──────────┼─────────────────── beyond the bound, replica_lost
                              └──▶ rejected, or poisoned after ``attempts`` failures

Events: ``replica_joined``, ``replica_down``, ``withdrawn``, ``replica_up``, ``replica_lost``, ``finished``, ``rejected``, ``failed``,
``timed_out``, ``version_changed``, ``give_back``. Decisions: ``submissions`` (which prompts to start where), ``take`` (which groups to
train on), ``torn`` (whether what was taken is still whole), ``discarded`` (whose arrays to forget), ``overdue``, ``faulty`` (whose
servers are broken).
The rollout controller feeds it from the network; the simulator feeds it from a simulated clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from areal_mega.algorithms.advantages import is_uniform
from areal_mega.core.types import Group, Prompt
from areal_mega.data.stream import PromptStream
from areal_mega.rollout.flight import Batch, DispatchSettings, Flight, Key, ReadyBatch, Waiting, key_of
from areal_mega.rollout.lengths import length_bin
from areal_mega.rollout.progress import Progress, RolloutFailed
from areal_mega.rollout.routing import Router
from areal_mega.rollout.staleness import StalenessControl, apply_bound_to_groups, oldest_allowed

_FAULTS = 3
"""Attempts in a row that a replica's server failed, each with all its requests, until it is taken for broken."""

__all__ = ["Dispatch", "DispatchSettings", "Flight", "ReadyBatch", "RolloutFailed"]


class Dispatch:
    """One run's prompts.

    Args:
        stream: where train prompts come from.
        staleness: how many groups may be under way.
    """

    def __init__(self, stream: PromptStream, staleness: StalenessControl, settings: DispatchSettings) -> None:
        self._stream, self.staleness, self.settings = stream, staleness, settings
        self.router = Router(settings.max_per_replica, group_size=settings.group_size, expected_tokens=settings.expected_tokens)
        self.flying: dict[int, Flight] = {}
        self.ready: list[tuple[int, Group]] = []
        """(order of submission, group)."""
        self.retry: list[Waiting] = []
        self.discarded: list[Group] = []
        """Groups whose arrays nobody will want; whoever releases them empties the list."""
        self.poisoned: dict[str, str] = {}
        """Prompts that failed every time, with the last reason. They are never submitted again."""
        self.counts: Counter[str] = Counter()
        """Since start: groups by outcome, dropped members, generated tokens (``tokens``), samples."""
        self.lengths: Counter[int] = Counter()
        """Generated tokens per sample, in bins, since somebody emptied it."""
        self.version = 0
        self._always = False
        self._wanted = 0
        self._batch = Batch()
        self._lent: list[tuple[int, Group]] = []
        """The batch that was taken last, as it was before the bound."""
        self._torn: set[str] = set()
        """Those of its groups whose replica was lost since, by id."""
        self._failures: dict[Key, int] = {}
        self._tickets = self._orders = 0
        self._progress = Progress(settings.batch_size)

    # --- events

    def replica_joined(self, name: str) -> None:
        """A replica takes prompts from now on; ``name`` is the address of its rollout worker."""
        self.router.joined(name)

    def replica_down(self, name: str) -> None:
        """A replica has lost its server: it is given nothing until ``replica_up``. What it finished is still there."""
        self.router.replicas[name].down = True

    def withdrawn(self, tickets: Iterable[int]) -> None:
        """Prompts were taken back from a replica before they ended: they are tried again elsewhere, which is no failure of theirs."""
        for ticket in tickets:
            flight = self._landed(ticket, {})
            if flight is not None:
                self.retry.append(Waiting(flight.prompt, flight.order, frozenset({flight.replica})))
                self.counts["withdrawn"] += 1

    def replica_up(self, name: str) -> None:
        """A replica has a server again."""
        replica = self.router.replicas[name]
        replica.down, replica.faults_in_a_row = False, 0
        replica.held.clear()

    def replica_lost(self, name: str) -> None:
        """A replica and everything it held is gone. Its prompts are tried again elsewhere, which is no failure of theirs."""
        self.router.lost(name)
        for flight in [f for f in self.flying.values() if f.replica == name]:
            del self.flying[flight.ticket]
            self.retry.append(Waiting(flight.prompt, flight.order, frozenset({name})))
        self._torn |= {group.id for _, group in self._lent if group.worker == name}
        kept = [(order, taken) for order, _, taken in self._batch.kept if taken.worker == name]
        gone = [(order, group) for order, group in self.ready if group.worker == name] + kept
        self.ready = [(order, group) for order, group in self.ready if group.worker != name]
        self._batch.kept = [entry for entry in self._batch.kept if entry[2].worker != name]
        self._wanted += len(kept)
        self.discarded = [group for group in self.discarded if group.worker != name]
        self._lose(gone)

    @property
    def torn(self) -> bool:
        """Of the batch that was taken last a replica was lost since: its arrays are gone, unless the trainer has them already."""
        return bool(self._torn)

    def give_back(self) -> int:
        """The batch that was taken last will not be trained, because it is ``torn``: what is left of it is ready again.

        Returns:
            The number of groups whose prompts are to be generated again.
        """
        self.staleness.on_given_back(len(self._lent))
        self.ready += [(order, group) for order, group in self._lent if group.id not in self._torn]
        gone = [(order, group) for order, group in self._lent if group.id in self._torn]
        self._lent, self._torn = [], set()
        self._lose(gone)
        return len(gone)

    def version_changed(self, version: int, *, scheduled: bool = True) -> None:
        """The servers have new weights: more groups may start, and no cached prefix is worth anything.

        Args:
            scheduled: it ends an interval of ``sync.every_steps``; else no room comes with it.
        """
        if not scheduled:
            self.staleness.unscheduled(version - self.version)
        if version != self.version and self._batch.kept:
            # They were bounded at the old version: what is left of them is not what the new one leaves.
            self.ready += [(order, taken) for order, _, taken in self._batch.kept]
            self._wanted += len(self._batch.kept)
            self._batch = Batch()
        self.version = version
        self.router.forget_prefixes()

    def finished(self, ticket: int, group: Group, dropped: Mapping[str, int]) -> str:
        """An attempt gave a group. ``dropped``: members without a trajectory, by reason.

        Returns:
            Why the group cannot be believed, and the attempt has failed; empty where it can.
        """
        flight = self._landed(ticket, dropped)
        if flight is None:  # it was given up before: another attempt is on its way
            self.counts["late"] += 1
            self.discarded.append(group)
            return ""
        oldest = min(sample.oldest_version for sample in group.samples)
        if oldest < flight.version:  # no staleness: its server had confirmed newer weights before it got the prompt
            reason = f"the server used weights of version {oldest} although it had confirmed version {flight.version} before"
            self.discarded.append(group)
            self._retry_or_poison(flight, "failed", reason, True)
            return reason
        self._failures.pop(key_of(flight.prompt), None)
        self._progress.failed = self.router.replicas[flight.replica].faults_in_a_row = 0
        self.router.learn(group)
        self.staleness.on_accepted()
        self.counts["group"] += 1
        self.counts["samples"] += len(group.samples)
        self.counts["tokens"] += sum(s.loss_tokens for s in group.samples)
        self.lengths.update(length_bin(s.loss_tokens) for s in group.samples)
        useless = self._useless(group)
        if useless is None:
            self._progress.useless = 0
            self.ready.append((flight.order, group))
            return ""
        kind, self._progress.last_reason = useless
        self.counts[kind] += 1
        self._progress.useless += 1
        self.staleness.on_discarded()
        self.discarded.append(group)
        return ""

    def rejected(self, ticket: int, reason: str, dropped: Mapping[str, int]) -> None:
        """The workflow wants no group of this prompt: another prompt takes its place."""
        flight = self._landed(ticket, dropped)
        if flight is None:
            return
        self._failures.pop(key_of(flight.prompt), None)
        self.counts["rejected"] += 1
        self._progress.failed, self._progress.last_reason = 0, reason
        self._leave()

    def failed(self, ticket: int, reason: str, dropped: Mapping[str, int], *, server_fault: bool = False) -> bool:
        """An attempt failed. True where the prompt is tried again, False where it is poisoned now (or was given up before)."""
        flight = self._landed(ticket, dropped)
        return flight is not None and self._retry_or_poison(flight, "failed", reason, server_fault)

    def timed_out(self, ticket: int, reason: str) -> bool:
        """An attempt took too long and was ended. As ``failed``."""
        flight = self._landed(ticket, {})
        return flight is not None and self._retry_or_poison(flight, "timed_out", reason, False)

    # --- decisions

    def generate_always(self) -> None:
        """From now on keep as many groups under way as the staleness bound allows: the overlapped loop."""
        self._always = True

    def submissions(self, now: float) -> list[Flight]:
        """The prompts to submit now, and where: those to be tried again first, then as many as admission and the replicas have room for."""
        started = []
        self.retry.sort(key=lambda waiting: waiting.order)
        while self.retry and self.router.free:
            waiting = self.retry.pop(0)
            started.append(self._start(waiting.prompt, waiting.order, waiting.avoid, now))
        room = self.staleness.capacity(self.version)
        if not self._always:
            room = min(room, self._wanted - len(self.ready) - self.staleness.running)
        for prompt in self._fresh(min(room, self.router.free)):
            self.staleness.on_submitted()
            started.append(self._start(prompt, self._orders, frozenset(), now))
            self._orders += 1
        return started

    def takeable(self, groups: int) -> bool:
        """``take`` would make progress."""
        return len(self.ready) >= groups - len(self._batch.kept)

    def take(self, groups: int) -> ReadyBatch | None:
        """A batch of ``groups``, oldest submission first, each under the strict bound; None until so many are there.

        Prompts whose answers came too late are generated again, before fresh ones: they are the long and hard ones.
        """
        batch = self._batch
        while (missing := groups - len(batch.kept)) > 0:
            if len(self.ready) < missing:
                self._wanted = missing
                return None
            self.ready.sort(key=lambda entry: entry[0])
            taken, self.ready = self.ready[:missing], self.ready[missing:]
            self._bound(batch, taken)
        self._batch, self._wanted = Batch(), 0
        self._lent, self._torn = [(order, taken) for order, _, taken in batch.kept], set()
        self.staleness.on_consumed(groups)
        return ReadyBatch(
            groups=tuple(kept for _, kept, _ in batch.kept),
            taken=tuple(taken for *_, taken in batch.kept),
            ages=dict(sorted(batch.ages.items())),
            stale_tokens=batch.stale_tokens,
            dropped_samples=batch.dropped,
            refilled=batch.refilled,
            bias=batch.bias,
        )

    def overdue(self, now: float) -> list[Flight]:
        """Prompts that have flown longer than any can: their worker has lost them, or cannot end them."""
        return [flight for flight in self.flying.values() if now - flight.since > self.settings.deadline_s]

    def faulty(self) -> dict[str, str]:
        """Replicas whose servers failed so often in a row that they are better started again, with the last reason."""
        replicas = self.router.replicas.values()
        return {r.name: r.last_fault for r in replicas if r.faults_in_a_row >= _FAULTS and not r.down}

    def check_progress(self) -> None:
        """Raise where waiting on is hopeless.

        Raises:
            RolloutFailed: prompt after prompt fails or gives nothing to train on, or too many are poisoned.
        """
        if len(self.poisoned) > self.settings.max_poisoned:
            shown = "; ".join(f"{prompt}: {reason}" for prompt, reason in list(self.poisoned.items())[-3:])
            raise RolloutFailed(
                f"{len(self.poisoned)} prompts failed {self.settings.attempts} times each, and rollout.max_poisoned_prompts is "
                f"{self.settings.max_poisoned}; the last: {shown}"
            )
        if len(self.poisoned) == len(self._stream):
            raise RolloutFailed(f"all {len(self.poisoned)} prompts of the data are poisoned; the last: {self._progress.last_reason}")
        self._progress.check(self.counts)

    # --- recovery

    def state(self) -> dict[str, Any]:
        """All of it as plain JSON types, at a moment between two steps: prompts under way or ready are given again after ``restore``."""
        held = [(order, group.prompt) for order, group in self.ready]
        held += [(order, taken.prompt) for order, _, taken in self._batch.kept]
        held += [(flight.order, flight.prompt) for flight in self.flying.values()]
        held += [(waiting.order, waiting.prompt) for waiting in self.retry]
        stream = self._stream.state()
        again = [[prompt.id, prompt.epoch] for _, prompt in sorted(held, key=lambda entry: entry[0])]
        return {
            "stream": {**stream, "returned": again + stream["returned"]},
            "staleness": self.staleness.snapshot(),
            "version": self.version,
            "poisoned": dict(self.poisoned),
            "failures": [[id_, epoch, n] for (id_, epoch), n in self._failures.items()],
            "counts": dict(self.counts),
            "in_a_row": self._progress.state(),
            "means": [self.router.answer_tokens, self.router.chars_per_token],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with nothing under way.

        Raises:
            UserError: the data changed since.
        """
        assert not (self.flying or self.ready or self.retry), "restore comes before anything is submitted"
        self._stream.restore(state["stream"])
        self.staleness.restore(state["staleness"])
        self.version = state["version"]
        self.poisoned = dict(state["poisoned"])
        self._failures = {(id_, epoch): n for id_, epoch, n in state["failures"]}
        self.counts = Counter(state["counts"])
        self._progress.restore(state["in_a_row"])
        self.router.answer_tokens, self.router.chars_per_token = state["means"]

    # --- inside

    def _start(self, prompt: Prompt, order: int, avoid: frozenset[str], now: float) -> Flight:
        flight = Flight(self._tickets, prompt, order, self.router.route(prompt, avoid), now, self.version)
        self._tickets += 1
        self.flying[flight.ticket] = flight
        return flight

    def _landed(self, ticket: int, dropped: Mapping[str, int]) -> Flight | None:
        flight = self.flying.pop(ticket, None)
        if flight is not None:
            self.router.ended(flight.route)
            for reason, number in dropped.items():
                self.counts["dropped_samples"] += number
                self._progress.last_reason = reason
        return flight

    def _retry_or_poison(self, flight: Flight, outcome: str, reason: str, server_fault: bool) -> bool:
        key = key_of(flight.prompt)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self.counts[outcome] += 1
        self._progress.failed, self._progress.last_reason = self._progress.failed + 1, reason
        if server_fault:
            replica = self.router.replicas[flight.replica]
            replica.faults_in_a_row, replica.last_fault = replica.faults_in_a_row + 1, reason
        if failures < self.settings.attempts and flight.prompt.id not in self.poisoned:
            self.retry.append(Waiting(flight.prompt, flight.order, frozenset({flight.replica})))
            self.counts["retried"] += 1
            return True
        del self._failures[key]
        self.poisoned[flight.prompt.id] = reason
        self.counts["poisoned"] += 1
        self._leave()
        return False

    def _lose(self, gone: list[tuple[int, Group]]) -> None:
        """Ready groups whose arrays went with their replica: their prompts come again, before fresh ones."""
        self.staleness.on_discarded(len(gone))
        self._stream.put_back(group.prompt for _, group in sorted(gone, key=lambda entry: entry[0]))
        self.counts["lost_groups"] += len(gone)

    def _leave(self) -> None:
        self.staleness.on_rejected()
        self._progress.useless += 1

    def _fresh(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts of the stream that are not poisoned; none where all are."""
        out: list[Prompt] = []
        while len(out) < n and len(self.poisoned) < len(self._stream):
            out += [prompt for prompt in self._stream.next(n - len(out)) if prompt.id not in self.poisoned]
        return out

    def _useless(self, group: Group) -> tuple[str, str] | None:
        """Why nothing could be learned from a group: what to count it as, and the reason; None where something can."""
        if self._is_lone(group):
            return "lone", f"one member of {self.settings.group_size} was left (algorithm.singleton is error)"
        if self.settings.uniform_is_useless and is_uniform([s.reward for s in group.samples]):
            return "uniform", "all rewards of the group were equal (algorithm.filter_uniform_groups)"
        return None

    def _is_lone(self, group: Group) -> bool:
        """Its other members were dropped, and a group of one has no statistic: training on it would stop the run."""
        return self.settings.lone_is_useless and len({s.id.member for s in group.samples}) == 1

    def _bound(self, batch: Batch, taken: list[tuple[int, Group]]) -> None:
        """Apply the strict bound to groups; those it leaves go into the batch, the prompts of the others back to the stream."""
        eta = self.staleness.max_staleness
        groups = [group for _, group in taken]
        bounded = apply_bound_to_groups(groups, self.version, eta, self.settings.action)
        batch.bias.add((s for g in groups for s in g.samples), oldest_allowed(self.version, eta))
        sound = {group.id: group for group in bounded.groups if not self._is_lone(group)}
        batch.kept += [(order, sound[group.id], group) for order, group in taken if group.id in sound]
        again = [group for group in groups if group.id not in sound]
        batch.ages.update(bounded.ages)
        batch.stale_tokens += bounded.stale_tokens
        batch.dropped += bounded.dropped_samples
        batch.refilled += len(again)
        self.counts["refilled"] += len(again)
        self.staleness.on_discarded(len(again))
        self._stream.put_back(group.prompt for group in again)
        self.discarded += again
