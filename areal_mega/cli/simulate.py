"""``areal-mega simulate``: what a run would do, and how to split GPUs, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_mega.cli.recipe import OverridesArgument, RecipeArgument, load
from areal_mega.core.errors import UserError

if TYPE_CHECKING:
    from areal_mega.config.schema import Recipe
    from areal_mega.simulate.inputs import Setup
    from areal_mega.simulate.simulation import Result


def simulate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    from_run: Annotated[Path | None, typer.Option(help="Measure everything that is not given from this run directory.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths of answers: MEAN[:SIGMA] (log-normal), or fixed:N; tokens.")] = None,
    decode: Annotated[str | None, typer.Option(help="Tokens/s of one replica by running sequences: 1:60,16:700,…")] = None,
    train_tokens_per_s: Annotated[float | None, typer.Option(min=1e-6, help="Tokens/s of all train ranks together.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=0, help="Mean length of a prompt.")] = None,
    sync_s: Annotated[float | None, typer.Option(min=0, help="Seconds of one weight sync.")] = None,
    step_s: Annotated[float | None, typer.Option(min=0, help="Seconds of a train step besides its tokens.")] = None,
    drain: Annotated[bool, typer.Option("--drain", help="A sync waits for running requests instead of interrupting them.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Train steps to simulate.")] = 30,
    gpus: Annotated[int | None, typer.Option(min=2, help="Try every split of so many GPUs.")] = None,
) -> None:
    """Simulate a recipe: throughput, staleness, and how long each side waits.

    Uses the dispatch and staleness code of a real run on a simulated clock. Speeds are given, or measured from a run.
    """
    from areal_mega.parallel.strategy import parse
    from areal_mega.simulate.inputs import Setup, from_histogram, parse_decode, parse_lengths
    from areal_mega.simulate.measured import read_run
    from areal_mega.simulate.simulation import Simulation

    resolved, algorithm = load(recipe, overrides)
    settings = resolved.recipe
    run = read_run(from_run) if from_run is not None else None
    missing = [
        name
        for name, value in (("--lengths", lengths), ("--decode", decode), ("--train-tokens-per-s", train_tokens_per_s))
        if value is None and run is None
    ]
    if missing:
        raise UserError(f"{', '.join(missing)}: not given, and there is no --from-run RUN to measure them from")
    longest = settings.rollout.max_new_tokens

    def chosen(given: float | None, measured: float | None) -> float:
        return given if given is not None else measured or 0.0

    measured_lengths = from_histogram(run.lengths, longest) if run is not None else None
    sampler = parse_lengths(lengths, longest) if lengths is not None else measured_lengths
    table = parse_decode(decode) if decode is not None else run.decode if run is not None else None
    assert sampler is not None and table is not None
    setup = Setup(
        lengths=sampler,
        prompt_tokens=chosen(prompt_tokens, run.prompt_tokens if run else None),
        decode=table,
        replicas=parse(settings.rollout.strategy).dp,
        train_s_per_token=1 / train_tokens_per_s
        if train_tokens_per_s is not None
        else chosen(None, run.train_s_per_token if run else None),
        step_s=chosen(step_s, run.step_s if run else None),
        sync_s=chosen(sync_s, run.sync_s if run else None),
        interruptible=not (drain or settings.sync.pause == "drain"),
        uniform=run.uniform if run is not None else 0.0,
    )
    _show(Simulation(setup, settings, algorithm, steps).run(), settings)
    if run is not None:
        typer.echo(f"the measured run: {run.samples_per_s:,.1f} samples/s")
    if gpus is not None:
        _show_splits(gpus, setup, settings, algorithm, steps)


def _show(result: Result, recipe: Recipe) -> None:
    bound = recipe.staleness.max_staleness
    ages = result.ages
    total = sum(ages.values())
    typer.echo(f"throughput: {result.tokens_per_s:,.0f} generated and trained tokens/s, {result.samples_per_s:,.1f} samples/s")
    typer.echo(f"trainer waits {result.train_idle:.0%} of the time, rollout {result.rollout_idle:.0%}")
    shares = ", ".join(f"{age}: {n / total:.1%}" for age, n in ages.items())
    typer.echo(f"staleness (bound {bound}): mean {result.mean_age:.2f}; tokens by age {shares}")


def _show_splits(gpus: int, setup: Setup, recipe: Recipe, algorithm: object, steps: int) -> None:
    from areal_mega.algorithms.registry import Algorithm
    from areal_mega.simulate.split import try_splits

    assert isinstance(algorithm, Algorithm)
    found = try_splits(gpus, setup, recipe, algorithm, steps)
    typer.echo(f"{'rollout':>8} {'train':>6} {'tokens/s':>10} {'trainer waits':>14} {'rollout waits':>14}")
    for split in found:
        r = split.result
        typer.echo(f"{split.rollout_gpus:>8} {split.train_gpus:>6} {r.tokens_per_s:>10,.0f} {r.train_idle:>14.0%} {r.rollout_idle:>14.0%}")
    best = found[0]
    typer.echo(
        f"best: {best.replicas} replicas (rollout.strategy d{best.replicas}) and {best.dp} data-parallel ranks (train.strategy d{best.dp})"
    )
