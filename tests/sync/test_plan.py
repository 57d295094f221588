"""Every invariant of the bucket plan, over any tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, SPARSE, tiny_config

from areal_mega.models.registry import family_for
from areal_mega.sync.plan import ITEM_BYTES, Bucket, WireSpec, elements, plan_buckets, total_order, with_fused

FUSED_BY_SERVERS = [
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
    {"q_a_proj", "kv_a_proj_with_mqa"},
]


@lru_cache
def wire_specs(family: str) -> list[WireSpec]:
    """All tensors of a tiny model of the family, as they would be sent."""
    hf = json.loads(tiny_config(family).to_json_string(use_diff=False))
    params = family_for(hf).table(hf).exported
    return [WireSpec(t.name, t.shape, "float32" if p.fp32 else "bfloat16") for p in params for t in p.hf]


@dataclass(frozen=True)
class Spec:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return elements(self.shape) * ITEM_BYTES[self.dtype]


LAYER = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "mlp.experts.3": ("gate_proj", "up_proj", "down_proj"),
}


@st.composite
def models(draw: st.DrawFn) -> list[Spec]:
    """Tensors as a model exports them: fused projections of one module side by side."""
    dtypes = st.sampled_from(sorted(ITEM_BYTES))
    shape = st.lists(st.integers(1, 9), max_size=2).map(tuple)
    out = [Spec("model.embed_tokens.weight", draw(shape), draw(dtypes))]
    for layer in range(draw(st.integers(0, 3))):
        for module, parts in LAYER.items():
            if draw(st.booleans()):
                dtype = draw(dtypes)
                out += [Spec(f"model.layers.{layer}.{module}.{part}.weight", draw(shape), dtype) for part in parts]
        out.append(Spec(f"model.layers.{layer}.input_layernorm.weight", draw(shape), draw(dtypes)))
    return out


def fused_module(name: str) -> str | None:
    module, part = name.removesuffix(".weight").rpartition(".")[::2]
    return module if part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") else None


def is_one_fused_group(bucket: Bucket) -> bool:
    modules = {fused_module(name) for name in bucket.names}
    return len(bucket.names) == 1 or (len(modules) == 1 and None not in modules)


@given(models(), st.integers(1, 400))
def test_buckets(specs: list[Spec], max_bytes: int) -> None:
    buckets = plan_buckets(specs, max_bytes)
    by_name = {spec.name: spec for spec in specs}
    assert [name for bucket in buckets for name in bucket.names] == [spec.name for spec in specs]
    for bucket in buckets:
        assert bucket.names
        assert len(bucket.shapes) == len(bucket.names)
        assert all(by_name[name].shape == shape for name, shape in zip(bucket.names, bucket.shapes, strict=True))
        assert {by_name[name].dtype for name in bucket.names} == {bucket.dtype}
        assert bucket.nbytes == sum(by_name[name].nbytes for name in bucket.names)
        assert bucket.nbytes <= max_bytes or is_one_fused_group(bucket)
    assert buckets == plan_buckets(iter(specs), max_bytes)


@given(models(), st.integers(1, 400))
def test_projections_that_a_server_fuses_arrive_together(specs: list[Spec], max_bytes: int) -> None:
    home = {name: number for number, bucket in enumerate(plan_buckets(specs, max_bytes)) for name in bucket.names}
    for spec in specs:
        module = fused_module(spec.name)
        if module is not None:
            assert len({home[other] for other in home if fused_module(other) == module}) == 1


@given(models(), st.integers(1, 400))
def test_neighbours_that_would_fit_together_are_together(specs: list[Spec], max_bytes: int) -> None:
    buckets = plan_buckets(specs, max_bytes)
    by_name = {spec.name: spec for spec in specs}
    for first, second in pairwise(buckets):
        group = [name for name in second.names if fused_module(name) == fused_module(second.names[0])]
        head = group if fused_module(second.names[0]) else [second.names[0]]
        assert first.dtype != second.dtype or first.nbytes + sum(by_name[name].nbytes for name in head) > max_bytes


def test_no_tensors_make_no_bucket() -> None:
    assert plan_buckets([], 100) == ()


def test_projections_of_two_layers_are_two_groups() -> None:
    specs = [Spec(f"model.layers.{layer}.mlp.{part}_proj.weight", (2,), "float32") for layer in (0, 1) for part in ("gate", "up")]
    assert [bucket.names for bucket in plan_buckets(specs, 16)] == [
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *SPARSE])
@given(max_bytes=st.integers(1, 60_000))
@settings(max_examples=25)
def test_what_servers_fuse_stays_together_in_every_family(family: str, max_bytes: int) -> None:
    """Against names written down by hand: the projections of one attention, gate and up of one MLP, both down-projections of MLA."""
    specs = wire_specs(family)
    buckets = plan_buckets(specs, max_bytes)
    home = {name: number for number, bucket in enumerate(buckets) for name in bucket.names}
    assert list(home) == [spec.name for spec in specs]
    fused: dict[str, set[str]] = {}
    for name in home:
        module, _, part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        kind = name.rpartition(".")[2]
        for number, parts in enumerate(FUSED_BY_SERVERS):
            if part in parts:
                fused.setdefault(f"{module} {number} {kind}", set()).add(name)
    assert any(len(names) > 1 for names in fused.values())
    for names in fused.values():
        assert len({home[name] for name in names}) == 1, names
    sizes = {spec.name: spec.nbytes for spec in specs}
    for bucket in buckets:
        if bucket.nbytes > max_bytes and len(bucket.names) > 1:  # what is too large travels alone: nothing of another module with it
            assert len({name.rsplit(".", 2)[0] for name in bucket.names}) == 1
            assert set(bucket.names) <= {name for names in fused.values() for name in names}
        assert bucket.nbytes == sum(sizes[name] for name in bucket.names)


@given(models(), models(), st.integers(1, 400))
def test_total_order(first: list[Spec], second: list[Spec], max_bytes: int) -> None:
    plans = [plan_buckets(first, max_bytes), (), plan_buckets(second, max_bytes)]
    order = total_order(plans)
    for sender, plan in enumerate(plans):
        assert tuple(bucket for number, bucket in order if number == sender) == plan, "a sender's own buckets keep their order"
    turns = [sender for sender, _ in order][: 2 * min(len(plans[0]), len(plans[2]))]
    assert turns == [0, 2] * (len(turns) // 2), "senders take turns while both have something to send"


@given(models(), st.data())
def test_fused_tensors_travel_together_or_not_at_all(specs: list[Spec], data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from([spec.name for spec in specs])))
    closed = with_fused(names, specs)
    assert names <= closed
    for name in closed - names:
        assert fused_module(name) is not None and any(fused_module(other) == fused_module(name) for other in names)
    for spec in specs:
        if spec.name not in closed and (module := fused_module(spec.name)) is not None:
            assert all(fused_module(other) != module for other in closed)
