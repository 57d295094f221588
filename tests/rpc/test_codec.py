"""What is decoded equals what was encoded, types included; what is no body is refused."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal_mega.core.metrics import Metric
from areal_mega.core.types import FinishReason, Group, Prompt, RTensor, Sample, SampleId, Trajectory, VersionCount
from areal_mega.rpc.codec import CodecError, decode, encode, register

DTYPES = st.sampled_from(["?", "i1", "u1", "<i2", ">i4", "<i4", "<i8", "<u8", "<f2", "<f4", ">f8", "<f8", "<c8", "<c16"])
FLOATS = st.floats(allow_nan=False)
SCORES = st.dictionaries(st.text(max_size=4), FLOATS, max_size=2)
COUNTS = st.integers(0, 2**40)
REASONS: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length", "abort"])


def arrays() -> st.SearchStrategy[np.ndarray]:
    return DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Arrays that do not lie in memory in order: transposed, reversed, every second."""
    array = draw(hnp.arrays(draw(DTYPES), hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=5)))
    return draw(st.sampled_from([array.T, array[::-1], array[:, ::2], array[..., ::-2]]))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(0, 5))
    mask = np.array([False] + [True] * (n - 1), bool)[:n]
    return Trajectory(
        input_ids=np.arange(n, dtype=np.int32),
        loss_mask=mask,
        logprobs=draw(hnp.arrays("f4", n)),
        versions=np.full(n, draw(st.integers(-1, 9)), np.int32),
        reward=draw(FLOATS),
        finish_reason=draw(REASONS),
        scores=draw(SCORES),
        turn=draw(st.integers(0, 3)),
    )


IDS = st.builds(SampleId, run=st.text(), step=COUNTS, prompt_id=st.text(), epoch=COUNTS, group_id=st.text(), member=COUNTS, turn=COUNTS)
VERSIONS = st.builds(VersionCount, version=st.integers(-1, 9), tokens=COUNTS)
SHAPES = st.lists(COUNTS, max_size=3).map(tuple)
HANDLES = st.builds(RTensor, owner=st.text(), key=st.text(), shape=SHAPES, dtype=st.text(), nbytes=COUNTS)
SAMPLES = st.builds(
    Sample,
    id=IDS,
    length=COUNTS,
    prompt_length=COUNTS,
    loss_tokens=COUNTS,
    versions=st.lists(VERSIONS, max_size=2).map(tuple),
    reward=FLOATS,
    finish_reason=REASONS,
    scores=SCORES,
    tensors=st.dictionaries(st.text(max_size=4), HANDLES, max_size=2),
)
ROWS = st.dictionaries(st.text(max_size=4), st.one_of(st.text(), st.integers(), st.lists(st.text(), max_size=2)), max_size=3)
PROMPTS = st.builds(Prompt, id=st.text(), epoch=COUNTS, row=ROWS)
GROUPS = st.builds(Group, id=st.text(), prompt=PROMPTS, samples=st.lists(SAMPLES, max_size=2).map(tuple), worker=st.text(), seconds=FLOATS)
METRICS = st.builds(Metric, reduction=st.sampled_from(["sum", "mean", "min", "max", "last"]), value=FLOATS, weight=FLOATS)
CORE = st.one_of(PROMPTS, IDS, VERSIONS, HANDLES, SAMPLES, GROUPS, METRICS, trajectories())
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    FLOATS,
    st.text(st.characters(exclude_categories=())),  # lone surrogates too: JSON files hold them
    st.binary(),
)
VALUES = st.recursive(
    st.one_of(PLAIN, arrays(), views(), CORE),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text())), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, all the way down; NaN equals NaN within arrays."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_round_trip(value: Any) -> None:
    assert same(decode(encode(value)), value)


@given(st.one_of(arrays(), views()))
def test_arrays_arrive_aligned_without_a_copy(array: np.ndarray) -> None:
    back = decode(encode({"a": array, "odd": "x"}))["a"]
    assert not (back.size and back.flags.writeable) and back.flags.aligned and back.flags.c_contiguous


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_codec_error(body: bytes) -> None:
    with suppress(CodecError):
        decode(body)


@given(VALUES, st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_body_is_a_value_or_a_codec_error(value: Any, data: st.DataObject) -> None:
    body = bytearray(encode(value))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    with suppress(CodecError):
        decode(body[: data.draw(st.integers(0, len(body)))])


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, [("a", "i4")]),
        np.datetime64("2026-01-01"),
        Metric,
        bytearray,
        lambda: None,
    ],
)
def test_an_unknown_type_is_an_error(value: Any) -> None:
    with pytest.raises(CodecError, match="cannot encode"):
        encode([value])


def test_an_unregistered_data_class_is_named() -> None:
    @dataclasses.dataclass
    class Stranger:
        x: int

    with pytest.raises(CodecError, match="Stranger"):
        encode(Stranger(1))


def test_endless_nesting_is_an_error_on_both_sides() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CodecError):
        encode(loop)
    tuples: Any = ()
    for _ in range(5000):
        tuples = (tuples,)
    with pytest.raises(CodecError, match="nested"):
        encode(tuples)
    mark = msgpack.packb(msgpack.ExtType(4, b""))
    assert isinstance(mark, bytes)
    for deep in (b"\x91", b"\x92" + mark):
        with pytest.raises(CodecError):
            decode(deep * 100_000)


@register
@dataclasses.dataclass(frozen=True)
class Pair:
    left: int
    right: int = 0


def _marked(code: int, mark: str, *values: Any) -> bytes:
    packed = msgpack.packb([msgpack.ExtType(code, mark.encode()), *values])
    assert isinstance(packed, bytes)
    return packed


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_marked(3, "Pair left", 1), "Pair lacks \\['right'\\]"),
        (_marked(3, "Pair left right up", 1, 2, 3), "unknown \\['up'\\]"),
        (_marked(3, "Pair right left", 1, 2), "same version"),
        (_marked(3, "Pair left right", 1), "Pair with 1 values for its 2 fields"),
        (_marked(3, "Nobody"), "no data class called 'Nobody'"),
        (_marked(3, ""), "no data class called ''"),
        (_marked(4, "x"), "tuple"),
        (_marked(9, "x"), "unknown extension type 9"),
        (msgpack.packb(msgpack.ExtType(4, b"")), "begins no list"),
        (msgpack.packb([1, msgpack.ExtType(4, b"")]), "begins no list"),
        (msgpack.packb({"a": msgpack.ExtType(3, b"Pair left right")}), "begins no list"),
        (_marked(4, "", msgpack.ExtType(4, b"")), "begins no list"),
        (msgpack.packb(msgpack.ExtType(1, b"")), "not a valid body"),
        (encode([1, 2])[:-1], "not a valid body"),
        (encode([1, 2]) + b"x", "not a valid body"),
        (b"", "not a valid body"),
        (b"\x81\x80\x01", "not a valid body"),  # a map as the key of a map
    ],
)
def test_malformed_bodies_are_refused_with_a_reason(body: bytes, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        decode(body)


@pytest.mark.parametrize(
    ("head", "raw"),
    [
        (b"<i4;3,", b"1234"),
        (b"|O;1,", b"12345678"),
        (b"<i4;-1,", b""),
        (b"<i4;True,", b"1234"),
        (b"<i4;1", b"1234"),
        (b"<i4", b"1234"),
        (b"\xff;1,", b"1234"),
        (b"<i3;1,", b"123"),
        (b"<i4;" + b"0," * 99, b""),
        (b"<i4;0,%d,%d," % (2**62, 2**62), b""),
        (b"<i4;%s," % (b"9" * 5000), b""),
    ],
)
def test_malformed_arrays_are_refused(head: bytes, raw: bytes) -> None:
    with pytest.raises(CodecError, match="not a valid body"):
        decode(msgpack.packb(msgpack.ExtType(1, len(head).to_bytes(2, "big") + head + raw)))


def test_a_trajectory_that_contradicts_itself_is_refused() -> None:
    values = {f.name: None for f in dataclasses.fields(Trajectory)} | {"input_ids": [1, 2], "loss_mask": [1]}
    values |= {"logprobs": [], "versions": []}
    with pytest.raises(CodecError, match="not a valid body: Trajectory: "):
        decode(_marked(3, " ".join(("Trajectory", *values)), *values.values()))


def test_two_classes_of_one_name_cannot_both_be_registered() -> None:
    other = dataclasses.make_dataclass("Pair", ["x"])
    with pytest.raises(AssertionError, match="two data classes are called Pair"):
        register(other)
