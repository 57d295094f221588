"""vLLM's side of weight sync: a weight-transfer engine and a worker extension, for vLLM's own interpreter.

vLLM lives in an environment of its own, with a Python of its own (3.10 or later), where areal-mega is not installed. The launcher puts
this folder on its ``PYTHONPATH`` and starts it with ``--worker-extension-cls=areal_mega_vllm.Extension`` and
``--weight-transfer-config={"backend": "areal_mega"}``. vLLM imports this module in every worker before it makes the model, and then:

- the engine ``areal_mega`` is known to vLLM's weight transfer. It joins the same communicator, and reads the same buckets, as every other
  server here: gloo on a CPU, NCCL on GPUs. vLLM's own NCCL engine speaks to its own kind of communicator only, and nothing to a CPU.
- log-probabilities are those before top-k and top-p, at the temperature of sampling (``untruncated``).
- on a CPU, experts that an update brings are packed as the first ones were (``repacking``).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKEND = "areal_mega"


def _find_package() -> None:
    """Make ``areal_mega`` importable from where this file is, and nothing that lies beside it: that is for another Python."""
    if "areal_mega" in sys.modules:
        return
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("areal_mega", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["areal_mega"] = module
    spec.loader.exec_module(module)


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The communicator to join: see `areal_mega.sync.group.create_group`. This worker's rank is ``rank_offset`` + its own."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket under its HuggingFace names, or a whole ``folder``. ``flattened``: it comes as one buffer of bytes."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    flattened: bool = True
    folder: str = ""


class BucketEngine(WeightTransferEngine):
    """Receives buckets from rank 0 of the weight-sync group, and says what it received."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: ProcessGroup | None = None
        self._timeout_s = 0.0
        self._arriving: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        """Digest of every tensor of the last whole update, by HuggingFace name."""

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        _find_package()
        from areal_mega.sync.group import create_group

        self.shutdown()  # the members changed: there is one group at a time
        own = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self._timeout_s = init_info.timeout_s
        self._group = create_group(
            address=init_info.master_address,
            port=init_info.master_port,
            rank=init_info.rank_offset + own,
            world_size=init_info.world_size,
            name=init_info.group_name,
            backend=init_info.backend,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self._arriving = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # a CPU has nothing to wait for, and torch.accelerator refuses it
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        arriving = _read_folder(update_info.folder) if update_info.folder else self._receive(update_info)
        self.model.load_weights(self._digested(arriving))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)
        self.digests, self._arriving = self._arriving, {}

    def shutdown(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _digested(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        _find_package()
        from areal_mega.sync.digest import tensor_digest

        for name, tensor in tensors:
            self._arriving[name] = tensor_digest(tensor)
            yield name, tensor

    def _receive(self, bucket: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        dtypes = [getattr(torch, name) for name in bucket.dtype_names]
        specs = list(zip(bucket.names, dtypes, bucket.shapes, strict=True))
        if not bucket.flattened:
            for name, dtype, shape in specs:
                yield name, self._broadcast(torch.empty(shape, dtype=dtype, device=self.device))
            return
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in specs]
        flat = self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=self.device))
        for (name, dtype, shape), raw in zip(specs, flat.split(sizes), strict=True):
            aligned = raw.clone() if raw.storage_offset() % dtype.itemsize else raw
            yield name, aligned.view(dtype).view(shape)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            raise RuntimeError("this worker is in no weight-sync group; call /init_weight_transfer_engine first")
        work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self._timeout_s))
        return tensor


def _read_folder(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a HuggingFace folder."""
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RuntimeError(f"{folder} holds no .safetensors file that this server can read")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def repack(model: torch.nn.Module) -> None:
    """Make the layers that compute with a packed copy of a weight they also keep pack it anew.

    On a CPU a tied output layer is one: the embedding has been reloaded, its packed copy has not, and logits would come from the old one.
    """
    packed: list[Any] = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    layers = [layer for layer in packed if layer.weight.ndim == 2 and layer.weight.numel()]  # others kept nothing to pack from
    if not layers:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in layers:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def repacking(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``process_weights_after_loading`` of unquantized experts that packs them at every load.

    On a CPU vLLM packs experts where it makes their kernel, which it does at the first load alone: those of an update would then be read as
    if they were packed.
    """

    @wraps(process)
    def always(method: Any, layer: Any) -> None:
        kernel, plain = method.moe_kernel, layer.w13_weight
        process(method, layer)
        # Packing puts another parameter in the place of the plain one: where that has happened, there is nothing left to do.
        if kernel is not None and layer.w13_weight is plain:
            kernel.fused_experts.process_weights_after_loading(layer)

    return always


Forward = Callable[..., "tuple[torch.Tensor, torch.Tensor | None]"]


def untruncated(forward: Forward) -> Forward:
    """A sampler's ``forward`` that samples as before, and gives log-probabilities [batch, vocabulary] of what went in.

    vLLM's processed log-probabilities are of the distribution that is left after top-k and top-p. The trainer computes them of the whole
    vocabulary, at the sampling temperature; with neither cut they are the same.
    """

    @wraps(forward)
    def both(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        whole = None if k is None and p is None else logits.log_softmax(dim=-1, dtype=torch.float32)  # before it is cut in place
        sampled, processed = forward(logits, generators, k, p)
        return sampled, processed if whole is None else whole

    return both


def _keep_whole(cls: type[Any]) -> None:
    make = cls.__init__

    @wraps(make)
    def init(self: Any, logprobs_mode: str = "raw_logprobs", *args: Any, **kwargs: Any) -> None:
        make(self, logprobs_mode, *args, **kwargs)
        if logprobs_mode == "processed_logprobs":
            self.forward = untruncated(self.forward)

    cls.__init__ = init


class Extension:
    """Methods that vLLM adds to its workers; called by ``/collective_rpc``."""

    weight_transfer_engine: BucketEngine

    def areal_mega_digests(self) -> dict[str, dict[str, str]]:
        """Digests of the tensors of the last update, by HuggingFace name; empty before the first."""
        return {"digests": dict(self.weight_transfer_engine.digests)}


WeightTransferEngineFactory.register_engine(BACKEND, BucketEngine)
_keep_whole(TopKTopPSampler)
if current_platform.is_cpu():
    UnquantizedFusedMoEMethod.process_weights_after_loading = repacking(UnquantizedFusedMoEMethod.process_weights_after_loading)
