"""Blocks of a parameter table that families share. Each returns its entries in export order; HF names are those of the hub's files."""

from __future__ import annotations

from dataclasses import dataclass

from areal_mega.models.table import QKV, Heads, HFTensor, Param, Replicated, Split, Stacked, Vocabulary

HF_LAYER = "model.layers.{}."
MTP_EXTRAS = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
"""What a layer that predicts a further token has besides a layer's tensors."""


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


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Experts that every token passes, as one gated MLP of size ``ffn``; ``gate`` weighs its output by a sigmoid per token."""

    ffn: int
    hf: str
    gate: str | None = None


def moe(
    layer: int,
    *,
    hidden: int,
    ffn: int,
    experts: int,
    hf_block: str = "mlp.",
    hf_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    correction_bias: bool = False,
    shared: Shared | None = None,
) -> list[Param]:
    """Norm, router, experts and shared experts. The norm feeds the router and every expert, so no naming fuses it.

    ``correction_bias`` is the bias on the scores that choose experts (not on their weights): a buffer, and fp32 whatever the rest is.
    """
    hf = HF_LAYER.format(layer)
    gate = HFTensor(f"{hf}{hf_block}gate.weight", (experts, hidden))
    out = [
        norm("pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", hidden, layer=layer),
        Param(role="mlp.router.weight", mapping=Replicated(), hf=(gate,), layer=layer),
    ]
    if correction_bias:
        bias = HFTensor(f"{hf}{hf_block}gate.e_score_correction_bias", (experts,))
        out.append(Param(role="mlp.router.expert_bias", mapping=Replicated(), hf=(bias,), layer=layer, fp32=True))
    for expert in range(experts):
        name = f"{hf}{hf_block}experts.{expert}."
        out += _gated(name, "", hidden=hidden, ffn=ffn, layer=layer, expert=expert, hf_names=hf_names)
    if shared is not None:
        out += _gated(f"{hf}{hf_block}{shared.hf}.", "mlp.shared_experts.", hidden=hidden, ffn=shared.ffn, layer=layer)
        if shared.gate is not None:
            weigh = HFTensor(f"{hf}{hf_block}{shared.gate}.weight", (1, hidden))
            out.append(Param(role="mlp.shared_experts.gate_weight", mapping=Replicated(), hf=(weigh,), layer=layer))
    return out


def latent_attention(
    layer: int, *, hidden: int, heads: int, q_rank: int | None, kv_rank: int, nope: int, rope: int, value: int
) -> list[Param]:
    """Multi-head latent attention (arXiv:2405.04434): norm, low-rank query and key-value projections with a norm between down and up.

    Args:
        q_rank: None where queries are projected at full rank.
        nope, rope, value: sizes of a head: the part of query and key without and with positions, and the value.
    """
    hf, role = f"{HF_LAYER.format(layer)}self_attn.", "self_attention."

    def whole(name: str, hf_name: str, rows: int) -> Param:
        return Param(role=f"{role}{name}", mapping=Replicated(), hf=(HFTensor(f"{hf}{hf_name}", (rows, hidden)),), layer=layer)

    def by_head(name: str, hf_name: str, size: int, columns: int) -> Param:
        return Param(role=f"{role}{name}", mapping=Heads(heads), hf=(HFTensor(f"{hf}{hf_name}", (heads * size, columns)),), layer=layer)

    def between(which: str, hf_name: str, rank: int) -> Param:
        fused = f"{role}linear_{which}_up_proj.layer_norm_weight"
        return norm(f"{role}{which}_layernorm.weight", f"{hf}{hf_name}", rank, layer=layer, fused_role=fused)

    out = [norm("input_layernorm.weight", f"{HF_LAYER.format(layer)}input_layernorm.weight", hidden, layer=layer)]
    down = whole("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", kv_rank + rope)
    if q_rank is None:
        out += [by_head("linear_q_proj.weight", "q_proj.weight", nope + rope, hidden), down]
    else:
        # Servers fuse both down projections, so they stand side by side.
        out += [whole("linear_q_down_proj.weight", "q_a_proj.weight", q_rank), down]
        out.append(between("q", "q_a_layernorm.weight", q_rank))
        out.append(by_head("linear_q_up_proj.weight", "q_b_proj.weight", nope + rope, q_rank))
    out.append(between("kv", "kv_a_layernorm.weight", kv_rank))
    out.append(by_head("linear_kv_up_proj.weight", "kv_b_proj.weight", nope + value, kv_rank))
    proj = HFTensor(f"{hf}o_proj.weight", (hidden, heads * value))
    out.append(Param(role=f"{role}linear_proj.weight", mapping=Split(along=1), hf=(proj,), layer=layer))
    return out


def _gated(
    hf: str,
    role: str,
    *,
    hidden: int,
    ffn: int,
    layer: int,
    expert: int | None = None,
    bias: bool = False,
    hf_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Param]:
    gate, up = (HFTensor(f"{hf}{name}.weight", (ffn, hidden)) for name in hf_names[:2])
    down = HFTensor(f"{hf}{hf_names[2]}.weight", (hidden, ffn))
    out = [Param(role=f"{role}linear_fc1.weight", mapping=Stacked(), hf=(gate, up), layer=layer, expert=expert)]
    if bias:
        pair = tuple(HFTensor(f"{hf}{name}.bias", (ffn,)) for name in hf_names[:2])
        out.append(Param(role=f"{role}linear_fc1.bias", mapping=Stacked(), hf=pair, layer=layer, expert=expert))
    out.append(Param(role=f"{role}linear_fc2.weight", mapping=Split(along=1), hf=(down,), layer=layer, expert=expert))
    if bias:
        last = HFTensor(f"{hf}{hf_names[2]}.bias", (hidden,))
        out.append(Param(role=f"{role}linear_fc2.bias", mapping=Replicated(), hf=(last,), layer=layer, expert=expert))
    return out


def rotary_buffers(layers: int) -> frozenset[str]:
    """Frequencies that old files carry although they follow from config.json."""
    return frozenset(f"{HF_LAYER.format(layer)}self_attn.rotary_emb.inv_freq" for layer in range(layers))
