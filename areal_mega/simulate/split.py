"""How to split a number of GPUs between rollout and training: every legal split, simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from areal_mega.algorithms.registry import Algorithm
from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError
from areal_mega.parallel.strategy import ParallelStrategy, parse
from areal_mega.simulate.inputs import Setup
from areal_mega.simulate.simulation import Result, Simulation


@dataclass(frozen=True, slots=True)
class Split:
    """``replicas`` of the rollout strategy's size and ``dp`` of the train strategy's, with what they did."""

    replicas: int
    dp: int
    rollout_gpus: int
    train_gpus: int
    result: Result


def splits(gpus: int, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[tuple[int, int]]:
    """(replicas, dp) that use as many of ``gpus`` as a rollout of so many replicas leaves whole data-parallel ranks for."""
    per_dp = train.world_size // train.dp
    for replicas in range(1, gpus // rollout.replica_size + 1):
        dp = (gpus - replicas * rollout.replica_size) // per_dp
        if dp > 0:
            yield replicas, dp


def try_splits(gpus: int, setup: Setup, recipe: Recipe, algorithm: Algorithm, steps: int) -> list[Split]:
    """Simulate every split, the fastest first. Training is taken to be as many times faster as it has more data-parallel ranks.

    Raises:
        UserError: not even one replica and one data-parallel rank fit.
    """
    train, rollout = parse(recipe.train.strategy), parse(recipe.rollout.strategy)
    per_dp = train.world_size // train.dp
    found = []
    for replicas, dp in splits(gpus, train, rollout):
        scaled = replace(setup, replicas=replicas, train_s_per_token=setup.train_s_per_token * train.dp / dp)
        result = Simulation(scaled, recipe, algorithm, steps).run()
        found.append(Split(replicas, dp, replicas * rollout.replica_size, dp * per_dp, result))
    if not found:
        raise UserError(
            f"--gpus {gpus} is too few: a replica of rollout.strategy {rollout} takes {rollout.replica_size} and a data-parallel rank of "
            f"train.strategy {train} {per_dp}; use {rollout.replica_size + per_dp} or more"
        )
    return sorted(found, key=lambda split: -split.result.tokens_per_s)
