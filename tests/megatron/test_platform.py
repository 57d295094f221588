"""The platform: what is redirected on a CPU is put back; a missing GPU is a user's error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

from areal_mega.core.errors import UserError
from areal_mega.megatron.platform import detect


def redirect_and_restore(rank: int, world_size: int) -> dict[str, Any]:
    import sys

    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.tensor_parallel.random as tracker
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def snapshot() -> list[Any]:
        watched = [torch.cuda, torch.cuda.random, torch.Tensor, torch.nn.Module, tracker, dispatcher, clip_grads]
        return [dict(vars(owner)) for owner in watched] + [{n: getattr(m, "torch", None) for n, m in sys.modules.items()}]

    platform = detect("cpu")
    with platform.activate():  # imports what it redirects
        pass
    before = snapshot()
    with platform.activate(), platform.activate():
        inside = {
            "device": str(torch.cuda.current_device()),
            "zeros": str(clip_grads.torch.zeros(2, device="cuda").device),
            "type": torch.zeros(1).type(),
            "cast": str(torch.zeros(1).type(torch.bfloat16).dtype),
            "stream": torch.cuda.current_stream() == torch.cuda.Stream(),
            "outside_megatron": torch is not clip_grads.torch,
        }
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(2)
        torch.cuda.set_rng_state(state)
        inside["same_random"] = bool(torch.equal(first, torch.rand(2)))
    after = snapshot()
    same = all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(before, after, strict=True))
    return {"inside": inside, "restored": same, "type": torch.zeros(1).type()}


def test_redirections_are_put_back() -> None:
    (result,) = run_ranks(1, redirect_and_restore, distributed=False)
    assert result["inside"] == {
        "device": "cpu",
        "zeros": "cpu",
        "type": "torch.cuda.FloatTensor",
        "cast": "torch.bfloat16",
        "stream": True,
        "outside_megatron": True,
        "same_random": True,
    }
    assert result["restored"]
    assert result["type"] == "torch.FloatTensor"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"launch\.device is cuda, but torch sees no GPU here; set launch\.device"):
        detect("cuda")
    platform = detect("auto")
    assert platform.is_cpu and platform.backend == "gloo"


def test_imports_on_a_cpu_compile_nothing() -> None:
    compile_ = torch.compile
    with detect("cpu").importing():
        assert torch.compile(len) is len
        assert torch.compile(dynamic=True)(len) is len  # type: ignore[call-overload]
    assert torch.compile is compile_
