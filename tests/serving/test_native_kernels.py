"""The built kernels against PyTorch, and what happens where they cannot be built."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import Driven, Judge, forms, multiplies, sequence
from tiny_models import tiny_model

from areal_mega.core.errors import UserError
from areal_mega.serving import native
from areal_mega.serving.blocks import Sparse
from areal_mega.serving.linear import Linear
from areal_mega.serving.loader import load_weights
from areal_mega.serving.ops import Kernels, Ops, make_ops

DTYPES = [torch.float32, torch.bfloat16]


def kernels(dtype: torch.dtype) -> Kernels:
    if "native" not in forms():
        pytest.skip("no C++ compiler here")
    ops = make_ops(native.load(), dtype)
    assert isinstance(ops, Kernels)
    return ops


def multiplying() -> Kernels:
    if not multiplies():
        pytest.skip("this CPU has no products of bf16")
    return kernels(torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Rounded once to the dtype: half a unit in the last place, and what sums in fp32 differ by."""
    rtol = 2.0**-8 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), exact.float(), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 400])
def test_norms_and_activations_are_pytorchs(dtype: torch.dtype, rows: int) -> None:
    ops = kernels(dtype)
    x, delta, weight, both = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, 97), (rows, 97), (97,), (rows, 194)]))
    total, before = (x + delta), x.clone()
    close(ops.add_norm(x, None, weight, 1e-5), F.rms_norm(before.float(), (97,), weight.float(), 1e-5))
    close(ops.add_norm(x, delta, weight, 1e-5), F.rms_norm(total.float(), (97,), weight.float(), 1e-5))
    assert torch.equal(x, total)
    gate, up = both.float().chunk(2, -1)
    close(ops.silu_mul(both), F.silu(gate) * up)


def test_activations_keep_what_is_large_and_what_is_not_a_number() -> None:
    ops, gate = kernels(torch.float32), torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, float("nan"), float("inf")])
    got = ops.silu_mul(torch.cat([gate, torch.ones(8)])[None])[0]
    torch.testing.assert_close(got, F.silu(gate), equal_nan=True, atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "dim"), [(9, 3, 64), (4, 4, 128), (24, 2, 16), (3, 1, 40)])
def test_tokens_at_any_positions_attend_as_pytorch_does(dtype: torch.dtype, heads: int, kv: int, dim: int) -> None:
    ops = kernels(dtype)
    # Five rows that decode, one of them at a block's end; then 40 tokens of a row from its begin, and 50 from the middle of another.
    rows = [0, 3, 1, 4, 2] + [5] * 40 + [6] * 50
    positions = [0, 63, 64, 199, 6, *range(40), *range(100, 150)]
    q, keys, values = (
        random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(95, heads, dim), (7, kv, 200, dim), (7, kv, 200, dim)])
    )
    got = ops.attend(q, keys, values, torch.tensor(rows), torch.tensor(positions), dim**-0.5)
    for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
        k, v = keys[row : row + 1, :, : position + 1].float(), values[row : row + 1, :, : position + 1].float()
        exact = F.scaled_dot_product_attention(q[t][None, :, None].float(), k, v, enable_gqa=True)
        close(got[t], exact.flatten())


@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (50, 34), (7, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_bf16_are_exact_but_for_one_rounding_and_alike_in_any_batch(outputs: int, inputs: int, bias: bool) -> None:
    ops, weight = multiplying(), random(outputs, inputs, dtype=torch.bfloat16)
    added = random(outputs, dtype=torch.bfloat16, seed=2) if bias else None
    linear = Linear(weight, added, ops)
    for seed in (0, 1):  # the second time into the same place
        weight.copy_(random(outputs, inputs, seed=seed))
        linear.changed()
        x = random(100, inputs, dtype=torch.bfloat16, seed=3)
        whole = linear(x)
        exact = F.linear(x.float(), weight.float(), None if added is None else added.float())
        torch.testing.assert_close(whole.float(), exact, rtol=2.0**-8, atol=1e-3)
        for rows in (1, 2, 7, 8, 9, 65):
            assert torch.equal(linear(x[:rows]), whole[:rows])


def test_a_row_of_inputs_of_odd_length_is_multiplied_elsewhere() -> None:
    ops, weight, x = multiplying(), random(5, 33, dtype=torch.bfloat16), random(4, 33, dtype=torch.bfloat16, seed=1)
    linear = Linear(weight, None, ops)
    assert not linear.by_kernels
    torch.testing.assert_close(linear(x), F.linear(x, weight), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_experts_of_bf16_are_those_of_single_products(tmp_path: Path, tokens: int) -> None:
    multiplying()
    folder = tiny_model(tmp_path, "qwen3_moe", num_experts=6, num_experts_per_tok=3, norm_topk_prob=False)
    weights, _ = load_weights(str(folder), "bf16", "native")
    layer = Sparse(weights, 0)
    weights.refresh()
    h = random(tokens, weights.arch.hidden, dtype=torch.bfloat16)
    weight, chosen = layer.route(h)
    got, one_by_one = layer._routed(h, weight, chosen), layer._routed_by_torch(h, weight, chosen)
    torch.testing.assert_close(got, one_by_one, rtol=0.03, atol=0.03 * float(one_by_one.abs().max()))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_bf16_is_as_near_to_fp32_with_kernels_as_without(tmp_path: Path, family: str) -> None:
    """Log-probabilities of the same tokens; the kernels round less often."""
    folder, prompts = tiny_model(tmp_path, family), [np.arange(3 + i, 20 + 5 * i) for i in range(6)]
    judge, errors = Judge(folder), {}
    for form in forms():
        driven = Driven(folder, dtype="bf16", kernels=form)
        made = [sequence(str(i), p, seed=i, max_new_tokens=24) for i, p in enumerate(prompts)]
        driven.submit(*made)
        driven.run()
        difference = []
        for s in made:
            logits = judge.logits(np.concatenate([s.prompt, s.output_ids]))[len(s.prompt) - 1 : -1]
            exact = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(s.output_ids)[:, None]).squeeze(1).numpy()
            difference.append(np.abs(exact - s.output_logprobs))
        errors[form] = float(np.median(np.concatenate(difference)))  # of a mean one token with other experts would make half
    assert max(errors.values()) < 0.02, errors
    assert errors[forms()[-1]] < 1.5 * errors["torch"], errors


def test_an_update_reaches_what_is_packed(tmp_path: Path) -> None:
    old, new = (tiny_model(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in (0, 1))

    def run(driven: Driven) -> list[int]:
        s = sequence("s", np.arange(5, 30), max_new_tokens=12, temperature=0.0)
        driven.submit(s)
        driven.run()
        return s.output_ids.tolist()

    fresh, updated = Driven(new, dtype="bf16"), Driven(old, dtype="bf16")
    before = run(updated)
    weights = updated.engine.model.weights
    for name, tensor in fresh.engine.model.weights.hf.items():
        weights.load(name, tensor)
    weights.refresh()
    assert run(updated) == run(fresh) != before
    assert weights.digests() == fresh.engine.model.weights.digests()


def test_without_a_compiler_pytorch_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    native.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert type(make_ops(native.choose("auto"), torch.float32)) is Ops
        assert "no C++ compiler" in caplog.text
        with pytest.raises(UserError, match=r"--kernels native: no C.. compiler.*install g.., or use --kernels auto"):
            native.choose("native")
    finally:
        native.load.cache_clear()


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x.double(), lambda x: x.t().contiguous().t(), lambda x: x[:, :-2], lambda x: x[:-1]],
    ids=["dtype", "layout", "width", "length"],
)
def test_what_a_kernel_would_misread_does_not_reach_it(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ops, x = kernels(torch.float32), random(4, 8)
    with pytest.raises(AssertionError):
        ops.add_norm(x, wrong(random(4, 8)), torch.ones(8), 1e-6)


def test_nothing_is_read_from_a_cache_of_another_form() -> None:
    ops = kernels(torch.float32)
    keys, slots, turn = torch.zeros(2, 1, 4, 8), torch.zeros(4, dtype=torch.int64), random(4, 1, 8)
    with pytest.raises(AssertionError):
        ops.attend(random(4, 2, 8), keys, keys, slots[:3], slots, 1.0)
    with pytest.raises(AssertionError):
        ops.attend(random(4, 2, 8), keys.transpose(2, 3).contiguous().transpose(2, 3), keys, slots, slots, 1.0)
    place = {"positions": slots, "rows": slots.int(), "keys": keys, "values": keys}
    with pytest.raises(AssertionError):
        ops.place(random(4, 32), heads=2, norm=None, eps=0.0, cos=turn, sin=turn, **place)


GCC = "#!/bin/sh\n[ $1 = --version ] && echo 'Copyright (C) Free Software Foundation' && exit 0\n"
"""How one says that it is GCC."""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder before all others in which programs are found; a cache and a temporary folder that are empty."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    native.load.cache_clear()
    yield folder
    native.load.cache_clear()


def test_a_compiler_that_fails_is_quoted(tools: Path, tmp_path: Path) -> None:
    script(tools / "c++", GCC + "echo 'out of order' >&2\nexit 1\n")
    with pytest.raises(native.Unavailable, match="failed: out of order"):
        native.load()
    assert not list((tmp_path / "cache" / "areal-mega").iterdir())


def test_only_gcc_calls_the_openmp_of_pytorch(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tools / "c++", "#!/bin/sh\necho 'clang version 19.1.0'\n")
    script(tools / "g++", GCC)
    assert native._gcc()[0] == str(tools / "g++")
    script(tools / "g++", "#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(native, "_VERSION_S", 0.2)
    with pytest.raises(native.Unavailable, match=r"no C\+\+ compiler of GCC \(.*/c\+\+ is not GCC; .*g\+\+.*timed out"):
        native.load()


def test_a_function_that_is_nowhere_fails_the_build(tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    source = tmp_path / "kernels.cpp"
    source.write_text('extern "C" void __kmpc_nothing(); extern "C" void add_norm_fp32() { __kmpc_nothing(); }')
    monkeypatch.setattr(native, "SOURCES", (source,))
    native.load.cache_clear()
    with pytest.raises(native.Unavailable, match=r"failed: .*undefined reference to .__kmpc_nothing"):
        native.load()


def test_without_a_cache_the_kernels_are_kept_for_this_user_alone(tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert native._place("k.so") == tmp_path / "cache" / "areal-mega" / "k.so"
    own = tmp_path / "temporary" / f"areal-mega-{os.getuid()}"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native._place("k.so") == own / "k.so" and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(native.Unavailable, match="not a folder of this user alone"):
        native._place("k.so")
    own.chmod(0o700)

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert native._place("k.so") == own / "k.so"
