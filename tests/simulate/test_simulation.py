"""The simulator: conservation, limits that can be computed by hand, the published shape, and a recorded run."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.loader import load_recipe
from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.observe.record import StepRecord, read_records
from areal_mega.parallel.strategy import parse
from areal_mega.simulate.inputs import DecodeTable, Setup, from_histogram, lognormal, parse_decode, parse_lengths
from areal_mega.simulate.measured import measure
from areal_mega.simulate.replica import Episode, SimulatedReplica
from areal_mega.simulate.simulation import Result, Simulation
from areal_mega.simulate.split import splits, try_splits

ROOT = Path(__file__).resolve().parents[2]
FLAT = DecodeTable(((1, 100.0), (4, 400.0)))


def recipe(eta: int = 1, batch: int = 4, members: int = 2, concurrent: int = 64, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "r", "steps": 10, **sections.get("run", {})},
            "model": {"path": "p"},
            "rollout": {"group_size": members, "max_concurrent_prompts": concurrent, "max_new_tokens": 1000},
            "train": {"batch_size": batch},
            "staleness": {"max_staleness": eta},
            "sync": sections.get("sync", {}),
            "algorithm": {"correction": "decoupled"},
        }
    )


def run(the_recipe: Recipe, steps: int = 12, **changes: Any) -> Result:
    base: dict[str, Any] = {
        "lengths": lambda rng: 100,
        "prompt_tokens": 0.0,
        "decode": FLAT,
        "replicas": 1,
        "train_s_per_token": 1 / 400,
    }
    return Simulation(Setup(**{**base, **changes}), the_recipe, algorithm_of(the_recipe), steps).run()


def test_synchronous_is_the_sum_and_one_batch_ahead_the_maximum() -> None:
    """A batch is 800 tokens: 2 s to generate, 2 s to train, half a second to sync."""
    assert run(recipe(eta=0), sync_s=0.5).tokens_per_s == pytest.approx(800 / 4.5)
    ahead = run(recipe(eta=1), sync_s=0.5)
    assert ahead.tokens_per_s == pytest.approx(800 / 2.5)
    assert ahead.train_idle == pytest.approx(0.0, abs=0.01)
    assert run(recipe(eta=0)).rollout_idle == pytest.approx(0.5)
    assert run(recipe(eta=2, run={"overlap": False})).tokens_per_s == pytest.approx(200)


def test_the_slower_side_decides_and_the_other_waits() -> None:
    slow_training = run(recipe(eta=1), train_s_per_token=1 / 100)
    assert slow_training.tokens_per_s == pytest.approx(100)
    assert slow_training.rollout_idle == pytest.approx(0.75, abs=0.02) and slow_training.train_idle == 0
    slow_rollout = run(recipe(eta=1), train_s_per_token=1 / 4000)
    assert slow_rollout.tokens_per_s == pytest.approx(400, rel=0.02)
    assert slow_rollout.train_idle == pytest.approx(0.9, abs=0.02)
    assert run(recipe(eta=1), replicas=2, train_s_per_token=1e-6).tokens_per_s == pytest.approx(800, rel=0.02)


def test_a_sync_that_waits_for_running_requests_costs_what_the_longest_takes() -> None:
    lengths = lognormal(100, 1.0, 1000)
    interrupted = run(recipe(eta=2), steps=30, lengths=lengths)
    drained = run(recipe(eta=2), steps=30, lengths=lengths, interruptible=False)
    assert drained.tokens_per_s < 0.9 * interrupted.tokens_per_s
    assert sum(step.drain_s for step in interrupted.steps) == 0 < sum(step.drain_s for step in drained.steps)


@settings(max_examples=8)
@given(eta=st.integers(0, 3), replicas=st.integers(1, 3), seed=st.integers(0, 99), drain=st.booleans())
def test_tokens_are_conserved_and_bounded(eta: int, replicas: int, seed: int, drain: bool) -> None:
    the_recipe = recipe(eta, concurrent=3)
    setup = Setup(
        lengths=lognormal(50, 0.8, 400), prompt_tokens=5, decode=FLAT, replicas=replicas, train_s_per_token=1e-3, interruptible=not drain
    )
    result = Simulation(setup, the_recipe, algorithm_of(the_recipe), 8, seed=seed).run(skip=0)
    assert all(step.samples <= 8 for step in result.steps)
    assert sum(sum(step.ages.values()) for step in result.steps) <= result.generated + 1e-6
    for step in result.steps:
        assert step.tokens == sum(n for age, n in step.ages.items() if age <= eta) or step.refilled
    assert all(a.ended <= b.ended for a, b in pairwise(result.steps))
    assert 0 <= result.rollout_idle <= 1 and 0 <= result.train_idle <= 1
    if drain:
        assert result.steps[-1].stale_tokens == 0 or eta < 3


def test_the_published_knee() -> None:
    """AReaL (arXiv 2505.24298) by η = 0, 1, 2, 4, 8, 16: 27.1, 47.8, 47.8, 49.0, 51.5, 52.0 k tokens/s: a jump by 1.76, then flat."""
    decode = DecodeTable(((1, 2500), (8, 12500), (16, 20000), (32, 25000)))
    rates = []
    for eta in (0, 1, 2, 4, 8):
        the_recipe = recipe(eta, batch=64, members=8, concurrent=8)
        the_recipe = the_recipe.model_copy(update={"rollout": the_recipe.rollout.model_copy(update={"max_new_tokens": 27000})})
        steps = run(
            the_recipe,
            8,
            lengths=lognormal(4000, 0.9, 27000),
            prompt_tokens=200,
            decode=decode,
            replicas=2,
            train_s_per_token=1 / 68e3,
            sync_s=3,
        )
        rates.append(steps.tokens_per_s)
    assert 1.6 < rates[1] / rates[0] < 1.95
    assert all(1.0 - 0.02 < rate / rates[1] < 1.09 for rate in rates[1:])


# --- parts


def test_versions_of_an_episode_that_updates_interrupt() -> None:
    replica = SimulatedReplica(FLAT, 4)
    episode = Episode(0, [10, 30])
    replica.submit(episode)
    assert replica.next_end() == pytest.approx(0.1)
    replica.advance(0.05)
    replica.new_version()
    assert replica.advance(replica.next_end()) == []
    replica.new_version()
    assert replica.advance(replica.next_end()) == [episode]
    assert replica.versions_of(episode, 10) == {0: 5, 1: 5}
    assert replica.versions_of(episode, 30) == {0: 5, 1: 5, 2: 20}
    assert replica.tokens == pytest.approx(40)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(1, 1e5)), min_size=1, unique_by=lambda p: p[0]), st.integers(1, 1000))
def test_a_table_passes_through_its_points(points: list[tuple[int, float]], n: int) -> None:
    table = DecodeTable(tuple(sorted(points)))
    for sequences, rate in points:
        assert table.rate(sequences) == pytest.approx(rate)
    assert 0 < table.rate(n) <= max(table.peak, 1e5)


def test_measured_lengths_are_drawn_as_they_were() -> None:
    draw, rng = from_histogram({1: 10, 64: 30}, 100), random.Random(1)
    drawn = [draw(rng) for _ in range(4000)]
    assert set(drawn) == {1, 64, 65, 66, 67}
    assert drawn.count(1) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("text", ["", "x", "-5", "fixed:0", "10:-1"])
def test_lengths_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--lengths"):
        parse_lengths(text, 100)


@pytest.mark.parametrize("text", ["", "5", "5:1,4:2", "0:1", "1:-1", "1:x"])
def test_tables_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--decode"):
        parse_decode(text)
    assert parse_decode("1:60,16:700").rate(16) == 700


def test_splits_are_whole_replicas_and_ranks() -> None:
    assert list(splits(8, parse("megatron:d2t2"), parse("sglang:d2t2"))) == [(1, 3), (2, 2), (3, 1)]
    the_recipe = recipe()
    setup = Setup(lengths=lambda rng: 100, prompt_tokens=0, decode=FLAT, replicas=1, train_s_per_token=1 / 200)
    found = try_splits(6, setup, the_recipe, algorithm_of(the_recipe), 8)
    assert (found[0].replicas, found[0].dp) == (2, 4)  # two replicas make 800 tokens/s, four ranks train as many
    with pytest.raises(UserError, match="use 2 or more"):
        try_splits(1, setup, the_recipe, algorithm_of(the_recipe), 8)


def test_steps_of_several_per_version() -> None:
    """What is left out and what may still be generated are counted in steps, of which a version has several."""
    the_recipe = recipe(eta=1, sync={"every_steps": 3})
    found = run(the_recipe, steps=24)
    assert found.skip == 6
    assert {step.wait_s for step in found.steps[12:]} == {0.0}, "generation goes on beyond the last step that is looked at"


def test_a_sync_that_not_every_step_has() -> None:
    metrics = {"batch/samples": 8, "batch/groups": 4, "batch/tokens": 900, "batch/response_tokens": 100, "time/total": 5}
    histograms = {"rollout/length": {96: 8}, "rollout/decode_tokens": {2: 400}, "rollout/decode_ms": {2: 2000}}
    steps = [StepRecord(step=i, time=0.0, metrics=metrics | ({"time/sync": 0.5} if i % 2 else {}), histograms=histograms) for i in range(4)]
    assert measure(steps, "r").sync_s == 0.5


def test_what_a_run_measured() -> None:
    metrics = {
        "batch/samples": 8, "batch/groups": 4, "batch/tokens": 900, "batch/response_tokens": 100, "time/total": 5, "time/wait_rollout": 1,
        "time/update": 2, "time/logprobs": 0.25, "time/sync": 0.5, "rollout/uniform": 0,
    }  # fmt: skip
    lengths = {"rollout/length": {96: 8}, "rollout/decode_tokens": {2: 400, 8: 1600}, "rollout/decode_ms": {2: 2000, 8: 2000}}
    steps = [StepRecord(step=i, time=0.0, metrics={**metrics, "rollout/uniform": i}, histograms=lengths) for i in range(3)]
    found = measure(steps, "r")
    assert found.samples_per_s == pytest.approx(8 / 5) and found.prompt_tokens == pytest.approx(12.5)
    assert found.train_s_per_token == pytest.approx(2.25 / 900) and found.sync_s == 0.5
    assert found.step_s == pytest.approx(1.25)
    assert found.decode.points == ((2.0, pytest.approx(200 / 0.9)), (8.0, pytest.approx(800 / 0.9)))
    assert found.uniform == pytest.approx(2 / 12)
    with pytest.raises(UserError, match="has no histograms"):
        measure([StepRecord(step=1, time=0.0, metrics=metrics)], "old")


def test_a_recorded_run_is_predicted_within_a_tenth() -> None:
    """Twelve steps of the quickstart on two CPU cores, without warm-up and evaluation: measured, then simulated from what it measured."""
    records = [record for record in read_records(ROOT / "tests/data/simulated_quickstart.jsonl") if "batch/samples" in record.metrics]
    found, the_recipe = measure(records[2:], "quickstart"), load_recipe(ROOT / "recipes/quickstart.yaml")
    setup = Setup(
        lengths=from_histogram(found.lengths, the_recipe.rollout.max_new_tokens),
        prompt_tokens=found.prompt_tokens,
        decode=found.decode,
        replicas=1,
        train_s_per_token=found.train_s_per_token,
        step_s=found.step_s,
        sync_s=found.sync_s,
        uniform=found.uniform,
    )
    result = Simulation(setup, the_recipe, algorithm_of(the_recipe), 12).run()
    assert result.samples_per_s == pytest.approx(found.samples_per_s, rel=0.1)
    assert result.ages == {1: sum(result.ages.values())}  # one batch ahead, as it was
