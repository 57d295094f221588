"""The next turn of a conversation is computed from where it is new; nothing is shared across weights; memory is bounded."""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engines import Driven, Judge, sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from areal_mega.serving import prefix
from areal_mega.serving.kv import Stored
from areal_mega.serving.prefix import PrefixStore


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("prefixes"), request.param)


def test_a_further_turn_computes_only_what_is_new(folder: Path) -> None:
    driven, judge, rng = Driven(folder, prefixes=2000), Judge(folder), np.random.default_rng(0)
    context = rng.integers(3, 300, 40)
    known = 0
    for turn in range(4):
        s = sequence(f"turn-{turn}", context, max_new_tokens=12, temperature=0.0)
        before = driven.engine.counters.steps
        driven.submit(s)
        driven.run()
        judge.check(s)
        assert s.cached_tokens == known and driven.engine.counters.steps - before == 12
        known = len(context) + 11  # the newest token has not been through the model
        context = np.concatenate([context, s.output_ids, rng.integers(3, 300, 9)])
    assert driven.engine.prefixes.tokens == known, "a turn replaces what it goes on from"


def test_two_branches_share_their_trunk(folder: Path) -> None:
    driven, judge, rng = Driven(folder, prefixes=2000, chunk=16), Judge(folder), np.random.default_rng(1)
    trunk = rng.integers(3, 300, 50)
    first = sequence("first", trunk, max_new_tokens=4)
    driven.submit(first)
    driven.run()
    branches = [sequence(f"b{i}", np.concatenate([trunk, rng.integers(3, 300, 20 + i)]), max_new_tokens=8, seed=i) for i in range(3)]
    driven.submit(*branches)
    driven.run()
    for branch in branches:
        assert branch.cached_tokens >= 50
        judge.check(branch)


def test_new_weights_share_nothing_with_old_ones(folder: Path) -> None:
    driven = Driven(folder, prefixes=2000)
    prompt = np.arange(10, 60)
    driven.submit(sequence("old", prompt, max_new_tokens=4))
    driven.run()
    assert driven.engine.prefixes.tokens == 53
    driven.submit(late := sequence("late", prompt[:40], max_new_tokens=40))
    driven.step(3)
    with torch.inference_mode():
        for view in driven.engine.model.weights.hf.values():
            view.mul_(1.1)
    driven.engine.model.weights.refresh()
    driven.engine.weights_changed("1")
    assert late.cached_tokens == 39 and driven.engine.prefixes.tokens == 0
    driven.run()
    assert driven.engine.prefixes.tokens == 0, "keys of two versions are not kept"
    new, fresh = (sequence(name, prompt, max_new_tokens=4, temperature=0.0) for name in ("new", "fresh"))
    driven.submit(new)
    driven.run()
    driven.engine.flush_cache()
    driven.submit(fresh)
    driven.run()
    assert new.cached_tokens == fresh.cached_tokens == 0
    np.testing.assert_allclose(new.output_logprobs, fresh.output_logprobs, atol=1e-6)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(st.integers(0, 1), max_size=70), max_size=30), st.integers(0, 200))
def test_the_store_finds_the_longest_of_what_it_holds_and_stays_within_its_bound(sequences: list[list[int]], bound: int) -> None:
    store = PrefixStore(bound)
    for tokens in sequences:
        array = np.repeat(np.array(tokens, dtype=np.int64), 3)
        store.add(array, lambda: Stored([], None))
        entries = [e.tokens for e in store._entries.values()]
        assert store.tokens == sum(map(len, entries)) <= bound
        entry, shared = store.find(array)
        best = max((common(array, e) for e in entries), default=0)
        assert shared // 16 == best // 16 or (entry is None and best < 16)
        assert entry is None or common(array, entry.tokens) == shared
        if 16 <= len(array) <= bound:
            assert shared == len(array)


def test_every_block_is_hashed_once_however_much_is_kept_or_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    class Counting:
        def __init__(self, **how: int) -> None:
            self._hash = hashlib.blake2b(**how)

        def update(self, content: bytes) -> None:
            hashed.append(len(content))
            self._hash.update(content)

        def digest(self) -> bytes:
            return self._hash.digest()

    monkeypatch.setattr(prefix, "hashlib", SimpleNamespace(blake2b=Counting))
    store, trunk, rng = PrefixStore(2000), np.arange(32), np.random.default_rng(5)
    for _ in range(60):  # each is 6 blocks, all with the trunk of two; 20 of them fit
        store.add(np.concatenate([trunk, rng.integers(100, 10**6, 64)]), lambda: Stored([], None))
    assert len(store) == 20
    assert len(hashed) == 60 * 6
    assert len(store._index) == 2 + 20 * 4, "what went is no longer found"


def test_sequences_that_wait_or_follow_keep_no_memory_that_the_store_has_given_up(folder: Path) -> None:
    driven, context = Driven(folder, prefixes=60), np.arange(10, 60)
    driven.submit(sequence("first", context, max_new_tokens=4))
    driven.run()
    entry, _ = driven.engine.prefixes.find(context)
    assert entry is not None
    memory = weakref.ref(entry.kept.arrays[0])
    del entry
    longer = np.concatenate([context, [7, 8, 9]])
    alike = [sequence(f"alike-{i}", longer, max_new_tokens=60, seed=i) for i in range(3)]
    late = [sequence(f"late-{i}", np.concatenate([longer, [i]]), max_new_tokens=4) for i in range(2)]
    driven.engine.rows.max_rows = 3
    driven.submit(*alike, *late)
    driven.step(2)
    driven.engine._runner._candidate(late[0])  # as where the queue is looked at further than anything fits
    assert len(driven.engine.rows) == 3 and late[0].stored[2] == 50 and memory() is not None
    driven.engine.weights_changed("1")
    assert memory() is None
    driven.run()
    assert all(s.cached_tokens == 50 for s in alike[:1]) and all(s.finish is not None for s in [*alike, *late])


def common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
