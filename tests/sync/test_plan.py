"""Every invariant of the bucket plan, over any tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal_mega.sync.plan import ITEM_BYTES, Bucket, elements, plan_buckets


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
