from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from areal_mega.cli.recipe import load
from areal_mega.config.provenance import section_of
from areal_mega.config.schema import Recipe, Section

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("**/*.yaml"))
# Numbers that have no unit: ratios, coefficients, seeds, and counts of the things that their help names.
DIMENSIONLESS = {
    "run.seed",
    "reward.workers",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.request_retries",
    "train.optimizer.lr",
    "train.optimizer.min_lr",
    "train.optimizer.weight_decay",
    "train.optimizer.beta1",
    "train.optimizer.beta2",
    "train.optimizer.eps",
    "train.optimizer.clip_grad",
    "router.aux_loss_coef",
    "router.capacity_factor",
    "router.expert_bias_update_rate",
    "router.z_loss_coef",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.dual_clip",
    "algorithm.correction_cap",
    "algorithm.correction_floor",
    "algorithm.kl.coef",
    "algorithm.reward_scale",
    "algorithm.reward_shift",
    "warmup.lr",
    "eval.temperature",
    "launch.slots",
    "launch.threads",
}
SUFFIX_UNITS = {"_s": "s", "_tokens": "tokens", "_mb": "MiB", "steps": "steps"}


def fields(schema: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in schema.model_fields.items():
        inner = section_of(info.annotation)
        if inner is None:
            yield f"{prefix}{name}", info
        else:
            yield from fields(inner, f"{prefix}{name}.")


def number(annotation: Any) -> bool:
    """Whether an annotation is int or float, through Annotated and ``| None``."""
    if typing.get_origin(annotation) is typing.Annotated:
        return number(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(number(a) for a in typing.get_args(annotation))
    return annotation in (int, float)


LEAVES = dict(fields())


@pytest.mark.parametrize("path", sorted(LEAVES))
def test_every_leaf_is_typed_and_helped(path: str) -> None:
    info = LEAVES[path]
    assert info.annotation is not None
    assert info.description, f"{path} has no help"
    assert len(info.description) >= 5
    assert isinstance(info.json_schema_extra, dict), f"{path} was not declared with leaf()"


def test_every_quantity_has_its_unit() -> None:
    numbers = {path for path, info in LEAVES.items() if number(info.annotation)}
    with_unit = {path for path in LEAVES if LEAVES[path].json_schema_extra["unit"]}  # type: ignore[index,call-overload]
    assert numbers - with_unit - DIMENSIONLESS == set(), "give these a unit, or say here why they have none"
    assert DIMENSIONLESS & with_unit == set(), "these have a unit after all"
    assert DIMENSIONLESS - numbers == set(), "these are gone, or are no numbers"
    for path in numbers - DIMENSIONLESS:
        for suffix, unit in SUFFIX_UNITS.items():
            if path.endswith(suffix):
                extra = LEAVES[path].json_schema_extra
                assert isinstance(extra, dict)
                assert unit in str(extra["unit"]), path


def test_only_what_a_run_cannot_do_without_is_required() -> None:
    required = {path for path, info in LEAVES.items() if info.is_required()}
    assert required == {"run.name", "run.steps", "model.path"}


def test_every_section_refuses_unknown_keys() -> None:
    def sections(schema: type[Section]) -> Iterator[type[Section]]:
        yield schema
        for info in schema.model_fields.values():
            inner = section_of(info.annotation)
            if inner is not None:
                yield from sections(inner)

    for schema in sections(Recipe):
        assert schema.model_config["extra"] == "forbid"
        assert schema.model_config["frozen"] is True


@pytest.mark.parametrize("recipe", RECIPES, ids=[str(path.relative_to(ROOT)) for path in RECIPES])
def test_every_shipped_recipe_loads(recipe: Path) -> None:
    resolved, algorithm = load(recipe, [])
    assert resolved.recipe.run.steps > 0
    assert algorithm.name == resolved.recipe.algorithm.name


def test_recipes_are_shipped() -> None:
    assert {path.name for path in RECIPES} >= {"quickstart.yaml", "gsm8k_grpo.yaml"}
