"""Settings that need GPUs: FP8, options of NCCL's communicators, gradients reduced during the backward pass.

Checked here, in one line each, and handed to Megatron-Core and Transformer Engine, which do the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from areal_mega.config.schema import FP8Section, TrainSection
from areal_mega.core.errors import UserError
from areal_mega.megatron.platform import Platform

_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Lowest compute capability of each recipe: Ada, Hopper, Blackwell."""

NCCL_GROUPS = frozenset(
    [
        "cp",
        "dp",
        "dp_cp",
        "embd",
        "ep",
        "ep_dp",
        "ep_gtp_remat_dp",
        "ep_tp",
        "expt_gtp_remat",
        "gtp_remat",
        "gtp_remat_dp",
        "gtp_remat_dp_cp",
        "hcp",
        "inter_ep_dp",
        "intra_dist_opt_instance",
        "intra_dp_cp",
        "intra_ep_dp",
        "mp",
        "pos_embd",
        "pp",
        "tp",
        "tp_cp",
        "tp_dp",
        "tp_dp_cp",
        "tp_ep_gtp_remat_pp",
        "tp_ep_mp",
        "tp_ep_pp",
    ]
)
"""Communicators that Megatron-Core takes options for; others are ignored there without a word."""
NCCL_OPTIONS = {"is_high_priority_stream": bool, "cga_cluster_size": int, "max_ctas": int, "min_ctas": int, "net_name": str}
_KINDS = {bool: "true or false", int: "a whole number", str: "IB or Socket"}


def check_gpu_settings(train: TrainSection, dtype: torch.dtype, platform: Platform) -> None:
    """Refuse what this device, or what is installed for it, cannot do.

    Raises:
        UserError: naming the setting and what is missing.
    """
    if platform.is_cpu:
        wanted = {
            "fp8.format": train.fp8.format != "off",
            "nccl_config": train.nccl_config is not None,
            "optimizer.overlap": train.optimizer.overlap,
        }
        for name, given in wanted.items():
            if given:
                raise UserError(f"train.{name} needs GPUs, and this run is on a CPU; leave it out")
    if train.nccl_config is not None:
        _check_nccl(Path(train.nccl_config))
    if train.fp8.format != "off":
        _check_fp8(train.fp8, dtype, platform)


def _check_nccl(file: Path) -> None:
    """The file is what Megatron-Core reads: options by communicator.

    Raises:
        UserError: naming the file, and the key that is wrong.
    """
    where = f"train.nccl_config {file}"
    if not file.is_file():
        raise UserError(f"train.nccl_config: there is no file {file}; give Megatron-Core's YAML of communicator options")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is no YAML that can be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"{where} holds no mapping of communicators to their options; write e.g. dp_cp: {{max_ctas: 16}}")
    for name, options in content.items():
        if name not in NCCL_GROUPS:
            raise UserError(f"{where}: {name} is no communicator of Megatron-Core's; known: {', '.join(sorted(NCCL_GROUPS))}")
        if not isinstance(options, dict):
            raise UserError(f"{where}: {name} is {options!r}, not a mapping of options; write e.g. {name}: {{max_ctas: 16}}")
        for key, value in options.items():
            if key not in NCCL_OPTIONS:
                raise UserError(f"{where}: {name}.{key} is no option of Megatron-Core's; known: {', '.join(NCCL_OPTIONS)}")
            if type(value) is not NCCL_OPTIONS[key]:
                raise UserError(f"{where}: {name}.{key} is {value!r}; write {_KINDS[NCCL_OPTIONS[key]]}")
            if key == "net_name" and str(value).lower() not in ("ib", "socket"):
                raise UserError(f"{where}: {name}.net_name is {value!r}; write IB or Socket")


def _check_fp8(fp8: FP8Section, dtype: torch.dtype, platform: Platform) -> None:
    if not platform.transformer_engine:
        raise UserError(
            f"train.fp8.format is {fp8.format}, but Transformer Engine, which computes in FP8, is not installed; install areal-mega[cuda], "
            "or set it to off"
        )
    if dtype != torch.bfloat16:
        raise UserError(f"train.fp8.format is {fp8.format}, but model.dtype is fp32; FP8 stands in for bf16: set model.dtype to bf16")
    lowest, here = _CAPABILITY[fp8.recipe], platform.capability
    if here < lowest:
        raise UserError(
            f"train.fp8.recipe {fp8.recipe} needs compute capability {lowest[0]}.{lowest[1]}, this GPU has {here[0]}.{here[1]}; set "
            f"train.fp8.recipe to {_best(here)}"
        )


def _best(capability: tuple[int, int]) -> str:
    fitting = [name for name, lowest in _CAPABILITY.items() if lowest <= capability]
    return f"one of {', '.join(fitting)}" if fitting else "nothing, and train.fp8.format to off"


def fp8_settings(fp8: FP8Section) -> dict[str, Any]:
    """Fields of Megatron-Core's config. Weights stay in bf16: what is loaded, exported and synced is what was trained."""
    return {} if fp8.format == "off" else {"fp8": fp8.format, "fp8_recipe": fp8.recipe}


def token_multiple(fp8: FP8Section) -> int:
    """The tokens of a rank's part of a micro-batch must be a multiple of this: FP8 matrix products come in tiles."""
    if fp8.format == "off":
        return 1
    return 32 if fp8.recipe == "mxfp8" else 16
