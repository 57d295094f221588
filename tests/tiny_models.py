"""Tiny random models of every family, as HuggingFace folders with a tokenizer: for tests that need a real checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
PAD, EOS, IM_START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.05,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}

_LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20, "num_key_value_heads": 4}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "hidden_size": 32, "intermediate_size": 48}
_ROUTED = _EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", _EXPERTS | {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40}),
    "qwen2_moe-renormalised": (
        "qwen2_moe",
        _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "deepseek_v2": ("deepseek_v2", _ROUTED | _LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        _ROUTED
        | _LATENT
        | {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 1,
            "routed_scaling_factor": 16.0,
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _ROUTED
        | _LATENT
        | {
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "moonlight": (
        "deepseek_v3",
        _ROUTED
        | _LATENT
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "n_shared_experts": 2, "rms_norm_eps": 1e-3},
    ),
    "glm4_moe": (
        "glm4_moe",
        _ROUTED | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe-plain": ("glm4_moe", _ROUTED | {"head_dim": 16, "use_qk_norm": False, "tie_word_embeddings": True}),
}
"""Families with latent attention, shared experts or other routers: name -> (transformers' model_type, fields)."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """A transformers config of the family (see ``FAMILIES`` and ``SPARSE``), about 0.2 M parameters unless overridden."""
    from transformers import AutoConfig

    model_type, fields = SPARSE[family] if family in SPARSE else (family, _FAMILY[family])
    fields = {**_COMMON, **fields, **overrides}
    if "rope_parameters" in fields:
        del fields["rope_theta"]
    return AutoConfig.for_model(model_type, **fields)


def shake_buffers(model: Any) -> None:
    """A correction bias of zeros would hide one that is forgotten."""
    import torch

    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.1 * torch.randn_like(buffer))


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> Any:
    """Byte-level tokenizer of ``vocab_size`` >= 259 entries: three special tokens, 256 bytes, fillers up to the size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, EOS, IM_START]
    vocab = {token: i for i, token in enumerate(specials)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    for i in range(vocab_size - len(vocab)):
        vocab[f"<|filler_{i}|>"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD, model_max_length=4096)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(tmp_path: Path, family: str, seed: int = 0, **config_overrides: Any) -> Path:
    """Write a folder with config.json, random fp32 safetensors and a tokenizer; returns it. Same arguments, same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **config_overrides)
    folder = Path(tmp_path) / f"{family}-{seed}"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Norms of ones and biases of zeros would hide a swapped or a forgotten tensor.
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            shake_buffers(model)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(config.vocab_size)
    if config.eos_token_id is None:
        tokenizer.eos_token = None  # a server may look there too
    tokenizer.save_pretrained(folder)
    return folder
