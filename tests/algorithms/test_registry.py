"""Named algorithms resolve completely, and contradictions are refused with a remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_mega.algorithms.registry import DEFAULT_CLIP, PRESETS, Algorithm, describe, resolve_algorithm
from areal_mega.config.schema import AlgorithmSection
from areal_mega.core.errors import UserError


def resolve(
    *,
    max_staleness: int = 0,
    minibatches: int = 1,
    has_reference: bool = False,
    group_size: int | None = None,
    sync_every: int = 1,
    **section,
) -> Algorithm:
    return resolve_algorithm(
        AlgorithmSection(**section),
        max_staleness=max_staleness,
        minibatches=minibatches,
        has_reference=has_reference,
        group_size=group_size,
        sync_every=sync_every,
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_name_resolves_by_itself_when_synchronous(name: str) -> None:
    algorithm = resolve(name=name)
    assert algorithm.name == name
    assert algorithm.correction == "none"
    assert not algorithm.needs_proximal and not algorithm.needs_reference
    assert describe(algorithm)["advantage"] == algorithm.advantage


def test_dapo_is_clip_higher_with_dynamic_sampling_and_may_be_overridden() -> None:
    dapo = resolve(name="dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token_mean")
    assert dapo.filter_uniform_groups and dapo.mask_truncated
    assert not resolve(name="dapo", filter_uniform_groups=False).filter_uniform_groups


def test_overriding_the_ratio_brings_its_own_clip_range() -> None:
    algorithm = resolve(name="dapo", ratio="gspo")
    assert (algorithm.clip_low, algorithm.clip_high) == DEFAULT_CLIP["gspo"]
    assert resolve(name="dapo", ratio="gspo", clip_high=1e-3).clip_high == 1e-3


@pytest.mark.parametrize("correction", ["none", "decoupled", "tis", "mis"])
def test_asynchronous_training_takes_any_explicit_correction(correction: str) -> None:
    assert resolve(max_staleness=2, correction=correction).correction == correction


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_asynchronous_training_without_a_choice_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"algorithm.correction is not chosen and staleness.max_staleness is 1.*decoupled, tis or mis"):
        resolve(name=name, max_staleness=1)


def test_rare_syncs_without_a_choice_are_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm.correction is not chosen and sync.every_steps is 2.*or sync.every_steps to 1"):
        resolve(sync_every=2)
    assert resolve(sync_every=2, correction="tis").correction == "tis"


def test_a_pass_for_proximal_logprobs_only_where_one_is_needed() -> None:
    assert not resolve(correction="decoupled", max_staleness=1).needs_proximal
    assert resolve(minibatches=2).needs_proximal
    assert resolve(kl={"coef": 0.1, "where": "reward"}, has_reference=True).needs_proximal
    assert not resolve(kl={"coef": 0.1}, has_reference=True).needs_proximal


def test_a_reference_without_a_coefficient_is_measured_only() -> None:
    assert resolve(has_reference=True).needs_reference


REFUSED = [
    ({"name": "cipso"}, r"algorithm.name: 'cipso' is not known; did you mean cispo\?"),
    ({"advantage": "group_nrom"}, r"algorithm.advantage: .* did you mean group_norm\?"),
    ({"ratio": "trpo"}, r"algorithm.ratio: 'trpo' is not known;"),
    ({"correction": "icepop"}, r"algorithm.correction: 'icepop' .* one of none, decoupled, tis, mis"),
    ({"aggregation": "mean"}, r"algorithm.aggregation: 'mean' is not known"),
    ({"clip_low": 1.0}, r"algorithm.clip_low is 1: .* 1 - 1 = 0"),
    ({"name": "cispo", "clip_low": 1.5}, r"algorithm.clip_low is 1.5"),
    ({"dual_clip": 1.1}, r"algorithm.dual_clip is 1.1 and must be above 1 \+ clip_high = 1.2"),
    ({"name": "gspo", "dual_clip": 3.0}, r"algorithm.dual_clip belongs to the ratio ppo"),
    ({"correction_cap": 2.0}, r"correction none has no cap"),
    ({"correction": "decoupled", "correction_cap": 2.0}, r"tis is the decoupled weight with a cap"),
    ({"correction": "tis", "correction_floor": 0.5}, r"correction tis has no floor"),
    ({"correction": "tis", "correction_cap": 0.5}, r"correction_cap is 0.5: .* give 1 or more"),
    ({"correction": "mis", "correction_floor": 1.5}, r"correction_floor is 1.5: .* give 1 or less"),
    ({"kl": {"coef": 0.01}}, r"algorithm.kl.coef is 0.01 and model.reference_path is not set"),
    ({"reward_scale": 0.0}, r"algorithm.reward_scale is 0"),
    ({"group_size": 1}, r"group_norm needs a group statistic and rollout.group_size is 1"),
    ({"group_size": 1, "filter_uniform_groups": True}, r"every group would be dropped"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_contradictions_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve(**settings)
    assert "\n" not in str(caught.value)


def test_k1_in_the_loss_is_refused_and_in_the_reward_is_not() -> None:
    with pytest.raises(UserError, match="the gradient of k1 has mean zero"):
        resolve(kl={"coef": 0.1, "estimator": "k1"}, has_reference=True)
    assert resolve(kl={"coef": 0.1, "estimator": "k1", "where": "reward"}, has_reference=True).kl_estimator == "k1"


def test_a_group_of_one_is_legal_with_a_fallback() -> None:
    assert resolve(group_size=1, singleton="reward").singleton == "reward"


def test_the_registry_imports_no_torch() -> None:
    code = "import sys, areal_mega.algorithms.advantages, areal_mega.algorithms.aggregation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
