"""The policy loss against formulas written without autograd, and its invariance to how a batch is split."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.algorithms.aggregation import sample_weights
from areal_mega.algorithms.kl import kl_estimate
from areal_mega.algorithms.measure import to_metrics
from areal_mega.algorithms.policy import policy_loss
from areal_mega.algorithms.registry import PRESETS, Algorithm, resolve_algorithm
from areal_mega.algorithms.supervised import sft_loss
from areal_mega.config.schema import AlgorithmSection

T, F = torch.Tensor, dict[str, torch.Tensor]


def algorithm(*, max_staleness: int = 0, minibatches: int = 2, has_reference: bool = False, **section) -> Algorithm:
    return resolve_algorithm(
        AlgorithmSection.model_validate(section), max_staleness=max_staleness, minibatches=minibatches, has_reference=has_reference
    )


def make_batch(lengths: list[int], seed: int, spread: float = 0.5) -> tuple[T, F, T]:
    """Whole sequences whose first token is never trained; others are masked at random."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    sequence = torch.tensor(np.repeat(np.arange(len(lengths)), lengths))
    mask = torch.tensor(rng.random(total) < 0.8)
    mask[[0, *np.cumsum(lengths)[:-1]]] = False
    current = torch.tensor(-rng.random(total) * 3, dtype=torch.float64)
    counts = torch.zeros(len(lengths)).index_add(0, sequence, mask.float()).int().numpy()
    fields = {
        "loss_mask": mask,
        "logprobs": current + torch.tensor(rng.normal(0, spread, total)),
        "proximal": current + torch.tensor(rng.normal(0, spread, total)),
        "reference": current + torch.tensor(rng.normal(0, spread, total)),
        "advantages": torch.tensor(rng.normal(0, 1, len(lengths)))[sequence],
        "weights": torch.tensor(sample_weights("sequence_mean", counts))[sequence],
        "entropy": torch.tensor(rng.random(total)),
        "staleness": torch.tensor(rng.integers(0, 3, total)),
    }
    return current, fields, sequence


def loss_and_grad(current: T, fields: F, sequence: T, a: Algorithm) -> tuple[float, np.ndarray, dict]:
    leaf = current.clone().requires_grad_(True)
    loss, measured = policy_loss(leaf, fields, sequence, int(sequence.max()) + 1, a)
    loss.backward()
    return loss.item(), leaf.grad.numpy(), measured


def by_hand(current: T, fields: F, sequence: T, a: Algorithm) -> tuple[float, np.ndarray]:
    """Loss and gradient token by token, derivatives written out."""
    names = ("logprobs", "proximal", "reference", "advantages", "weights", "loss_mask")
    c, (b, p, r, adv, w, m) = current.numpy(), (fields[name].double().numpy() for name in names)
    seq, grad, loss = sequence.numpy(), np.zeros(len(c)), 0.0
    for t in np.flatnonzero(m):
        peers = np.flatnonzero((seq == seq[t]) & (m > 0))
        mine = peers if a.ratio == "gspo" else np.array([t])
        ratio = math.exp(np.mean(c[mine] - p[mine]))
        clipped = min(max(ratio, 1 - a.clip_low), 1 + a.clip_high)
        weight = math.exp(p[t] - b[t])
        match a.correction:
            case "none":
                weight = 1.0
            case "tis":
                weight = min(weight, a.correction_cap)
            case "mis":
                weight = weight if a.correction_floor <= weight <= a.correction_cap else 0.0
        if a.ratio == "cispo":
            value = clipped * adv[t] * c[t]
            grad[t] -= w[t] * weight * clipped * adv[t]
        else:
            value, slope = min((ratio * adv[t], adv[t] * ratio), (clipped * adv[t], 0.0 if clipped != ratio else adv[t] * ratio))
            if a.dual_clip is not None and adv[t] < 0 and value < a.dual_clip * adv[t]:
                value, slope = a.dual_clip * adv[t], 0.0
            grad[mine] -= w[t] * weight * slope / len(mine)
        loss -= w[t] * weight * value
        if a.kl_coef > 0 and a.kl_where == "loss":
            d = r[t] - c[t]
            value, slope = (0.5 * d * d, -d) if a.kl_estimator == "k2" else (math.exp(d) - 1 - d, 1 - math.exp(d))
            loss += w[t] * a.kl_coef * value
            grad[t] += w[t] * a.kl_coef * slope
    return loss, grad


CHOICES = [
    *({"name": name} for name in sorted(PRESETS)),
    *({"correction": correction} for correction in ("decoupled", "tis", "mis")),
    {"correction": "mis", "correction_floor": 0.9, "correction_cap": 1.1},
    {"name": "gspo", "correction": "tis"},
    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    {"name": "cispo", "clip_low": 0.1, "clip_high": 0.1},
    {"dual_clip": 1.5},
    {"kl": {"coef": 0.3, "estimator": "k2"}, "has_reference": True},
    {"kl": {"coef": 0.3, "estimator": "k3"}, "has_reference": True, "correction": "decoupled"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_are_the_formula(choice: dict, seed: int) -> None:
    a = algorithm(**choice)
    current, fields, sequence = make_batch([4, 1, 7, 3], seed)
    loss, grad, _ = loss_and_grad(current, fields, sequence, a)
    expected_loss, expected_grad = by_hand(current, fields, sequence, a)
    assert loss == pytest.approx(expected_loss, rel=2e-5, abs=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=2e-4, atol=1e-6)
    assert (grad[~fields["loss_mask"].numpy()] == 0).all()


@pytest.mark.parametrize(
    "choice", [{"name": "grpo", "correction": "mis"}, {"name": "gspo", "correction": "decoupled"}, {"name": "cispo"}], ids=str
)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_micro_batches_in_any_order_sum_to_the_whole(choice: dict, data: st.DataObject) -> None:
    a = algorithm(**choice)
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=7))
    current, fields, sequence = make_batch(lengths, data.draw(st.integers(0, 99)))
    loss, grad, measured = loss_and_grad(current, fields, sequence, a)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    total, pieces, parts = 0.0, np.zeros_like(grad), []
    for chosen in (order[:cut], order[cut:]):
        if not chosen:
            continue
        rows = torch.cat([torch.nonzero(sequence == s)[:, 0] for s in chosen])
        local = torch.cat([torch.full((lengths[s],), i) for i, s in enumerate(chosen)])
        part_loss, part_grad, part = loss_and_grad(current[rows], {k: v[rows] for k, v in fields.items()}, local, a)
        total, parts = total + part_loss, [*parts, part]
        pieces[rows.numpy()] = part_grad
    assert total == pytest.approx(loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(pieces, grad, rtol=1e-5, atol=1e-7)
    whole, split = to_metrics([measured]), to_metrics(parts)
    assert whole.keys() == split.keys()
    for name, metric in whole.items():
        assert split[name].result == pytest.approx(metric.result, rel=1e-4, abs=1e-5), name


def test_gspo_has_one_ratio_per_sequence_over_its_trained_tokens() -> None:
    a = algorithm(name="gspo")
    sequence = torch.tensor([0, 0, 0, 1, 1])
    fields = {
        "loss_mask": torch.tensor([False, True, True, False, True]),
        "logprobs": torch.zeros(5),
        "proximal": torch.tensor([9.0, -1.0, -1.0, 9.0, -1.0]),
        "advantages": torch.ones(5),
        "weights": torch.ones(5),
    }
    current = torch.tensor([0.0, -1.3, -0.7, 0.0, -1.5])
    _, _, measured = loss_and_grad(current, fields, sequence, a)
    metrics = to_metrics([measured])
    assert metrics["policy/ratio_max"].result == pytest.approx(1.0)
    assert metrics["policy/ratio_mean"].result == pytest.approx((1 + 1 + math.exp(-0.5)) / 3)
    assert metrics["policy/clip_fraction"].result == pytest.approx(0.0)


def test_without_a_proximal_pass_the_ratio_is_one_and_the_gradient_is_reinforce() -> None:
    current, fields, sequence = make_batch([5, 6], 3)
    del fields["proximal"]
    a = algorithm(name="grpo", minibatches=1, correction="decoupled")
    _, grad, measured = loss_and_grad(current, fields, sequence, a)
    mask = fields["loss_mask"].numpy()
    weight = torch.exp(current - fields["logprobs"]).numpy()
    np.testing.assert_allclose(grad, -1.0 * mask * fields["weights"].numpy() * fields["advantages"].numpy() * weight, rtol=1e-4, atol=1e-7)
    assert to_metrics([measured])["policy/ratio_max"].result == pytest.approx(1.0)
    with pytest.raises(AssertionError, match="proximal"):
        loss_and_grad(current, fields, sequence, algorithm(minibatches=2))


@given(log_weight=st.floats(-4, 4), rule=st.sampled_from(["decoupled", "tis", "mis"]))
@settings(deadline=None)
def test_correction_weights_stay_in_their_bounds(log_weight: float, rule: str) -> None:
    a = algorithm(correction=rule)
    fields = {
        "loss_mask": torch.tensor([True]),
        "logprobs": torch.tensor([-1.0 - log_weight]),
        "proximal": torch.tensor([-1.0]),
        "advantages": torch.tensor([1.0]),
        "weights": torch.tensor([1.0]),
    }
    loss, _, measured = loss_and_grad(torch.tensor([-1.0]), fields, torch.tensor([0]), a)
    weight, metrics = -loss, to_metrics([measured])
    assert metrics["correction/weight_mean"].result == pytest.approx(weight)
    if rule == "decoupled":
        assert weight == pytest.approx(math.exp(log_weight), rel=1e-5)
    elif rule == "tis":
        assert weight == pytest.approx(min(math.exp(log_weight), 2.0), rel=1e-5)
    else:
        assert weight == 0 or 0.5 * 0.999 <= weight <= 5.0 * 1.001
        assert metrics["correction/masked_fraction"].result == (1.0 if weight == 0 else 0.0)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_garbage_outside_the_mask_and_zero_advantage_reach_nothing(name: str) -> None:
    a = algorithm(name=name, correction="decoupled")
    current, fields, sequence = make_batch([4, 5], 7)
    clean_loss, clean_grad, _ = loss_and_grad(current, fields, sequence, a)
    off = ~fields["loss_mask"]
    dirty = {k: v.clone() for k, v in fields.items()}
    for key in ("logprobs", "proximal", "advantages", "weights"):
        dirty[key][off] = float("nan")
    loss, grad, measured = loss_and_grad(current, dirty, sequence, a)
    assert loss == clean_loss
    np.testing.assert_array_equal(grad, clean_grad)
    assert all(math.isfinite(m.result) for m in to_metrics([measured]).values())
    fields["advantages"] = torch.zeros_like(fields["advantages"])
    fields["proximal"] = fields["proximal"] - 500.0
    fields["logprobs"] = fields["logprobs"] - 1000.0
    loss, grad, _ = loss_and_grad(current, fields, sequence, a)
    assert loss == 0 and (grad == 0).all()


def test_a_micro_batch_without_trained_tokens_measures_nothing() -> None:
    current, fields, sequence = make_batch([4, 5], 7)
    fields["loss_mask"] = torch.zeros_like(fields["loss_mask"])
    loss, grad, measured = loss_and_grad(current, fields, sequence, algorithm(correction="tis"))
    assert loss == 0 and (grad == 0).all()
    assert to_metrics([measured]) == {}


def test_mismatch_of_fresh_tokens_is_told_apart_from_staleness() -> None:
    current, fields, sequence = make_batch([6, 6], 5)
    fields["staleness"] = torch.tensor([0, 1] * 6)
    fresh = fields["staleness"] == 0
    fields["logprobs"] = torch.where(fresh, fields["proximal"] + 0.01, fields["proximal"] + 2.0)
    metrics = to_metrics([loss_and_grad(current, fields, sequence, algorithm())[2]])
    assert metrics["mismatch/fresh_abs_mean"].result == pytest.approx(0.01, rel=1e-3)
    assert metrics["mismatch/fresh_abs_max"].result == pytest.approx(0.01, rel=1e-3)
    assert metrics["mismatch/abs_max"].result == pytest.approx(2.0, rel=1e-3)
    fields["staleness"] = torch.ones_like(fields["staleness"])
    assert "mismatch/fresh_abs_mean" not in to_metrics([loss_and_grad(current, fields, sequence, algorithm())[2]])


def test_a_reference_with_coefficient_zero_is_measured_and_pushes_nothing() -> None:
    current, fields, sequence = make_batch([6, 6], 5)
    with_reference = loss_and_grad(current, fields, sequence, algorithm(has_reference=True))
    del fields["reference"]
    without = loss_and_grad(current, fields, sequence, algorithm())
    np.testing.assert_array_equal(with_reference[1], without[1])
    assert "kl/reference" in with_reference[2] and "kl/reference" not in without[2]
    with pytest.raises(AssertionError, match="reference"):
        loss_and_grad(current, fields, sequence, algorithm(has_reference=True))


@given(policy=st.floats(-8, 0), reference=st.floats(-8, 0))
@settings(deadline=None)
def test_kl_estimators_are_their_formulas(policy: float, reference: float) -> None:
    p, r = torch.tensor([policy], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    d = reference - policy
    assert kl_estimate("k1", p, r).item() == pytest.approx(-d)
    assert kl_estimate("k2", p, r).item() == pytest.approx(d * d / 2)
    assert kl_estimate("k3", p, r).item() == pytest.approx(math.exp(d) - 1 - d, abs=1e-9)
    assert kl_estimate("k3", p, r).item() >= -1e-15


def test_unbiased_estimators_agree_with_the_exact_kl() -> None:
    p, r = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    exact = (p * (p / r).log()).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimate(estimator, p.log(), r.log())).sum(), exact)


def test_supervised_loss_is_the_weighted_negative_log_likelihood() -> None:
    current, fields, sequence = make_batch([5, 6], 9)
    leaf = current.clone().requires_grad_(True)
    loss, measured = sft_loss(leaf, fields, sequence, 2)
    loss.backward()
    mask, weights = fields["loss_mask"], fields["weights"]
    torch.testing.assert_close(loss.double(), -(current * weights)[mask].sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad, torch.where(mask, -weights, 0.0), rtol=1e-5, atol=1e-7)
    metrics = to_metrics([measured, measured])
    assert metrics["sft/nll"].result == pytest.approx(-current[mask].mean().item(), rel=1e-5)
    assert metrics["sft/tokens"].result == 2 * int(mask.sum())


def test_reductions_over_micro_batches_are_typed() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    metrics = to_metrics([{"a": ("mean", two, one), "b": ("max", one, one)}, {"a": ("mean", two, two + 1), "b": ("max", two, one)}])
    assert metrics["a"].result == pytest.approx(1.0) and metrics["b"].result == 2.0
    assert dataclasses.is_dataclass(metrics["a"])
