"""What stays in fp32 while a bf16 model trains (docs/engine.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_cases as cases
import torch
from ranks import run_ranks
from tiny_models import tiny_model


def dtypes(rank: int, world_size: int, *, folder: str, fp32: bool) -> dict[str, Any]:
    """Of everything that takes part in one update, by name of the dtype."""
    from areal_mega.megatron.routing import routers

    engine = cases.make_engine(rank, folder, "megatron:d1", dtype="bf16", router={"fp32": fp32})
    seen: dict[str, set[str]] = {"logits": set()}
    for router in routers(engine._chunks):
        plain = router.routing

        def routing(logits: torch.Tensor, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            seen["logits"].add(str(logits.dtype))
            return plain(logits, *args, **kwargs)

        router.routing = routing  # type: ignore[method-assign]
    batches = cases.my_batches(engine, 1)
    values = engine.logprobs(batches, 1.0)
    assert values is not None
    engine.train_minibatch(batches, cases.weighted_loss, 1.0)
    shards = engine.named_shards()
    masters = {p.dtype for group in engine.optimizer.megatron.param_groups for p in group["params"]}
    found = {
        "weights": {t.dtype for name, t in shards.items() if not name.endswith("expert_bias")},
        "expert_bias": {t.dtype for name, t in shards.items() if name.endswith("expert_bias")},
        "gradients": {t.dtype for t in engine.named_gradients().values()},
        "masters": masters,
        "logprobs": {values[0].dtype},
    }
    engine.close()
    return {"logits": sorted(seen["logits"])} | {name: sorted(map(str, kinds)) for name, kinds in found.items()}


def test_fp32_islands_of_bf16(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path, "deepseek_v3"))
    (result,) = run_ranks(1, dtypes, folder=folder, fp32=True)
    bf16, fp32 = ["torch.bfloat16"], ["torch.float32"]
    assert result == {"weights": bf16, "expert_bias": fp32, "gradients": fp32, "masters": fp32, "logprobs": fp32, "logits": fp32}
    (lower,) = run_ranks(1, dtypes, folder=folder, fp32=False)
    assert lower == result | {"logits": bf16}
