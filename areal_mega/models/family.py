"""What a family of models is: four answers about a ``config.json``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from areal_mega.models import blocks
from areal_mega.models.hf_config import HFConfig, field, head_dim, only, tied
from areal_mega.models.rope import Rope, rope_of
from areal_mega.models.table import Param, Table


class Family(ABC):
    """One family. Subclasses say their attention and their MLP; what all decoder-only models share is here.

    Every method takes the plain content of ``config.json`` and raises ``UserError`` for a value that would not reach the model.
    """

    model_types: ClassVar[tuple[str, ...]]
    default_head_dim: ClassVar[int | None] = None
    """Where transformers gives the family a fixed head size for files without ``head_dim``; None: hidden size over heads."""
    qk_norm: ClassVar[bool] = False
    default_rope_theta: ClassVar[float] = 10000.0
    default_rotary_percent: ClassVar[float] = 1.0
    """What transformers takes for files without ``rope_theta`` or ``partial_rotary_factor``."""

    @abstractmethod
    def check(self, hf: HFConfig) -> None:
        """Refuse what this family's Megatron model could not honour."""

    @abstractmethod
    def architecture(self, hf: HFConfig) -> dict[str, Any]:
        """The family's own TransformerConfig keywords, on top of the common ones."""

    @abstractmethod
    def layer(self, hf: HFConfig, layer: int) -> list[Param]:
        """Table entries of one global layer."""

    def transformer_config(self, hf: HFConfig) -> dict[str, Any]:
        """Keywords for Megatron's TransformerConfig: architecture alone, no parallelism, no dtype, no training choice.

        Dropout is zero: the log-probabilities that a policy update compares must come from the same function.
        """
        import torch.nn.functional as F

        only(hf, "hidden_act", "silu", default="silu", why="the gated MLP is built with SiLU")
        self.check(hf)
        common = {
            "num_layers": field(hf, "num_hidden_layers"),
            "hidden_size": field(hf, "hidden_size"),
            "ffn_hidden_size": field(hf, "intermediate_size"),
            "num_attention_heads": field(hf, "num_attention_heads"),
            "num_query_groups": self.query_groups(hf),
            "kv_channels": head_dim(hf, self.default_head_dim),
            "normalization": "RMSNorm",
            "layernorm_epsilon": field(hf, "rms_norm_eps"),
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": self.has_qk_norm(hf),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
        return common | self.architecture(hf)

    def config_attributes(self, hf: HFConfig) -> dict[str, Any]:
        """Attributes to set on the TransformerConfig after it is made: GPTModel reads YaRN's settings from there, and our router
        ``group_score_experts``."""
        return self._rope(hf).config_attributes

    def gpt_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Keywords for GPTModel. ``vocab_size`` is the model's own: pad it with ``padded_vocab_size(vocab_size, tp)``."""
        return {
            "vocab_size": field(hf, "vocab_size"),
            "max_sequence_length": field(hf, "max_position_embeddings"),
            "share_embeddings_and_output_weights": tied(hf),
        } | self._rope(hf).gpt_kwargs

    def _rope(self, hf: HFConfig) -> Rope:
        return rope_of(hf, theta=self.default_rope_theta, partial=self.default_rotary_percent)

    def has_qk_norm(self, hf: HFConfig) -> bool:
        """Whether each query and key head is normed."""
        return self.qk_norm

    def query_groups(self, hf: HFConfig) -> int:
        return int(field(hf, "num_key_value_heads", default=field(hf, "num_attention_heads")))

    def attention(self, hf: HFConfig, layer: int, **biases: bool) -> list[Param]:
        """Entries of the layer's attention; ``biases`` are the switches of ``blocks.attention``."""
        return blocks.attention(
            layer,
            hidden=field(hf, "hidden_size"),
            heads=field(hf, "num_attention_heads"),
            groups=self.query_groups(hf),
            head_dim=head_dim(hf, self.default_head_dim),
            qk_norm=self.has_qk_norm(hf),
            **biases,
        )

    def dense_mlp(self, hf: HFConfig, layer: int, *, bias: bool = False) -> list[Param]:
        return blocks.dense_mlp(layer, hidden=field(hf, "hidden_size"), ffn=field(hf, "intermediate_size"), bias=bias)

    def parameters(self, hf: HFConfig) -> tuple[Param, ...]:
        """The declarative table, in export order."""
        self.check(hf)
        vocab, hidden, layers = field(hf, "vocab_size"), field(hf, "hidden_size"), field(hf, "num_hidden_layers")
        out = blocks.embedding(vocab, hidden)
        for layer in range(layers):
            out += self.layer(hf, layer)
        return tuple(out + blocks.output(vocab, hidden, tied=tied(hf)))

    def table(self, hf: HFConfig) -> Table:
        """The table with the HF tensors that files may carry in vain: rotary buffers, a tied output layer written twice, and layers
        that predict further tokens."""
        ignorable = blocks.rotary_buffers(field(hf, "num_hidden_layers")) | self.further_token_layers(hf)
        return Table(self.parameters(hf), ignorable | ({"lm_head.weight"} if tied(hf) else frozenset()))

    def further_token_layers(self, hf: HFConfig) -> frozenset[str]:
        """HF tensors of the layers behind the last one that predict the tokens after the next (MTP).

        They are for speculative decoding, are not trained here, and are left out of what is exported.
        """
        first = field(hf, "num_hidden_layers")
        names: set[str] = set()
        for layer in range(first, first + field(hf, "num_nextn_predict_layers", "num_mtp_layers", default=0)):
            names |= {tensor.name for param in self.layer(hf, layer) for tensor in param.hf}
            names |= {f"{blocks.HF_LAYER.format(layer)}{name}.weight" for name in blocks.MTP_EXTRAS}
        return frozenset(names)
