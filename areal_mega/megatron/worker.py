"""What a train rank does when the controller calls: fetch its samples, pack them, run the engine, send weights.

Every method is collective over the train ranks: the controller calls all of them with the same method, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from areal_mega.algorithms.aggregation import sample_weights
from areal_mega.algorithms.kl import kl_estimate
from areal_mega.algorithms.policy import policy_loss
from areal_mega.algorithms.registry import Algorithm
from areal_mega.algorithms.supervised import sft_loss
from areal_mega.config.schema import Recipe
from areal_mega.core import points
from areal_mega.core.metrics import Metrics, merge
from areal_mega.core.types import Sample
from areal_mega.data.stream import PromptStream
from areal_mega.data.supervised import supervised_example
from areal_mega.megatron.engine import MegatronEngine, ModelName, UpdateResult
from areal_mega.megatron.packing import PackedBatch, unpack
from areal_mega.parallel.balance import Microbatches, plan_microbatches
from areal_mega.rpc.fetch import Fetcher
from areal_mega.sync import GRACE_S
from areal_mega.sync.digest import DigestKind
from areal_mega.sync.plan import bucket_bytes
from areal_mega.sync.sender import SendReport, WeightSender
from areal_mega.sync.shares import share_of

METHODS = (
    "load",
    "logprobs",
    "update",
    "release",
    "warmup",
    "sync_plan",
    "sync_host",
    "sync_join",
    "sync_changed",
    "sync_fill",
    "sync_broadcast",
    "sync_write",
    "sync_leave",
    "export",
)


class AsyncRunner(Protocol):
    """Runs a coroutine on another thread's loop and waits for it."""

    def run[T](self, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T: ...


@dataclass
class _Step:
    """The batch of one train step on this rank: per minibatch its packed micro-batches."""

    minibatches: list[list[PackedBatch]]
    trained_tokens: Mapping[int, int]


@dataclass
class _Warmup:
    stream: PromptStream
    tokenizer: Any
    done: int = field(default=0)


class TrainWorker:
    """One train rank's side of the controller's calls.

    Args:
        engine: this rank's engine.
        recipe: the run's recipe.
        algorithm: resolved from the recipe.
        runner: where fetches run (the rank's RPC loop).
        token: the run's.
    """

    def __init__(self, engine: MegatronEngine, recipe: Recipe, algorithm: Algorithm, runner: AsyncRunner, token: str) -> None:
        self._engine, self._recipe, self._algorithm = engine, recipe, algorithm
        self._runner, self._fetcher = runner, Fetcher(token)
        self._step: _Step | None = None
        self._warmup: _Warmup | None = None
        self._sender: WeightSender | None = None

    # --- one train step

    def load(
        self,
        samples: Mapping[int, Sample],
        trained_tokens: Mapping[int, int],
        minibatches: Sequence[Microbatches],
        min_version: int,
        version: int,
    ) -> dict[str, Any]:
        """Fetch this data-parallel rank's samples from the workers that hold them, and pack them as planned.

        Args:
            samples: by index.
            trained_tokens: tokens of each that enter the loss; checked against the arrays.
            minibatches: per optimizer update, the micro-batches of sample indices.
            min_version: tokens made by older weights are masked.
            version: the trainer's own.
        """
        arrays = self._fetch(samples)
        rows: dict[int, dict[str, np.ndarray]] = {}
        for i, sample in samples.items():
            row = _fields(arrays[i], sample, min_version, version, self._algorithm.mask_truncated)
            masked = int(row["loss_mask"].sum())
            assert masked == trained_tokens[i], f"sample {sample.id}: {masked} trained tokens, the controller counted {trained_tokens[i]}"
            rows[i] = row
        packed = [[self._engine.pack([rows[i] for i in micro], micro) for micro in minibatch] for minibatch in minibatches]
        self._step = _Step(packed, trained_tokens)
        points.reach("train.loaded")
        return {"nbytes": sum(array.nbytes for row in arrays.values() for array in row.values())}

    def logprobs(self) -> dict[str, Any]:
        """Proximal and reference log-probabilities, as far as the algorithm needs them, kept for the updates.

        Returns:
            ``kl``: KL to the reference summed over each sample's trained tokens, by index, where it goes into the reward (reporters only).
        """
        algorithm = self._algorithm
        if algorithm.needs_proximal:
            self._attach("proximal", "policy")
        if algorithm.needs_reference:
            self._attach("reference", "reference")
        in_reward = algorithm.kl_coef > 0 and algorithm.kl_where == "reward"
        return {"kl": self._kl_by_sample() if in_reward and self._engine.is_reporter else {}}

    def update(self, minibatch: int, advantages: Mapping[int, float], weights: Mapping[int, float], step: int) -> dict[str, Any]:
        """One optimizer update on minibatch number ``minibatch``.

        Args:
            advantages: per sample index.
            weights: loss weight of every trained token of a sample; the global denominator is in it.
            step: train step, for the learning-rate schedule.
        """
        batches = [_spread(batch, {"advantages": advantages, "weights": weights}) for batch in self._loaded.minibatches[minibatch]]
        loss_fn = partial(policy_loss, algorithm=self._algorithm)
        result = self._engine.train_minibatch(batches, loss_fn, self._recipe.rollout.temperature, step=step)
        points.reach("train.updated")
        return _answer(result)

    def release(self) -> None:
        """Forget the step's batch."""
        self._step = None

    # --- supervised warm-up

    def warmup(self, steps: int) -> dict[str, Any]:
        """The next ``steps`` supervised updates; every rank reads the data itself, in the same seeded order."""
        state = self._warmup = self._warmup or self._start_warmup()
        section, train, strategy = self._recipe.warmup, self._recipe.train, self._engine.strategy
        parts: list[Metrics] = []
        last: UpdateResult | None = None
        for _ in range(steps):
            rows = [supervised_example(state.tokenizer, prompt.row) for prompt in state.stream.next(section.batch_size)]
            weights_s = sample_weights("token_mean", [int(row["loss_mask"].sum()) for row in rows])
            plan = plan_microbatches(
                [len(row["input_ids"]) for row in rows],
                ranks=strategy.dp,
                max_tokens=train.microbatch_tokens,
                multiple_of=strategy.microbatch_multiple,
                sequence_multiple=strategy.sequence_multiple,
            )[self._engine.coords.dp]
            packed = [self._engine.pack([rows[i] for i in micro], micro) for micro in plan]
            batches = [_spread(batch, {"weights": dict(enumerate(map(float, weights_s)))}) for batch in packed]
            last = self._engine.train_minibatch(batches, sft_loss, 1.0, lr_override=section.lr)
            parts.append(last.metrics)
            state.done += 1
        assert last is not None
        return _answer(replace(last, metrics=merge(parts))) | {"done": state.done}

    # --- weights

    def sync_plan(self, several: bool) -> list[dict[str, Any]]:
        """Prepare to send; the tensors that this rank will send, in their order (empty: it sends none).

        Args:
            several: each rank that can sends a share (`sync.shares`); else rank 0 sends all.
        """
        self.sync_leave()
        engine, dtype = self._engine, {"bf16": "bfloat16", "fp32": "float32"}[self._recipe.rollout.dtype]
        share = share_of(engine.rank, engine.sync_shares(self._recipe.sync.senders_per_stage)) if several else None
        self._sender = WeightSender(
            engine.gather_hf(share),
            dtype=dtype,
            bucket_bytes=bucket_bytes(self._recipe.sync.bucket_mb),
            device=engine.platform.device,
            overlap=self._recipe.run.overlap,
        )
        return [asdict(spec) for spec in self._sender.specs] if self._sender.sends else []

    def sync_host(self, rank: int, address: str) -> int:
        """Listen for the members of sender ``rank``'s weight-sync group; the port on that rank, 0 elsewhere."""
        return self._sending.host(address, self._recipe.sync.timeout_s) if rank == self._engine.rank else 0

    def sync_join(self, rank: int, address: str, port: int, world_size: int, name: str) -> None:
        """Form the weight-sync group of sender ``rank`` with every inference rank; blocks until all have come. Nothing on other ranks."""
        if rank != self._engine.rank:
            return
        self._sending.join(
            address=address,
            port=port,
            world_size=world_size,
            name=name,
            backend=self._engine.platform.backend,
            timeout_s=self._recipe.sync.timeout_s + GRACE_S,
        )

    def sync_changed(self, version: int, base: int | None) -> list[str] | None:
        """Names of the tensors of which this rank's part differs from version ``base``; None: that is not known."""
        return self._sending.changed(version, base)

    def sync_fill(self, version: int, only: Sequence[str] | None, digests: DigestKind | None) -> None:
        """Fill the first buckets of what ``sync_broadcast`` with the same arguments will send; generation goes on."""
        self._sending.fill(version, _chosen(only), digests=digests)

    def sync_broadcast(self, version: int, only: Sequence[str] | None, digests: DigestKind | None) -> dict[str, Any] | None:
        """Send the buckets of the tensors ``only`` (None: of all) over this sender's group; report ``digests`` of that kind, or none."""
        chosen = _chosen(only)
        return _report(self._sending.broadcast(version, self._recipe.sync.timeout_s + GRACE_S, chosen, digests=digests))

    def sync_write(self, version: int, folder: str, digests: DigestKind | None) -> dict[str, Any] | None:
        """Write all weights as a HuggingFace folder; report their ``digests`` of that kind, or none."""
        return _report(self._sending.write(version, Path(folder), self._engine.model_path, digests=digests))

    def sync_leave(self) -> None:
        """Leave the weight-sync group, if this rank is in one."""
        if self._sender is not None:
            self._sender.leave()

    def export(self, folder: str) -> None:
        """Write the policy as a HuggingFace folder in the training dtype."""
        self._engine.export_hf(folder)

    # --- inside

    @property
    def _loaded(self) -> _Step:
        assert self._step is not None, "no batch is loaded"
        return self._step

    @property
    def _sending(self) -> WeightSender:
        assert self._sender is not None, "sync_plan comes first"
        return self._sender

    def _fetch(self, samples: Mapping[int, Sample]) -> dict[int, dict[str, np.ndarray]]:
        handles = {(i, name): handle for i, sample in samples.items() for name, handle in sample.tensors.items()}
        timeout_s = self._recipe.launch.rpc_timeout_s
        arrays: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
        for (i, name), array in self._runner.run(self._fetcher.fetch(handles, timeout_s=timeout_s), timeout_s=timeout_s).items():
            arrays[i][name] = array
        return arrays

    def _attach(self, name: str, model: ModelName) -> None:
        """Compute log-probabilities of all micro-batches of the step and keep them as a field."""
        step = self._loaded
        flat = [batch for minibatch in step.minibatches for batch in minibatch]
        values = self._engine.logprobs(flat, self._recipe.rollout.temperature, model)
        if values is None:
            return
        described = iter(values)
        step.minibatches = [
            [replace(batch, fields={**batch.fields, name: next(described)}) for batch in minibatch] for minibatch in step.minibatches
        ]

    def _kl_by_sample(self) -> dict[int, float]:
        out: dict[int, float] = {}
        for batch in (batch for minibatch in self._loaded.minibatches for batch in minibatch):
            if not batch.sample_index:
                continue
            kl_t = kl_estimate(self._algorithm.kl_estimator, batch.fields["proximal"], batch.fields["reference"])
            kl_t = kl_t.masked_fill(~batch.fields["loss_mask"].bool(), 0.0)
            out |= {i: float(values.sum()) for i, values in zip(batch.sample_index, unpack(kl_t, batch), strict=True)}
        return out

    def _start_warmup(self) -> _Warmup:
        from areal_mega.data.registry import load_rows
        from areal_mega.data.tokenizer import load_tokenizer

        rows = load_rows(self._recipe.warmup.data or self._recipe.data.train)
        stream = PromptStream(rows, seed=self._recipe.run.seed, shuffle=True)
        return _Warmup(stream, load_tokenizer(self._engine.model_path))


def _fields(
    arrays: Mapping[str, np.ndarray], sample: Sample, min_version: int, version: int, mask_truncated: bool
) -> dict[str, np.ndarray]:
    """The per-token inputs of the loss, with stale tokens (and truncated answers, where asked) out of the mask."""
    mask = arrays["loss_mask"] & (arrays["versions"] >= min_version)
    if mask_truncated and sample.finish_reason == "length":
        mask = np.zeros_like(mask)
    return {
        "input_ids": arrays["input_ids"],
        "loss_mask": mask,
        "logprobs": arrays["logprobs"],
        "staleness": np.where(mask, version - arrays["versions"], 0).astype(np.int32),
    }


def _spread(batch: PackedBatch, scalars: Mapping[str, Mapping[int, float]]) -> PackedBatch:
    """Give every token its sample's value of each scalar; 0 on padding."""
    padding = batch.num_sequences - len(batch.sample_index)
    fields: dict[str, Tensor] = {}
    for name, by_sample in scalars.items():
        values_s = torch.tensor([by_sample[i] for i in batch.sample_index] + [0.0] * padding)
        fields[name] = values_s[batch.sequence_t]
    return replace(batch, fields={**batch.fields, **fields})


def _answer(result: UpdateResult) -> dict[str, Any]:
    return {"metrics": result.metrics, "grad_norm": result.grad_norm, "lr": result.lr, "skipped": result.skipped}


def _chosen(only: Sequence[str] | None) -> frozenset[str] | None:
    return None if only is None else frozenset(only)


def _report(report: SendReport | None) -> dict[str, Any] | None:
    return None if report is None else asdict(report)
