"""The engine against transformers, and against itself under every disturbance: batching, sharing, chunks, retraction, pauses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engines import Driven, Judge, forms, multiplies, sequence
from tiny_models import FAMILIES, SPARSE, tiny_model

from areal_mega.serving.sequence import Sequence, Wanted

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {family: (family, {}) for family in (*FAMILIES, *SPARSE)} | {
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-3.1-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 16384,
        },
    ),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "qwen3-one-head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3_moe-mixed": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False, "num_experts_per_tok": 3}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("engine"), "qwen3_moe")


def workload(count: int = 8, *, members: int = 3, longest: int = 60, new: int = 24) -> list[Sequence]:
    """Groups of ragged prompts, the first member greedy."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        prompt = rng.integers(3, 300, size=rng.integers(1, longest))
        for j in range(members):
            most = int(rng.integers(1, new))
            out.append(sequence(f"{i}-{j}", prompt, seed=100 * i + j, max_new_tokens=most, temperature=0.7 if j else 0.0))
    return out


def outputs(sequences: list[Sequence]) -> dict[str, list[int]]:
    return {s.rid: s.output_ids.tolist() for s in sequences}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_and_logprobs_are_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = tiny_model(tmp_path, family, **overrides)
    judge = Judge(folder)
    for kernels in forms():
        driven, sequences = Driven(folder, kernels=kernels), workload()
        driven.submit(*sequences)
        driven.run()
        for s in sequences:
            assert s.finish == {"type": "length", "length": s.params.max_new_tokens}
            judge.check(s)


@pytest.mark.parametrize(
    "limits",
    [{"chunk": 7}, {"chunk": 1}, {"max_rows": 1}, {"max_rows": 3, "chunk": 16}, {"max_rows": 8, "max_tokens": 512}],
    ids=["chunked", "token by token", "one row", "few rows", "cache too small: retractions"],
)
def test_limits_do_not_change_a_sample(folder: Path, limits: dict[str, int]) -> None:
    for how in [{"kernels": form} for form in forms()] + ([{"dtype": "bf16"}] if multiplies() else []):
        plain, tight = workload(), workload()
        wide = Driven(folder, **how)
        wide.submit(*plain)
        wide.run()
        driven = Driven(folder, **how, **limits)
        driven.submit(*tight)
        driven.run()
        assert outputs(tight) == outputs(plain), how
        if "max_tokens" in limits:
            assert driven.engine.counters.retractions > 0
            assert driven.engine.rows.kv.rows * driven.engine.rows.kv.length <= limits["max_tokens"]


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(folder: Path) -> None:
    together, alone = workload(), workload()
    driven = Driven(folder)
    driven.submit(*together)
    driven.run()
    for s in alone:
        one = Driven(folder)
        one.submit(s)
        one.run()
    assert outputs(alone) == outputs(together)
    drawn = [s.output_ids.tolist() for s in together if s.params.temperature and len(s.output_ids) > 6]
    assert len({tuple(ids[:6]) for ids in drawn}) == len(drawn)


def test_members_of_a_group_share_one_prefill(folder: Path) -> None:
    prompt = np.arange(10, 50)
    members = [sequence(f"m{i}", prompt, seed=i, max_new_tokens=4) for i in range(8)]
    late = sequence("late", prompt, seed=8, max_new_tokens=4)
    driven = Driven(folder)
    driven.submit(*members)
    driven.step(2)
    driven.submit(late)
    driven.run()
    assert [m.cached_tokens for m in members] == [0] + [39] * 7 and late.cached_tokens == 39
    judge = Judge(folder)
    for s in [*members, late]:
        judge.check(s)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing(folder: Path, mode: str) -> None:
    plain, paused = workload(), workload()
    for sequences in (plain, paused):
        driven = Driven(folder, chunk=32)
        driven.submit(*sequences)
        if sequences is paused:
            for _ in range(4):
                driven.step(3)
                driven.engine.pause(mode)  # type: ignore[arg-type]
                assert not driven.engine._runnable()
                assert driven.engine.flush_cache() == (mode == "retract")
                driven.engine.resume()
        driven.run()
    assert outputs(paused) == outputs(plain)
    assert (max(s.retractions for s in paused) > 0) == (mode == "retract")


def test_abort_keeps_what_there_is(folder: Path) -> None:
    sequences = workload(4)
    driven = Driven(folder, max_rows=6)
    driven.submit(*sequences)
    driven.step(5)
    made = {s.rid: int(driven.engine.rows.made[s.row]) for s in driven.engine.rows.sequences}
    running = set(made)
    assert driven.engine.abort(lambda s: s.rid in running or s.rid == sequences[-1].rid) == len(running) + 1
    for s in sequences:
        if s.rid in running:
            assert s.finish is not None and s.finish["type"] == "abort" and len(s.output_ids) == made[s.rid]
    driven.run()
    assert all(s.finish is not None for s in sequences)
    assert sequences[-1].finish is not None and sequences[-1].finish["type"] == "abort" and not len(sequences[-1].output_ids)


def test_versions_stamp_the_tokens(folder: Path) -> None:
    sequences = workload(4, new=30)
    driven = Driven(folder)
    driven.submit(*sequences)
    driven.step(6)
    driven.engine.weights_changed("1")
    driven.engine.weights_changed("2")  # no token was made by 1
    driven.step(3)
    driven.engine.pause("retract")
    driven.engine.weights_changed("3")
    driven.engine.resume()
    driven.run()
    for s in sequences:
        spans, made = s.version_spans(), len(s.output_ids)
        assert [span["version"] for span in spans] == ["0", "2", "3"][: len(spans)]
        assert [span["start"] for span in spans] == [0, 6, 9][: len(spans)]
        assert spans[-1]["end"] == made and len(spans) == (1 if made <= 6 else 2 if made <= 9 else 3)


def test_new_requests_do_not_read_keys_of_old_weights(folder: Path) -> None:
    prompt = np.arange(10, 40)
    old, new = (sequence(n, prompt, max_new_tokens=20, temperature=0.0) for n in ("old", "new"))
    driven = Driven(folder)
    driven.submit(old)
    driven.step(2)
    weights = driven.engine.model.weights
    with torch.inference_mode():
        for name, view in weights.hf.items():
            if name.endswith("k_proj.weight"):
                view.mul_(1.5)
    weights.refresh()
    driven.engine.weights_changed("1")
    driven.submit(new)
    driven.run()
    fresh = sequence("fresh", prompt, max_new_tokens=20, temperature=0.0)
    driven.submit(fresh)
    driven.run()
    assert new.cached_tokens == 0
    np.testing.assert_allclose(new.output_logprobs, fresh.output_logprobs, atol=1e-5)


def test_stop_tokens_end_a_sample_and_stay_in_it(folder: Path) -> None:
    free = sequence("free", [5, 6, 7], max_new_tokens=40, seed=4)
    driven = Driven(folder)
    driven.submit(free)
    driven.run()
    ids = free.output_ids.tolist()
    stop = ids[17]
    first = ids.index(stop)
    cases = {
        "eos": ((stop,), {}, first + 1),
        "own": ((), {"stop_token_ids": (299, stop)}, first + 1),
        "ignored": ((stop,), {"ignore_eos": True}, 40),
    }
    for name, (eos, params, length) in cases.items():
        driven = Driven(folder, eos=eos)
        s = sequence(name, [5, 6, 7], max_new_tokens=40, seed=4, **params)
        driven.submit(s)
        driven.run()
        assert s.output_ids.tolist() == ids[:length]
        assert s.finish == ({"type": "length", "length": 40} if length == 40 else {"type": "stop", "matched": stop})


def test_a_minimum_of_tokens_forbids_to_stop_before(folder: Path) -> None:
    stops = tuple(range(0, 320, 2))
    for seed in range(6):
        driven = Driven(folder, eos=stops)
        s = sequence("s", [5, 6, 7], max_new_tokens=40, min_new_tokens=12, seed=seed)
        driven.submit(s)
        driven.run()
        assert len(s.output_ids) >= 12 and all(t not in stops for t in s.output_ids[:11])


def test_stop_strings_end_a_sample(folder: Path) -> None:
    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    free = sequence("free", [5, 6, 7], max_new_tokens=60, seed=4)
    driven = Driven(folder)
    driven.submit(free)
    driven.run()
    text = decode(free.output_ids.tolist())
    stop = text[20:23]
    driven = Driven(folder, decode=decode)
    s = sequence("s", [5, 6, 7], max_new_tokens=60, seed=4, stop=("!!", stop))
    driven.submit(s)
    driven.run()
    assert s.finish == {"type": "stop", "matched": stop} and s.trim == stop
    assert len(s.output_ids) == text.index(stop) + 3


def test_prompt_logprobs_and_scoring_only(folder: Path) -> None:
    judge = Judge(folder)
    prompt = np.random.default_rng(1).integers(3, 300, 37)
    expected = torch.log_softmax(judge.logits(prompt), -1)[:-1].gather(1, torch.from_numpy(prompt[1:])[:, None]).squeeze(1)
    for chunk in (2048, 10):
        for start in (0, 12, 36):
            driven = Driven(folder, chunk=chunk)
            busy = sequence("busy", prompt, max_new_tokens=30)
            s = sequence("s", prompt, max_new_tokens=0, wanted=Wanted(logprobs=True, logprob_start=start))
            driven.submit(busy)
            driven.step(3)
            driven.submit(s)
            driven.run()
            assert s.prompt_logprobs[0] is None and len(s.prompt_logprobs) == 37 - start and not len(s.output_ids)
            torch.testing.assert_close(torch.tensor(s.prompt_logprobs[1:], dtype=torch.float32), expected[start:], atol=1e-4, rtol=0)
            judge.check(busy)


def test_routed_experts_are_those_of_the_router(folder: Path) -> None:
    judge = Judge(folder)
    for chunk, shared in ((2048, True), (5, False)):
        driven = Driven(folder, routed_experts=True, chunk=chunk)
        group = [
            sequence(f"s{i}", np.arange(10, 23), max_new_tokens=6, seed=i, wanted=Wanted(routed_experts=True)) for i in range(2 + shared)
        ]
        driven.submit(*group)
        driven.run()
        for s in group:
            ids = torch.from_numpy(np.concatenate([s.prompt, s.output_ids]))[None]
            with torch.no_grad():
                routers = judge.model(ids, output_router_logits=True).router_logits
            expected = torch.stack([r.view(ids.shape[1], -1).topk(2, -1).indices for r in routers], 1)[:-1]
            assert s.routed is not None and s.routed.tolist() == expected.tolist()


def test_bf16_is_close_to_fp32(folder: Path) -> None:
    driven, judge = Driven(folder, dtype="bf16"), Judge(folder)
    sequences = [s for s in workload() if s.params.temperature]
    driven.submit(*sequences)
    driven.run()
    for s in sequences:
        ids, n = np.concatenate([s.prompt, s.output_ids]), len(s.prompt)
        logits = judge.logits(ids)[n - 1 : -1] / s.params.temperature
        expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(s.output_ids)[:, None]).squeeze(1)
        assert (torch.from_numpy(s.output_logprobs) - expected).abs().mean() < 0.05


def test_the_cache_is_dropped_when_idle_only(folder: Path) -> None:
    driven = Driven(folder)
    driven.submit(*workload(2))
    driven.step(2)
    assert not driven.engine.flush_cache() and driven.engine.rows.kv.nbytes > 0
    driven.run()
    assert driven.engine.flush_cache() and driven.engine.rows.kv.nbytes == 0
