from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_mega.config.checks import check_recipe
from areal_mega.config.loader import load_recipe
from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError

MINIMAL = "run: {name: x, steps: 3}\nmodel: {path: p}\n"
CONTRADICTIONS = [
    (["algorithm.kl.coef=0.1"], ["algorithm.kl.coef", "model.reference_path"], "KL to no reference"),
    (["train.minibatches=3"], ["train.batch_size", "train.minibatches"], "8 / 3 = 2.67 prompts each; use a batch of 6 or 9"),
    (
        ["train.strategy=megatron:d4", "train.batch_size=2", "rollout.group_size=1"],
        ["train.strategy", "train.batch_size", "train.minibatches", "rollout.group_size"],
        "= 2 samples: some ranks would never train; use at most d2",
    ),
    (["warmup.steps=2", "warmup.batch_size=1", "train.strategy=megatron:d2"], ["warmup.batch_size", "train.strategy"], "use 2 or more"),
    (["data.max_prompt_tokens=4000"], ["data.max_prompt_tokens", "rollout.max_new_tokens", "train.microbatch_tokens"], "= 5024 tokens"),
    (
        ["data.max_prompt_tokens=3071", "train.microbatch_tokens=4095", "train.strategy=megatron:d1c2"],
        ["data.max_prompt_tokens", "train.microbatch_tokens", "train.strategy"],
        "= 4095 tokens, padded to 4096 for",
    ),
    (["rollout.python=/x/python"], ["rollout.python", "rollout.strategy"], "use sglang:d1 or remove"),
    (["rollout.server_args=[--tp-size, '2']"], ["rollout.server_args", "rollout.strategy"], "two values for one flag"),
    (["rollout.server_args=['--dtype=float16']"], ["rollout.server_args", "rollout.dtype"], "change rollout.dtype instead"),
    (["launch.slots=1"], ["train.strategy", "rollout.strategy", "launch.slots"], "takes 1 = 2 slots, but launch.slots"),
    (["launch.train_cpus=[0, 1]", "launch.rollout_cpus=[1, 2]"], ["launch.train_cpus", "launch.rollout_cpus"], "both name cores [1]"),
    (["rollout.top_k=0"], ["rollout.top_k"], "use -1"),
    (
        ["rollout.prompt_timeout_s=60"],
        ["rollout.prompt_timeout_s", "rollout.request_timeout_s"],
        "rollout.prompt_timeout_s",
    ),
    (["eval.samples=4"], ["eval.samples", "eval.temperature"], "same greedy answer 4 times"),
    (["eval.every_steps=1"], ["eval.every_steps", "data.valid"], "nothing to evaluate on"),
    (
        ["eval.every_steps=10", "sync.every_steps=3", "data.valid={loader: arithmetic}"],
        ["eval.every_steps", "sync.every_steps"],
        "weights of an earlier step; use 12",
    ),
    (["train.optimizer.min_lr=1", "train.optimizer.schedule=cosine"], ["train.optimizer.min_lr", "train.optimizer.lr"], "decay goes down"),
    (["train.optimizer.min_lr=1e-7"], ["train.optimizer.min_lr", "train.optimizer.schedule"], "never reached"),
    (["train.optimizer.warmup_steps=4"], ["train.optimizer.warmup_steps", "run.steps"], "use at most 3"),
    (
        ["checkpoint.export_every_steps=4", "checkpoint.export_at_end=false"],
        ["checkpoint.export_every_steps", "run.steps", "checkpoint.export_at_end"],
        "nothing would ever be saved",
    ),
    (["sync.timeout_s=2000"], ["sync.timeout_s", "launch.rpc_timeout_s"], "raise the second"),
    (["rollout.strategy=megatron:d1"], ["rollout.strategy"], "does not serve"),
    (["rollout.strategy=vllm:d1t4e2"], ["rollout.strategy"], "over all ranks of a replica or over none; use e4 or leave e out"),
    (["rollout.strategy=vllm:d1", "rollout.server_args=[--logprobs_mode=raw_logprobs]"], ["rollout.server_args"], "gives --logprobs-mode"),
    (["train.strategy=sglang:d1"], ["train.strategy"], "does not train"),
    (["train.strategy=megatron:d2e3"], ["train.strategy"], "2/3 is not a whole number"),
    (
        ["train.fp8.format=hybrid", "checkpoint.recover_every_steps=5"],
        ["train.fp8.recipe", "train.fp8.format", "checkpoint.recover_every_steps"],
        "set train.fp8.recipe to tensorwise or blockwise",
    ),
    (
        ["train.fp8.format=e4m3", "checkpoint.recover_every_steps=5", "launch.restarts=2"],
        ["train.fp8.recipe", "checkpoint.recover_every_steps"],
        "recover checkpoints hold none",
    ),
    (["rollout.strategy=embedded:t2"], ["rollout.strategy"], "no dimension t"),
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(("overrides", "named", "expected"), CONTRADICTIONS, ids=[" ".join(c[0]) for c in CONTRADICTIONS])
def test_a_contradiction_names_every_setting_with_its_origin(recipe: Path, overrides: list[str], named: list[str], expected: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(recipe, overrides)
    message = str(error.value)
    assert "\n" not in message
    origins = dict(re.findall(r"([a-z_.0-9]+) \[(default|override .*?|[^\[\]]*:\d+)\](?= |$|:|,|;)", message))
    assert set(named) <= set(origins), message
    for override in overrides:
        path = override.partition("=")[0]
        if path in named:
            assert origins[path].startswith(f"override {path}="), message
    assert expected in re.sub(r" \[(default|override [^\]]*\]?|[^\[\]]*:\d+)\]", "", message)


def test_both_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL + "algorithm:\n  kl:\n    coef: 0.1\n")
    with pytest.raises(UserError, match=re.escape(f"algorithm.kl.coef [{path}:5] is 0.1 but model.reference_path [default] is not set")):
        load_recipe(path)


def test_what_does_not_contradict_passes(recipe: Path) -> None:
    load_recipe(recipe)
    load_recipe(recipe, ["algorithm.kl.coef=0.1", "model.reference_path=p"])
    load_recipe(recipe, ["rollout.strategy=sglang:d1", "rollout.python=/x/python", "rollout.server_args=[--mem-fraction-static, '0.8']"])
    load_recipe(recipe, ["train.strategy=megatron:d2", "rollout.strategy=embedded:d2", "launch.slots=4"])
    load_recipe(recipe, ["checkpoint.export_every_steps=100"])
    load_recipe(recipe, ["train.fp8.format=hybrid"])
    load_recipe(recipe, ["train.fp8.format=hybrid", "train.fp8.recipe=blockwise", "checkpoint.recover_every_steps=5"])
    load_recipe(recipe, ["train.fp8.recipe=delayed", "checkpoint.recover_every_steps=5"])


def test_recipes_made_in_code_are_checked_without_lines() -> None:
    base = {"run": {"name": "x", "steps": 3}, "model": {"path": "p"}}
    check_recipe(Recipe.model_validate(base))
    with pytest.raises(UserError, match=r"^algorithm.kl.coef is 0.1 but model.reference_path is not set"):
        check_recipe(Recipe.model_validate(base | {"algorithm": {"kl": {"coef": 0.1}}}))
