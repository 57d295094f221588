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


def tiny_config(family: str, **overrides: Any) -> Any:
    """A transformers config of the family (see ``FAMILIES``), about 0.2 M parameters unless overridden."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_COMMON, **_FAMILY[family], **overrides})


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
    model.save_pretrained(folder)
    tiny_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder
