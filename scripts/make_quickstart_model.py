"""Write recipes/quickstart_model: the architecture and tokenizer of the quickstart's model, without weights.

A Qwen3-MoE of about a million parameters over single characters. Its weights are made at random by the recipe (model.weights: random).
"""

from __future__ import annotations

import json
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "recipes" / "quickstart_model"
PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*()=? "


def main() -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

    vocab = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD, model_max_length=64)
    tokenizer.save_pretrained(OUT)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocab[EOS],
        pad_token_id=vocab[PAD],
    )
    config.save_pretrained(OUT)
    generation = {"eos_token_id": vocab[EOS], "pad_token_id": vocab[PAD]}
    (OUT / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    print(f"wrote {OUT}: {', '.join(sorted(path.name for path in OUT.iterdir()))}")


if __name__ == "__main__":
    main()
