"""Blocks of a parameter table that families share. Each returns its entries in export order; HF names are those of the hub's files."""

from __future__ import annotations

from areal_mega.models.table import QKV, HFTensor, Param, Replicated, Split, Stacked, Vocabulary

HF_LAYER = "model.layers.{}."


def embedding(vocab: int, hidden: int) -> list[Param]:
    table = HFTensor("model.embed_tokens.weight", (vocab, hidden))
    return [Param(role="embedding.word_embeddings.weight", mapping=Vocabulary(), hf=(table,), stage="first")]


def output(vocab: int, hidden: int, *, tied: bool) -> list[Param]:
    """Final norm and output layer. Tied, the output layer is a copy of the embedding, present only where stages are several."""
    head = HFTensor("model.embed_tokens.weight" if tied else "lm_head.weight", (vocab, hidden))
    return [
        norm("decoder.final_layernorm.weight", "model.norm.weight", hidden, layer=None),
        Param(role="output_layer.weight", mapping=Vocabulary(), hf=(head,), stage="last", copy=tied),
    ]


def norm(role: str, hf_name: str, size: int, *, layer: int | None, fused_role: str | None = None) -> Param:
    """An RMSNorm weight; ``fused_role`` is its name inside the projection that follows, where the two are one module."""
    return Param(
        role=role,
        mapping=Replicated(),
        hf=(HFTensor(hf_name, (size,)),),
        stage="last" if layer is None else "layer",
        layer=layer,
        fused_role=fused_role,
    )


def attention(
    layer: int,
    *,
    hidden: int,
    heads: int,
    groups: int,
    head_dim: int,
    qkv_bias: bool = False,
    proj_bias: bool = False,
    qk_norm: bool = False,
) -> list[Param]:
    """Norm, fused query-key-value projection, optional per-head norms, output projection."""
    hf, rows = HF_LAYER.format(layer), (heads * head_dim, groups * head_dim, groups * head_dim)
    mapping = QKV(heads=heads, groups=groups, head_dim=head_dim)
    weights = tuple(HFTensor(f"{hf}self_attn.{n}_proj.weight", (r, hidden)) for n, r in zip("qkv", rows, strict=True))
    out = [
        norm(
            "input_layernorm.weight",
            f"{hf}input_layernorm.weight",
            hidden,
            layer=layer,
            fused_role="self_attention.linear_qkv.layer_norm_weight",
        ),
        Param(role="self_attention.linear_qkv.weight", mapping=mapping, hf=weights, layer=layer),
    ]
    if qkv_bias:
        biases = tuple(HFTensor(f"{hf}self_attn.{n}_proj.bias", (r,)) for n, r in zip("qkv", rows, strict=True))
        out.append(Param(role="self_attention.linear_qkv.bias", mapping=mapping, hf=biases, layer=layer))
    if qk_norm:
        out.append(norm("self_attention.q_layernorm.weight", f"{hf}self_attn.q_norm.weight", head_dim, layer=layer))
        out.append(norm("self_attention.k_layernorm.weight", f"{hf}self_attn.k_norm.weight", head_dim, layer=layer))
    proj = HFTensor(f"{hf}self_attn.o_proj.weight", (hidden, heads * head_dim))
    out.append(Param(role="self_attention.linear_proj.weight", mapping=Split(along=1), hf=(proj,), layer=layer))
    if proj_bias:
        bias = HFTensor(f"{hf}self_attn.o_proj.bias", (hidden,))
        out.append(Param(role="self_attention.linear_proj.bias", mapping=Replicated(), hf=(bias,), layer=layer))
    return out


def dense_mlp(layer: int, *, hidden: int, ffn: int, bias: bool = False) -> list[Param]:
    """Norm and gated MLP."""
    hf = HF_LAYER.format(layer)
    fused = "mlp.linear_fc1.layer_norm_weight"
    out = [norm("pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", hidden, layer=layer, fused_role=fused)]
    return out + _gated(f"{hf}mlp.", "mlp.", hidden=hidden, ffn=ffn, bias=bias, layer=layer)


def moe(layer: int, *, hidden: int, ffn: int, experts: int) -> list[Param]:
    """Norm, router and experts. The norm feeds the router and every expert, so no naming fuses it."""
    hf = HF_LAYER.format(layer)
    gate = HFTensor(f"{hf}mlp.gate.weight", (experts, hidden))
    out = [
        norm("pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", hidden, layer=layer),
        Param(role="mlp.router.weight", mapping=Replicated(), hf=(gate,), layer=layer),
    ]
    for expert in range(experts):
        out += _gated(f"{hf}mlp.experts.{expert}.", "", hidden=hidden, ffn=ffn, layer=layer, expert=expert)
    return out


def _gated(hf: str, role: str, *, hidden: int, ffn: int, layer: int, expert: int | None = None, bias: bool = False) -> list[Param]:
    gate, up = (HFTensor(f"{hf}{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
    down = HFTensor(f"{hf}down_proj.weight", (hidden, ffn))
    out = [Param(role=f"{role}linear_fc1.weight", mapping=Stacked(), hf=(gate, up), layer=layer, expert=expert)]
    if bias:
        pair = tuple(HFTensor(f"{hf}{name}_proj.bias", (ffn,)) for name in ("gate", "up"))
        out.append(Param(role=f"{role}linear_fc1.bias", mapping=Stacked(), hf=pair, layer=layer, expert=expert))
    out.append(Param(role=f"{role}linear_fc2.weight", mapping=Split(along=1), hf=(down,), layer=layer, expert=expert))
    if bias:
        last = HFTensor(f"{hf}down_proj.bias", (hidden,))
        out.append(Param(role=f"{role}linear_fc2.bias", mapping=Replicated(), hf=(last,), layer=layer, expert=expert))
    return out


def rotary_buffers(layers: int) -> frozenset[str]:
    """Frequencies that old files carry although they follow from config.json."""
    return frozenset(f"{HF_LAYER.format(layer)}self_attn.rotary_emb.inv_freq" for layer in range(layers))
