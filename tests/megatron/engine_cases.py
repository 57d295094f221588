"""What ranks do in the engine's tests. Functions here run in processes of their own (see ``ranks``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_mega.config.schema import ModelSection, OptimizerSection, RouterSection, TrainSection
from areal_mega.core.errors import UserError
from areal_mega.megatron.engine import MegatronEngine
from areal_mega.megatron.platform import detect
from areal_mega.models.gather import HFGatherer

VOCAB = 320
LENGTHS = (5, 17, 9, 30, 2, 17, 12, 21)


def make_engine(
    rank: int, folder: str, strategy: str, *, dtype: str = "fp32", train: dict | None = None, optimizer: dict | None = None, **kwargs: Any
) -> MegatronEngine:
    return MegatronEngine(
        model=ModelSection(path=folder, dtype=dtype),
        train=TrainSection(strategy=strategy, optimizer=OptimizerSection(**(optimizer or {})), **(train or {})),
        router=RouterSection(**kwargs.pop("router", {})),
        total_steps=kwargs.pop("total_steps", 4),
        seed=1,
        rank=rank,
        model_path=folder,
        platform=detect("cpu"),
        **kwargs,
    )


def make_samples(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Ragged samples with a prompt, weights that add up to one, and advantages of both signs."""
    rng = np.random.default_rng(seed)
    trained = sum(n - n // 3 - 1 for n in LENGTHS)
    out = []
    for n in LENGTHS:
        mask = np.arange(n) > n // 3
        out.append(
            {
                "input_ids": rng.integers(1, VOCAB, n),  # transformers gives the padding token 0 no gradient
                "loss_mask": mask,
                "weights": (mask / trained).astype(np.float32),
                "advantages": rng.normal(size=n).astype(np.float32),
            }
        )
    return out


def weighted_loss(logprobs_t: Tensor, fields: Any, sequence_t: Tensor, num_sequences: int) -> tuple[Tensor, dict]:
    """Linear in log-probabilities; measures the tokens it saw."""
    tokens = fields["loss_mask"].sum()
    measured = {"tokens": ("sum", tokens, tokens), "entropy": ("mean", (fields["entropy"] * fields["loss_mask"]).sum(), tokens)}
    return -(logprobs_t * fields["weights"] * (1 + fields["advantages"])).sum(), measured


def sequence_loss(logprobs_t: Tensor, fields: Any, sequence_t: Tensor, num_sequences: int) -> tuple[Tensor, dict]:
    """Not linear, and over whole sequences: wrong under context parallelism unless every rank sees them whole."""
    sums_s = logprobs_t.new_zeros(num_sequences).index_add(0, sequence_t, logprobs_t * fields["weights"])
    return (sums_s.square()).sum(), {}


LOSSES = {"weighted": weighted_loss, "sequence": sequence_loss}


def my_batches(engine: MegatronEngine, split: int | list[list[int]]) -> list:
    """This data-parallel rank's micro-batches: dealt round into ``split`` of them, or all of ``split`` on rank 0 alone."""
    samples = make_samples()
    if isinstance(split, list):
        groups = split if engine.coords.dp == 0 else []
    else:
        mine = [i for i in range(len(samples)) if i % engine.strategy.dp == engine.coords.dp]
        groups = [mine[i::split] for i in range(split)]
    return [engine.pack([samples[i] for i in group], group) for group in groups]


def hf_logits(rank: int, world_size: int, *, folder: str, loss: str = "weighted") -> dict:
    """The same model and loss in transformers: logits of each sample, and gradients by HF name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits, logprobs, total = [], [], torch.zeros(())
    for sample in make_samples():
        ids = torch.from_numpy(sample["input_ids"])[None]
        row = model(input_ids=ids).logits[0]
        logits.append(row.detach())
        picked = row[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        aligned = torch.cat([torch.zeros(1), picked])
        logprobs.append(aligned.detach())
        fields = {k: torch.from_numpy(v) for k, v in sample.items()} | {"entropy": torch.zeros(len(aligned))}
        total = total + LOSSES[loss](aligned, fields, torch.zeros(len(aligned), dtype=torch.int64), 1)[0]
    total.backward()
    return {"logits": logits, "logprobs": logprobs, "gradients": _hf_gradients(model), "loss": total.detach()}


def _hf_gradients(model: Any) -> dict[str, Tensor]:
    """By the names of files: transformers fuses experts in memory."""
    out = _unfused_gradients(model)
    if model.config.model_type != "mixtral":
        return out
    names = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for old, new in names.items():
        out = {name.replace(old, new): grad for name, grad in out.items()}
    return out


def _unfused_gradients(model: Any) -> dict[str, Tensor]:
    out = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if name.endswith("experts.gate_up_proj"):
            for e, one in enumerate(grad):
                gate, up = one.chunk(2, dim=0)
                base = name.removesuffix("gate_up_proj")
                out[f"{base}{e}.gate_proj.weight"], out[f"{base}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(grad):
                out[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = one
        else:
            out[name] = grad
    return out


def whole_logits(engine: MegatronEngine, batches: list) -> list[Tensor] | None:
    """[T, vocab] of each batch on the last stage, gathered over the vocabulary (tests alone do that)."""

    def project(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
        return output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)[0][:, 0]

    def consume(work: Any, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return output.sum(), torch.zeros((), dtype=torch.int), output

    for chunk in engine._chunks:
        chunk.eval()
    with torch.no_grad():
        results = engine._run(engine._chunks, batches, project, consume, forward_only=True)
    return [r[:, :VOCAB] for r in results] if engine.is_last_stage else None


def by_sample(values: list[Tensor] | None, batches: list) -> dict[int, Tensor]:
    out: dict[int, Tensor] = {}
    for value, batch in zip(values or [], batches, strict=False):
        for i, (index, n) in enumerate(zip(batch.sample_index, batch.lengths, strict=True)):
            start = int(batch.cu_seqlens[i])
            out[index] = value[start : start + n]
    return out


def gathered_gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    # Buffers have no gradient; the gatherer wants every tensor of the table.
    named = {name: torch.zeros_like(tensor) for name, tensor in engine.named_shards().items()} | engine.named_gradients()
    gatherer = HFGatherer(named, engine.family, engine.hf_config, engine.layout, engine.rank)
    return {item[0]: item[1].clone() for item in gatherer.stream() if item is not None and not item[0].endswith("correction_bias")}


def parity(
    rank: int,
    world_size: int,
    *,
    folder: str,
    strategy: str,
    split: int | list[list[int]] = 1,
    loss: str = "weighted",
    with_logits: bool = True,
    train: dict | None = None,
    router: dict | None = None,
) -> dict:
    """Logits and log-probabilities of my samples (on reporters) and the whole model's gradients (on rank 0)."""
    engine = make_engine(rank, folder, strategy, optimizer={"distributed": False}, train=train, router=router or {})
    batches = my_batches(engine, split)
    everywhere = [replace(batch, fields={}) for batch in batches]
    logprobs = engine.logprobs(everywhere, 1.0)
    where_trained = engine.logprobs(batches, 1.0)
    for all_t, trained_t, batch in zip(logprobs or [], where_trained or [], batches, strict=False):
        torch.testing.assert_close(trained_t, all_t.masked_fill(~batch.fields["loss_mask"], 0.0), atol=1e-5, rtol=1e-5)
    logits = whole_logits(engine, batches) if with_logits else None
    engine.compute_gradients(batches, LOSSES[loss], 1.0)
    gradients = gathered_gradients(engine)
    engine.close()
    report = engine.is_reporter
    return {
        "logprobs": by_sample(logprobs, batches) if report else {},
        "logits": by_sample(logits, batches) if report else {},
        "gradients": gradients,
    }


def training(
    rank: int,
    world_size: int,
    *,
    folder: str,
    strategy: str,
    steps: int = 3,
    split: int = 2,
    dtype: str = "fp32",
    train: dict | None = None,
    optimizer: dict | None = None,
    router: dict | None = None,
) -> dict:
    """Some updates; what they reported, and the weights afterwards by HF name (on rank 0)."""
    engine = make_engine(rank, folder, strategy, dtype=dtype, train=train, optimizer=optimizer, router=router or {})
    batches = my_batches(engine, split)
    results = [engine.train_minibatch(batches, weighted_loss, 1.0) for _ in range(steps)]
    weights = {item[0]: item[1].float().clone() for item in engine.gather_hf().stream() if item is not None}
    engine.close()
    return {
        "grad_norm": [r.grad_norm for r in results],
        "lr": [r.lr for r in results],
        "skipped": [r.skipped for r in results],
        "tokens": sum(r.metrics["tokens"].value for r in results if "tokens" in r.metrics),
        "weights": weights,
    }


def hf_training(rank: int, world_size: int, *, folder: str, steps: int, lrs: list[float], clip: float, optimizer: dict) -> dict:
    """The same updates with transformers and torch's own AdamW and clipping."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optimizer["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
        betas=(optimizer["beta1"], optimizer["beta2"]),
        eps=optimizer["eps"],
    )
    norms = []
    for lr in lrs[:steps]:
        total = torch.zeros(())
        for sample in make_samples():
            ids = torch.from_numpy(sample["input_ids"])[None]
            picked = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            weights = torch.from_numpy(sample["weights"] * (1 + sample["advantages"]))
            total = total - (picked * weights[1:]).sum()
        model.zero_grad()
        total.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
    for parameter in model.parameters():
        parameter.grad = parameter.detach()
    return {"grad_norm": norms, "weights": _hf_gradients(model)}


def nan_loss(logprobs_t: Tensor, fields: Any, sequence_t: Tensor, num_sequences: int) -> tuple[Tensor, dict]:
    return logprobs_t.sum() * float("nan"), {}


def broken_gradient(rank: int, world_size: int, *, folder: str, strategy: str) -> dict:
    engine = make_engine(rank, folder, strategy)
    batches = my_batches(engine, 1)
    before = {name: tensor.clone() for name, tensor in engine.named_shards().items()}
    result = engine.train_minibatch(batches, nan_loss, 1.0)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in engine.named_shards().items())
    after = engine.train_minibatch(batches, weighted_loss, 1.0)
    return {"skipped": result.skipped, "grad_norm": result.grad_norm, "unchanged": unchanged, "skipped_after": after.skipped}


def reference_model(rank: int, world_size: int, *, folder: str, strategy: str) -> dict:
    engine = make_engine(rank, folder, strategy, optimizer={"lr": 1e-2})
    engine.set_reference(folder)
    batches = my_batches(engine, 2)
    policy, reference = engine.logprobs(batches, 1.0), engine.logprobs(batches, 1.0, model="reference")
    engine.train_minibatch(batches, weighted_loss, 1.0)
    policy_after, reference_after = engine.logprobs(batches, 1.0), engine.logprobs(batches, 1.0, model="reference")
    if policy is None:
        return {"last": False}
    assert reference is not None and policy_after is not None and reference_after is not None
    return {
        "last": True,
        "same_before": all(torch.equal(a, b) for a, b in zip(policy, reference, strict=True)),
        "reference_same": all(torch.equal(a, b) for a, b in zip(reference, reference_after, strict=True)),
        "policy_moved": max(float((a - b).abs().max()) for a, b in zip(policy, policy_after, strict=True)),
    }


def export_and_reload(rank: int, world_size: int, *, folder: str, strategy: str, out: str) -> dict:
    engine = make_engine(rank, folder, strategy, optimizer={"lr": 1e-2})
    batches = my_batches(engine, 1)
    engine.train_minibatch(batches, weighted_loss, 1.0)
    engine.export_hf(out)
    trained = {name: tensor.clone() for name, tensor in engine.named_shards().items()}
    logprobs = engine.logprobs([replace(batch, fields={}) for batch in batches], 1.0)
    engine.load_hf(folder)
    engine.load_hf(out)
    equal = all(torch.equal(tensor, trained[name]) for name, tensor in engine.named_shards().items())
    return {"equal": equal, "logprobs": by_sample(logprobs, batches) if engine.is_reporter else {}}


def temperatures(rank: int, world_size: int, *, folder: str) -> dict:
    engine = make_engine(rank, folder, "megatron:d1")
    batches = [replace(batch, fields={}) for batch in my_batches(engine, 1)]
    logits = whole_logits(engine, batches)
    assert logits is not None
    worst = 0.0
    for temperature in (0.3, 1.0, 2.0):
        values = engine.logprobs(batches, temperature)
        assert values is not None
        ids_t, first_t = batches[0].input_ids_t, batches[0].position_ids_t == 0
        expected = (logits[0] / temperature).log_softmax(-1)[:-1].gather(1, ids_t[1:, None])[:, 0]
        expected = torch.cat([torch.zeros(1), expected]).masked_fill(first_t, 0.0)
        worst = max(worst, float((values[0] - expected).abs().max()))
    return {"worst": worst}


def construction_error(rank: int, world_size: int, *, folder: str, strategy: str) -> str:
    try:
        make_engine(rank, folder, strategy)
    except UserError as error:
        return str(error)
    raise AssertionError(f"{strategy} was accepted")


def reference_error(rank: int, world_size: int, *, folder: str, other: str) -> str:
    engine = make_engine(rank, folder, "megatron:d1")
    try:
        engine.set_reference(other)
    except UserError as error:
        return str(error)
    raise AssertionError("another architecture was accepted")


def nothing_trained(rank: int, world_size: int, *, folder: str, strategy: str) -> dict:
    """A batch whose tokens were all masked (stale, or truncated) beside the others: it costs time and nothing else."""
    engine = make_engine(rank, folder, strategy, optimizer={"distributed": False})
    batches = my_batches(engine, 1)
    masked = replace(batches[0], fields={n: torch.zeros_like(v) for n, v in batches[0].fields.items()})
    engine.compute_gradients(batches, weighted_loss, 1.0)
    alone = {name: tensor.clone() for name, tensor in engine.named_gradients().items()}
    engine.compute_gradients([masked, *batches], weighted_loss, 1.0)
    same = all(torch.equal(tensor, alone[name]) for name, tensor in engine.named_gradients().items())
    engine.compute_gradients([masked], weighted_loss, 1.0)
    zero = all(not tensor.any() for tensor in engine.named_gradients().values())
    values = engine.logprobs([masked], 1.0)
    return {"same": same, "zero": zero, "logprobs": None if values is None else bool(values[0].any())}
