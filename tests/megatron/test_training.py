"""Updates: equal to torch's AdamW with clipping, at every layout, precision and recomputation; what happens to a broken gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_cases as cases
import numpy as np
import pytest
from ranks import run_ranks
from tiny_models import tiny_model

from areal_mega.config.schema import OptimizerSection
from areal_mega.megatron.optimizer import learning_rate
from areal_mega.parallel.strategy import parse

CLIP = 0.5
# A large epsilon keeps Adam from turning rounding in tiny gradients into whole steps.
ADAM = {
    "lr": 1e-2,
    "warmup_steps": 2,
    "schedule": "linear",
    "weight_decay": 0.1,
    "clip_grad": CLIP,
    "eps": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
}
STEPS = 4


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(Path(tmp_path_factory.mktemp("moe")), "qwen3_moe"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(Path(tmp_path_factory.mktemp("tied")), "qwen3"))


@pytest.fixture(scope="session")
def moe_reference(moe_folder: str) -> dict[str, Any]:
    return _reference(moe_folder)


@pytest.fixture(scope="session")
def tied_reference(tied_folder: str) -> dict[str, Any]:
    return _reference(tied_folder)


def _reference(folder: str) -> dict[str, Any]:
    lrs = [learning_rate(s, OptimizerSection(**ADAM), STEPS) for s in range(STEPS)]
    keys = ("weight_decay", "beta1", "beta2", "eps")
    optimizer = {k: ADAM[k] for k in keys}
    return run_ranks(1, cases.hf_training, folder=folder, steps=STEPS, lrs=lrs, clip=CLIP, optimizer=optimizer)[0] | {"lr": lrs}


def train(folder: str, strategy: str, optimizer: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    world_size = parse(strategy).world_size
    return run_ranks(
        world_size, cases.training, folder=folder, strategy=strategy, steps=STEPS, optimizer=ADAM | (optimizer or {}), **kwargs
    )


def check(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    for result in results:
        np.testing.assert_allclose(result["grad_norm"], reference["grad_norm"], rtol=1e-4)
        np.testing.assert_allclose(result["lr"], reference["lr"])
        assert not any(result["skipped"])
    for name, expected in reference["weights"].items():
        if name in results[0]["weights"]:
            np.testing.assert_allclose(results[0]["weights"][name], expected, atol=2e-5, err_msg=name)


ALONE = [(s, False) for s in ("megatron:d2e2", "megatron:d1t2p2e2")]
SHARDED = [(s, True) for s in ("megatron:d1", "megatron:d2", "megatron:d2e2", "megatron:d2p2e2", "megatron:d1t2p2e2")]


@pytest.mark.parametrize(("strategy", "distributed"), ALONE + SHARDED)
def test_updates_equal_adamw(moe_folder: str, moe_reference: dict[str, Any], strategy: str, distributed: bool) -> None:
    results = train(moe_folder, strategy, {"distributed": distributed})
    check(results, moe_reference)
    trained = sum(n - n // 3 - 1 for n in cases.LENGTHS)
    assert sum(r["tokens"] for r in results) == STEPS * trained, "every token is counted once, whatever the layout"


@pytest.mark.parametrize("strategy", ["megatron:d1t2", "megatron:d2p2", "megatron:d1p2v2"])
def test_tied_embeddings_stay_tied(tied_folder: str, tied_reference: dict[str, Any], strategy: str, tmp_path: Path) -> None:
    folder = tied_folder
    reference = tied_reference
    if "v2" in strategy:
        folder = str(tiny_model(tmp_path, "qwen3", num_hidden_layers=4))
        reference = _reference(folder)
    check(train(folder, strategy), reference)


@pytest.mark.parametrize(
    ("strategy", "recompute"), [("megatron:d1", "none"), ("megatron:d2e2", "full"), ("megatron:d1t2p2e2", "selective")]
)
def test_bf16_follows_fp32(moe_folder: str, moe_reference: dict[str, Any], strategy: str, recompute: str) -> None:
    results = train(moe_folder, strategy, dtype="bf16", train={"recompute": recompute})
    np.testing.assert_allclose(results[0]["grad_norm"], moe_reference["grad_norm"], rtol=0.03)
    for name, expected in moe_reference["weights"].items():
        # bf16 keeps 2^-9 of a weight; the updates differ besides.
        assert np.abs(results[0]["weights"][name] - expected).mean() < 0.02 * np.abs(expected).mean() + 1e-4, name


@pytest.mark.parametrize("strategy", ["megatron:d1", "megatron:d2e2", "megatron:d1t2p2e2"])
def test_router_losses_are_means_over_tokens(moe_folder: str, strategy: str) -> None:
    router = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1}
    with_losses = train(moe_folder, strategy, router=router, split=1)[0]
    without = train(moe_folder, strategy, split=1)[0]
    assert with_losses["grad_norm"][0] != without["grad_norm"][0]
    # z-loss is a plain mean over tokens: it does not depend on the split; the balancing loss does, being a product of two means.
    z_only = [train(moe_folder, s, router={"z_loss_coef": 0.1}, split=n)[0]["grad_norm"][0] for s, n in ((strategy, 1), ("megatron:d1", 4))]
    assert z_only[0] == pytest.approx(z_only[1], rel=1e-5)
    assert z_only[0] != pytest.approx(without["grad_norm"][0], rel=1e-4)


@pytest.mark.parametrize("strategy", ["megatron:d2e2", "megatron:d1t2"])
def test_the_balancing_loss_counts_no_padding(moe_folder: str, strategy: str) -> None:
    # 113 tokens: under TP one of them is padding; under DP the second rank has nothing but padding.
    whole: Any = {"router": {"aux_loss_coef": 0.1}, "split": [list(range(8))]}
    (alone,), split = train(moe_folder, "megatron:d1", **whole), train(moe_folder, strategy, **whole)
    for result in split:
        assert not any(result["skipped"])
        np.testing.assert_allclose(result["grad_norm"], alone["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize("strategy", ["megatron:d1", "megatron:d2p2e2"])
def test_a_gradient_that_is_not_finite_is_skipped(moe_folder: str, strategy: str) -> None:
    for result in run_ranks(parse(strategy).world_size, cases.broken_gradient, folder=moe_folder, strategy=strategy):
        assert result["skipped"]
        assert not np.isfinite(result["grad_norm"])
        assert result["unchanged"]
        assert not result["skipped_after"]


def test_reference_stays_while_the_policy_moves(moe_folder: str) -> None:
    for result in run_ranks(2, cases.reference_model, folder=moe_folder, strategy="megatron:d1p2"):
        if result["last"]:
            assert result["same_before"]
            assert result["reference_same"]
            assert result["policy_moved"] > 1e-3


def test_export_and_load_again(moe_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "export"
    results = run_ranks(4, cases.export_and_reload, folder=moe_folder, strategy="megatron:d2p2e2", out=str(out))
    assert all(r["equal"] for r in results)
    (hf,) = run_ranks(1, cases.hf_logits, folder=str(out))
    mine: dict[int, np.ndarray] = {}
    for result in results:
        mine |= result["logprobs"]
    for index, values in mine.items():
        np.testing.assert_allclose(values, hf["logprobs"][index], atol=1e-4)


def test_temperature(moe_folder: str) -> None:
    (result,) = run_ranks(1, cases.temperatures, folder=moe_folder)
    assert result["worst"] < 1e-4


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("megatron:d1p3", "2 layers, which do not divide by pipeline parallelism 3"),
        ("megatron:d3e3", "8 experts, which do not divide by expert parallelism 3"),
        ("megatron:d1t3", "do not split over 3 ranks"),
    ],
)
def test_a_strategy_that_does_not_fit_is_one_line(moe_folder: str, strategy: str, message: str) -> None:
    for error in run_ranks(3, cases.construction_error, folder=moe_folder, strategy=strategy):
        assert message in error
        assert "\n" not in error


def test_a_reference_of_another_architecture_is_refused(moe_folder: str, tied_folder: str) -> None:
    (error,) = run_ranks(1, cases.reference_error, folder=moe_folder, other=tied_folder)
    assert "has another architecture than model.path" in error


@pytest.mark.parametrize("strategy", ["megatron:d1", "megatron:d1t2p2e2"])
def test_a_batch_without_trained_tokens(moe_folder: str, strategy: str) -> None:
    for result in run_ranks(parse(strategy).world_size, cases.nothing_trained, folder=moe_folder, strategy=strategy):
        assert result["same"]
        assert result["zero"]
        assert not result["logprobs"]
