"""Families in the engine beyond the parity matrix: uneven stages, both dispatchers, recomputation, and what the router's knobs do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import family_cases as families
import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import SPARSE, tiny_model

from areal_mega.parallel.strategy import parse


@pytest.fixture(scope="session")
def sparse_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = Path(tmp_path_factory.mktemp("sparse"))
    return {name: str(tiny_model(root / name, name, num_hidden_layers=4 if name == "deepseek_v3" else 2)) for name in SPARSE}


@pytest.fixture(scope="session")
def sparse_references(sparse_models: dict[str, str]) -> dict[str, Any]:
    return run_ranks(1, families.references, folders=sparse_models)[0]


def test_uneven_stages_equal_transformers(tmp_path: Path) -> None:
    """Five layers on two stages, also interleaved: a dense model with tied embeddings, and one whose dense layers end within a stage."""
    folders = {
        "qwen3": str(tiny_model(tmp_path / "dense", "qwen3", num_hidden_layers=5)),
        "deepseek_v3": str(tiny_model(tmp_path / "sparse", "deepseek_v3", num_hidden_layers=5, first_k_dense_replace=2)),
    }
    (references,) = run_ranks(1, families.references, folders=folders)
    cases = [(name, strategy) for name in folders for strategy in ("megatron:d1p2[1,4]", "megatron:d1p2[1,2,1,1]v2")]
    jobs = [{"folder": folders[name], "strategy": strategy, "split": 3} for name, strategy in cases]
    results = run_ranks(2, families.parities, jobs=jobs, timeout_s=280)
    for number, (name, strategy) in enumerate(cases):
        found = families.summary([rank[number] for rank in results], references[name])
        families.check(found, f"{name} at {strategy}")


def test_the_all_gather_dispatcher_equals_all_to_all(sparse_models: dict[str, str], sparse_references: dict[str, Any]) -> None:
    """Ragged samples in unequal micro-batches: lengths differ between ranks, and with a pipeline between micro-batches too."""
    cases: dict[str, Any] = {
        "megatron:d2e2": [[0, 1, 2], [3], [4, 5, 6, 7]],
        "megatron:d1t2e2": 2,
        "megatron:d1c2e2": 1,
        "megatron:(attn:d1t2|ffn:e1t2)": 1,
        "megatron:d2p2e2": 2,
        "megatron:d2p2v2e2": 2,
    }
    names = {s: "deepseek_v3" if "p2" in s else "qwen2_moe" for s in cases}
    gathering = {"dispatcher": "allgather"}
    for size in (2, 4):
        mine = [s for s in cases if parse(s).world_size == size]
        jobs = [{"folder": sparse_models[names[s]], "strategy": s, "split": cases[s], "router": gathering} for s in mine]
        results = run_ranks(size, families.parities, jobs=jobs, timeout_s=280)
        for number, strategy in enumerate(mine):
            found = families.summary([rank[number] for rank in results], sparse_references[names[strategy]])
            families.check(found, f"{names[strategy]} at {strategy} with all-gather")


def test_padding_to_one_length_enters_no_loss_and_no_count(sparse_models: dict[str, str]) -> None:
    knobs = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "expert_bias_update_rate": 0.01}
    job = {"folder": sparse_models["deepseek_v3"], "strategy": "megatron:d2e2", "split": 3}
    jobs = [job | {"router": knobs | {"dispatcher": dispatcher}} for dispatcher in ("alltoall", "allgather")]
    for sent, gathered in run_ranks(2, families.updates, jobs=jobs):
        assert gathered["grad_norm"] == pytest.approx(sent["grad_norm"], rel=1e-5)
        assert gathered["metrics"] == pytest.approx(sent["metrics"])
        assert gathered["after"].keys() == sent["after"].keys()
        assert all(np.array_equal(gathered["after"][name], bias) for name, bias in sent["after"].items())


def test_recomputation_changes_nothing(sparse_models: dict[str, str], sparse_references: dict[str, Any]) -> None:
    name = "deepseek_v3"
    changes: list[dict[str, Any]] = [
        {"train": {"recompute": "selective"}},
        {"train": {"recompute": "full"}},
    ]
    jobs = [{"folder": sparse_models[name], "strategy": "megatron:d2e2"} | change for change in changes]
    results = run_ranks(2, families.parities, jobs=jobs)
    for number, change in enumerate(changes):
        families.check(families.summary([rank[number] for rank in results], sparse_references[name]), str(change))


def test_every_knob_of_the_router_changes_something(sparse_models: dict[str, str]) -> None:
    job = {"folder": sparse_models["deepseek_v3"], "strategy": "megatron:d1"}
    knobs: list[dict[str, Any]] = [
        {},
        {"router": {"aux_loss_coef": 0.1}},
        {"router": {"z_loss_coef": 0.1}},
        {"router": {"expert_bias_update_rate": 0.01}},
        {"router": {"expert_bias_update_rate": 0.01}, "loss": "nan"},
        {"router": {"expert_bias_update_rate": 0.01}, "train": {"recompute": "full"}},
        {"dtype": "bf16"},
        {"dtype": "bf16", "router": {"fp32": False}},
    ]
    (results,) = run_ranks(1, families.updates, jobs=[job | knob for knob in knobs])
    plain, aux, z_loss, moved, broken, recomputed, fp32, half = results
    assert aux["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-4)
    assert z_loss["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-4)
    assert fp32["grad_norm"] != half["grad_norm"]
    for name, before in plain["before"].items():
        assert np.array_equal(plain["after"][name], before), "a bias stays as loaded unless the recipe moves it"
        steps = moved["after"][name] - before
        np.testing.assert_allclose(np.abs(steps)[steps != 0], 0.01, rtol=1e-4)
        assert (steps > 0).any() and (steps < 0).any(), "some experts had more tokens than the mean, some fewer"
        assert np.array_equal(recomputed["after"][name], moved["after"][name]), "a second forward pass counts no token twice"
        assert np.array_equal(broken["after"][name], before), "an update that is skipped moves nothing"
    assert broken["skipped"]


def test_group_limited_routing_comes_from_the_config(sparse_models: dict[str, str], tmp_path: Path) -> None:
    """The same weights with another number of groups to choose from, or none: each routes otherwise, by either score of a group."""
    for name in ("deepseek_v3", "deepseek_v2-groups"):
        source = Path(sparse_models[name])
        config = json.loads((source / "config.json").read_text())
        assert config["topk_group"] < config["n_group"]
        folders = [str(source)]
        for number, change in enumerate(({"topk_group": config["topk_group"] + 1}, {"topk_group": config["n_group"]})):
            other = tmp_path / f"{name}-{number}"
            shutil.copytree(source, other)
            (other / "config.json").write_text(json.dumps(config | change))
            folders.append(str(other))
        (results,) = run_ranks(1, families.updates, jobs=[{"folder": folder, "strategy": "megatron:d1"} for folder in folders])
        norms = [result["grad_norm"] for result in results]
        choices = {config["topk_group"], config["topk_group"] + 1, config["n_group"]}
        if name == "deepseek_v2-groups":
            # A group counts as its best expert there: the k best experts are in the k best groups, and more groups are no other choice.
            choices = {min(groups, config["num_experts_per_tok"]) for groups in choices}
        assert len({round(norm / norms[0], 4) for norm in norms}) == len(choices), f"{name}: {norms}"


def test_load_is_counted_once_whatever_the_layout(sparse_models: dict[str, str]) -> None:
    folder = sparse_models["deepseek_v3"]
    (counts,) = run_ranks(1, families.loads, folder=folder)
    relative = np.array(counts) / np.mean(counts, axis=1, keepdims=True)
    expected = {
        "router/load_max": relative.max(axis=1).mean(),
        "router/load_worst": relative.max(),
        "router/load_min": relative.min(),
        "router/idle": (relative == 0).mean(),
    }
    first = None
    for strategies in (["megatron:d1"], ["megatron:d2e2", "megatron:d1p2", "megatron:d1t2", "megatron:d1c2"]):
        jobs = [{"folder": folder, "strategy": s, "router": {"expert_bias_update_rate": 0.01}} for s in strategies]
        results = run_ranks(parse(strategies[0]).world_size, families.updates, jobs=jobs)
        for number, strategy in enumerate(strategies):
            reported = [rank[number]["metrics"] for rank in results if rank[number]["metrics"]]
            assert reported, strategy
            for metrics in reported:
                assert metrics == pytest.approx(expected), strategy
            after = {name: bias for rank in results for name, bias in rank[number]["after"].items()}
            first = first or after
            assert after.keys() == first.keys()
            assert all(np.array_equal(after[name], first[name]) for name in first), f"{strategy}: biases differ"


def test_knobs_without_effect_are_refused(sparse_models: dict[str, str], tmp_path: Path) -> None:
    dense = str(tiny_model(tmp_path, "llama"))
    jobs = [
        {"folder": sparse_models["mixtral"], "strategy": "megatron:d1", "router": {"expert_bias_update_rate": 0.1}},
        {"folder": dense, "strategy": "megatron:d1", "router": {"aux_loss_coef": 0.1}},
        {"folder": dense, "strategy": "megatron:d1", "router": {"z_loss_coef": 0.1}},
        {"folder": dense, "strategy": "megatron:d1", "router": {"dispatcher": "allgather"}},
    ]
    (lines,) = run_ranks(1, families.refusals, jobs=jobs)
    assert "the model's router has no correction bias" in lines[0]
    assert lines[1] == "router.aux_loss_coef is 0.1, but the model has no experts; set it to 0"
    assert lines[2].startswith("router.z_loss_coef is 0.1, but the model has no experts")
    assert lines[3] == "router.dispatcher is allgather, but the model has no experts; leave it at alltoall"
