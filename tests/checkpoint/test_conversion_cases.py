"""Conversions that went wrong elsewhere, on models that transformers itself wrote: every family there and back, and the odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import model_bytes
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, SPARSE, tiny_model

from areal_mega.checkpoint.convert import from_hf, to_hf
from areal_mega.checkpoint.model import Checkpoint
from areal_mega.checkpoint.verify import verify
from areal_mega.core.errors import UserError

STRATEGIES = {"dense": "megatron:d1t2p2v2", "sparse": "megatron:(attn:d2t2p2|ffn:e4)", "few experts": "megatron:(attn:d1t2p2|ffn:e1t2)"}


def greedy(folder: Path, prompts: list[Any], tokens: int = 12) -> list[str]:
    """What transformers generates; a prompt that is no string goes through the chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        out.append(tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=tokens)[0, ids.shape[1] :]))
    return out


PROMPTS: list[Any] = ["The capital of", "2 + 2", [{"role": "user", "content": "What is 12 times 3?"}]]


@pytest.mark.parametrize("family", [*FAMILIES, *SPARSE])
def test_every_family_there_and_back(family: str, tmp_path: Path) -> None:
    """Vocabulary that no rank count divides, interleaved stages, experts over ranks; exported by one process."""
    source = tiny_model(tmp_path, family, vocab_size=301, num_hidden_layers=4)
    kind = "dense" if family in FAMILIES and "moe" not in family else "sparse"
    from_hf(source, tmp_path / "ck", strategy=STRATEGIES[kind])
    to_hf(tmp_path / "ck", tmp_path / "hf", shard_bytes=100_000)
    assert model_bytes(tmp_path / "hf") == model_bytes(source)
    assert verify(source, tmp_path / "ck") == verify(source, tmp_path / "hf") == []
    if kind == "sparse":
        from_hf(source, tmp_path / "etp", strategy=STRATEGIES["few experts"])
        assert verify(tmp_path / "ck", tmp_path / "etp") == []


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_correction_bias_is_fp32_whatever_the_dtype(family: str, tmp_path: Path) -> None:
    """The bias as trained differs by less than bf16 tells apart."""
    source, name = tiny_model(tmp_path, family), "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = load_file(source / "model.safetensors")
    tensors[name] = torch.full((8,), 1 + 2.0**-20)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    from_hf(source, tmp_path / "ck", strategy="megatron:d2e2", dtype=torch.bfloat16)
    assert Checkpoint(tmp_path / "ck").manifest.arrays["decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32
    to_hf(tmp_path / "ck", tmp_path / "hf", dtype=torch.float16)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(written[name], tensors[name])
    assert {tensor.dtype for key, tensor in written.items() if "correction" not in key} == {torch.float16}


def test_a_tied_head_written_twice_and_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen2", num_hidden_layers=4)
    whole = load_file(source / "model.safetensors")
    extra = {"lm_head.weight": whole["model.embed_tokens.weight"].clone(), "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    before = greedy(source, PROMPTS)
    save_file(whole | extra, source / "model.safetensors", metadata={"format": "pt"})
    for strategy in ("megatron:d1t2p2", "megatron:d1p2v2"):
        out = tmp_path / strategy.rpartition(":")[2]
        from_hf(source, tmp_path / f"{out.name}-ck", strategy=strategy)
        to_hf(tmp_path / f"{out.name}-ck", out)
        assert load_file(out / "model.safetensors").keys() == whole.keys()
        assert verify(source, out) == []
    assert greedy(out, PROMPTS) == before


SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72, "intermediate_size": 192}


def test_the_shape_of_smollm2(tmp_path: Path) -> None:
    """9 heads in 3 groups, 30 layers, tied: bit-equal there and back, and the same text; 2 ranks cannot share 9 heads."""
    source = tiny_model(tmp_path, "llama", **SMOLLM2, num_hidden_layers=30, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"9 attention heads do not split over 2 ranks \(9 / 2 = 4\.5\); tensor parallelism of 1 or 3 or 9"):
        from_hf(source, tmp_path / "ck", strategy="megatron:d1t2p2")
    from_hf(source, tmp_path / "ck", strategy="megatron:d1t3p2")
    to_hf(tmp_path / "ck", tmp_path / "hf")
    assert model_bytes(tmp_path / "hf") == model_bytes(source)
    assert greedy(tmp_path / "hf", PROMPTS) == greedy(source, PROMPTS)


@pytest.mark.parametrize("heads", [1, 6, 8, 9, 12])
def test_legal_tensor_parallelism_is_that_of_megatron_core(heads: int) -> None:
    """Sizes that the message names, and no others, are what TransformerConfig takes."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from areal_mega.models.table import _legal_sizes

    for groups in (g for g in range(1, heads + 1) if heads % g == 0):
        taken = []
        for size in range(1, heads + 1):
            try:
                TransformerConfig(
                    num_layers=1,
                    hidden_size=8 * heads,
                    num_attention_heads=heads,
                    num_query_groups=groups,
                    tensor_model_parallel_size=size,
                )
            except ValueError:
                continue
            taken.append(size)
        assert _legal_sizes(heads, groups) == taken
