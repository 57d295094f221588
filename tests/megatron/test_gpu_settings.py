"""Settings of GPUs, as far as a machine without one can say: what is refused, and what reaches Megatron-Core's configs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from areal_mega.config.schema import FP8Section, RouterSection, TrainSection
from areal_mega.core.errors import UserError
from areal_mega.megatron import gpu as gpu_settings
from areal_mega.megatron.gpu import check_gpu_settings, fp8_settings, token_multiple
from areal_mega.megatron.packing import pack
from areal_mega.megatron.platform import Platform, detect
from areal_mega.models.registry import family_for
from areal_mega.parallel.strategy import parse


def gpu(transformer_engine: bool = True, capability: tuple[int, int] = (9, 0)) -> Platform:
    return Platform(torch.device("cuda", 0), "nccl", transformer_engine=transformer_engine, capability=capability)


def refusal(train: dict[str, Any], platform: Platform, dtype: torch.dtype = torch.bfloat16) -> str:
    with pytest.raises(UserError) as caught:
        check_gpu_settings(TrainSection(**train), dtype, platform)
    line = str(caught.value)
    assert "\n" not in line
    return line


FP8: dict[str, Any] = {"fp8": {"format": "hybrid"}}


@pytest.mark.parametrize("train", [FP8, {"nccl_config": "x.yaml"}, {"optimizer": {"overlap": True}}])
def test_a_cpu_takes_none_of_them(train: dict[str, Any]) -> None:
    assert "needs GPUs, and this run is on a CPU; leave it out" in refusal(train, detect("cpu"))


def test_what_fp8_needs() -> None:
    assert "Transformer Engine, which computes in FP8, is not installed" in refusal(FP8, gpu(transformer_engine=False))
    assert "model.dtype is fp32; FP8 stands in for bf16" in refusal(FP8, gpu(), torch.float32)
    assert refusal({"fp8": {"format": "e4m3", "recipe": "mxfp8"}}, gpu()) == (
        "train.fp8.recipe mxfp8 needs compute capability 10.0, this GPU has 9.0; "
        "set train.fp8.recipe to one of delayed, tensorwise, blockwise"
    )
    assert refusal(FP8, gpu(capability=(8, 0))).endswith("set train.fp8.recipe to nothing, and train.fp8.format to off")
    check_gpu_settings(TrainSection(**FP8), torch.bfloat16, gpu())


def test_a_file_of_options_must_exist(tmp_path: Path) -> None:
    assert "there is no file" in refusal({"nccl_config": str(tmp_path / "no.yaml")}, gpu())
    (tmp_path / "yes.yaml").write_text("dp_cp: {is_high_priority_stream: true}\n")
    check_gpu_settings(TrainSection(nccl_config=str(tmp_path / "yes.yaml")), torch.bfloat16, gpu())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("dp_cp: {max_ctas: 16", "is no YAML that can be read"),
        ("", "holds no mapping of communicators"),
        ("[dp_cp]", "holds no mapping of communicators"),
        ("data_parallel: {max_ctas: 16}", "data_parallel is no communicator of Megatron-Core's; known: cp, dp, dp_cp"),
        ("dp_cp: 16", "dp_cp is 16, not a mapping"),
        ("dp_cp: {max_cta: 16}", "dp_cp.max_cta is no option of Megatron-Core's; known: is_high_priority_stream"),
        ("dp_cp: {max_ctas: many}", "dp_cp.max_ctas is 'many'; write a whole number"),
        ("dp_cp: {max_ctas: true}", "dp_cp.max_ctas is True; write a whole number"),
        ("tp: {net_name: tcp}", "tp.net_name is 'tcp'; write IB or Socket"),
    ],
)
def test_a_file_of_options_says_what_megatron_core_understands(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text(content)
    line = refusal({"nccl_config": str(file)}, gpu())
    assert said in line and str(file) in line


def test_the_known_communicators_are_those_that_megatron_core_asks_for() -> None:
    """Read from its source: on a CPU nothing asks."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    source = (Path(spec.submodule_search_locations[0]) / "parallel_state.py").read_text()
    assert set(re.findall(r"""get_nccl_options\(["'](\w+)["']""", source)) == gpu_settings.NCCL_GROUPS
    body = source.partition("def get_nccl_options")[2].partition("\ndef ")[0]
    assert set(re.findall(r"""nccl_comm_cfgs\[pg_name\](?:\.get\(|\[)["'](\w+)["']""", body)) == set(gpu_settings.NCCL_OPTIONS)


@pytest.mark.parametrize(("recipe", "multiple"), [("delayed", 16), ("blockwise", 16), ("mxfp8", 32)])
def test_fp8_pads_micro_batches(recipe: str, multiple: int) -> None:
    import numpy as np

    section = FP8Section(format="e4m3", recipe=recipe)  # type: ignore[arg-type]
    assert token_multiple(section) == multiple and token_multiple(FP8Section()) == 1
    samples = [{"input_ids": np.arange(1, n + 1)} for n in (5, 17)]
    batch = pack(samples, [0, 1], token_multiple(section))
    assert len(batch.input_ids_t) == 32 and batch.num_tokens == 22
    assert int(batch.cu_seqlens[-1]) == 32, "padding is a sequence of its own"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_what_reaches_megatron_core(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with detect("cpu").importing():
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.transformer import transformer_config as core
        from megatron.core.transformer.moe import moe_utils

        from areal_mega.megatron.model import transformer_config
    # Megatron-Core looks for Transformer Engine itself, which this machine lacks.
    monkeypatch.setattr(core, "is_te_min_version", lambda version: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *_: None)
    for name in (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ):
        monkeypatch.setattr(moe_utils, name, lambda *_: None)
    hf = tiny_config(family).to_dict()
    config = transformer_config(family_for(hf), hf, parse("megatron:d1"), TrainSection(**FP8), RouterSection(), torch.bfloat16, gpu())
    assert (config.fp8, config.fp8_recipe, config.bf16) == ("hybrid", "delayed", True)
    assert config.bias_activation_fusion and config.bias_dropout_fusion and not config.use_cpu_initialization
    assert config.apply_rope_fusion == (family == "qwen3")
    assert fp8_settings(FP8Section()) == {}
    if family == "deepseek_v3":
        assert config.moe_grouped_gemm and config.moe_permute_fusion and config.moe_router_dtype == "fp32"
