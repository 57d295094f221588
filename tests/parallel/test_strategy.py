from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.core.errors import UserError
from areal_mega.parallel.strategy import ENGINES, LETTERS, ParallelStrategy, even_layers, parse

SMALL = st.integers(1, 6)


@st.composite
def megatron_strategies(draw: st.DrawFn) -> ParallelStrategy:
    tp, cp, pp, ep, etp, edp = (draw(SMALL) for _ in range(6))
    vpp = draw(SMALL) if pp > 1 else 1
    experts = ep * etp * edp
    dp = experts // math.gcd(experts, tp * cp) * draw(st.integers(1, 3))
    layers = draw(st.one_of(st.just(()), st.tuples(*[st.integers(1, 99)] * (pp * vpp))))
    return ParallelStrategy("megatron", tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp, stage_layers=layers)


@st.composite
def server_strategies(draw: st.DrawFn) -> ParallelStrategy:
    engine = draw(st.sampled_from(["sglang", "vllm", "embedded"]))
    if engine == "embedded":
        return ParallelStrategy(engine, dp=draw(SMALL))
    ep = draw(SMALL)
    return ParallelStrategy(engine, ep=ep, tp=ep * draw(SMALL), pp=draw(SMALL), dp=draw(SMALL))


@given(st.one_of(megatron_strategies(), server_strategies()))
def test_value_round_trips_through_its_text(s: ParallelStrategy) -> None:
    assert parse(str(s)) == s
    assert str(parse(str(s))) == str(s)


@given(st.data(), SMALL, SMALL, SMALL, SMALL)
def test_text_round_trips_as_written_in_any_order(data: st.DataObject, d: int, t: int, p: int, c: int) -> None:
    dims = data.draw(st.permutations([f"d{d}", f"t{t}", f"p{p}", f"c{c}", f"e{d * t * c}"]))
    text = "megatron:" + "".join(dims)
    s = parse(text)
    assert str(s) == text
    assert (s.dp, s.tp, s.pp, s.cp, s.ep, s.etp, s.vpp, s.edp) == (d, t, p, c, d * t * c, 1, 1, 1)


@given(megatron_strategies())
def test_world_size_and_expert_data_parallelism(s: ParallelStrategy) -> None:
    assert s.world_size == s.tp * s.pp * s.cp * s.dp
    assert s.edp >= 1
    assert s.pp * s.ep * s.etp * s.edp == s.world_size
    assert s.replica_size * s.dp == s.world_size


@given(SMALL, SMALL, SMALL, SMALL, SMALL, SMALL)
def test_illegal_products_print_the_arithmetic_and_a_legal_neighbour(t: int, p: int, c: int, d: int, e: int, etp: int) -> None:
    text = f"megatron:(attn:d{d}t{t}p{p}c{c}|ffn:e{e}t{etp})"
    if (d * t * c) % (e * etp) == 0:
        assert parse(text).edp == d * t * c // (e * etp)
        return
    with pytest.raises(UserError) as error:
        parse(text)
    message = str(error.value)
    assert f"{t}*{p}*{c}*{d} / ({p}*{e}*{etp}) = {t * p * c * d}/{p * e * etp}" in message
    neighbours = re.search(r"legal: (.*)$", message)
    assert neighbours is not None
    for legal in neighbours[1].split(" or "):
        parse(legal)


def test_two_parts_and_their_checks() -> None:
    s = parse("megatron:(attn:d4t2p2c1|ffn:e8t1p2)")
    assert s == parse("megatron:d4t2p2c1e8")
    assert parse("megatron:(attn:d4t2|ffn:e2t2d2)") == ParallelStrategy("megatron", dp=4, tp=2, ep=2, etp=2)


def test_text_does_not_outlive_a_change() -> None:
    s = replace(parse("megatron:t2d4c1"), dp=2)
    assert str(s) == "megatron:d2t2"
    assert parse("megatron:t2d2c1") == s and hash(parse("megatron:t2d2c1")) == hash(s)


BAD = [
    ("megatron:d2d3", "given twice (d2 and d3)", "megatron:d2"),
    ("megatron:d0", "below 1", "megatron:d1"),
    ("megatron:d2t0", "below 1", "megatron:d2t1"),
    ("sglang:d2c2", "no dimension c (context parallelism)", "sglang:d2"),
    ("sglang:d2v2", "no dimension v (virtual pipeline stages)", "sglang:d2"),
    ("embedded:d1t2", "no dimension t (tensor parallelism)", "embedded:d1"),
    ("sglang:d1t2e3", "2/3 is not a whole number", "sglang:d1t3e3"),
    ("megatron:d1v2", "needs a pipeline", "megatron:d1"),
    ("megatron:(attn:d2p2|ffn:e2p4)", "ffn has p4 but attn has p2", "megatron:d2p2e2"),
    ("megatron:(attn:d2|ffn:e2d3)", "d3*e2*t1 = 6 ranks per stage, but attn d*t*c = 2", "megatron:d2e2"),
    ("megatron:d1p2[3]", "1 counts of layers for p2", "megatron:d1p2[2,1]"),
    ("megatron:d1p2[3,5]v2", "2 counts of layers for p*v = 2*2 = 4 virtual stages", "megatron:d1p2[2,2,2,2]v2"),
    ("megatron:d1p3[2,0,2]", "a stage without layers", "megatron:d1p3[1,2,1]"),
    ("megatron:d2[1,1]p2", "d2[1,1] has counts of layers, which only p takes", "megatron:d2p2"),
    ("megatron:(attn:d1p2|ffn:e1p2[1,1])", "given in the attn part", "megatron:(attn:d1p2[1,1]|ffn:e1)"),
    ("sglang:d1p2[1,3]", "only megatron takes counts of layers", "sglang:d1p2"),
    ("megatron:d2p2[3,5]e3", "4/6 is not a whole number", "megatron:d2p2[3,5]e2"),
    ("megatron:d2t2e3", "4/3 is not a whole number", "megatron:d2t2e2"),
]


@pytest.mark.parametrize(("text", "reason", "legal"), BAD)
def test_mistakes_say_why_and_what_is_legal(text: str, reason: str, legal: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    message = str(error.value)
    assert reason in message and text in message and f"legal: {legal}" in message and "\n" not in message
    parse(legal)


@pytest.mark.parametrize(
    "text",
    ["", "d4", "megatron", "megatron:", "megatron:d", "megatron:4", "megatron:d2 t2", "megatron:D2", "megatron:d-1", "megatron:d1.5"]
    + ["megatron:(d2)", "megatron:(attn:d2|ffn:)", "megatron:(attn:|ffn:e2)", "megatron:(attn:d2)", "megatron:(attn:d2|ffn:e2"]
    + ["megatron:(attn:d2e2|ffn:e2)", "megatron:(attn:d2|ffn:c2)", "sglang:(attn:d2|ffn:e2)", "megatrn:d2", "tpu:d2", "megatron:d2x"]
    + ["megatron:d\u0662"],
)
def test_what_is_not_a_strategy_is_one_line(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert "\n" not in str(error.value)


@given(st.integers(1, 200), st.integers(1, 20))
def test_layers_are_spread_evenly(layers: int, stages: int) -> None:
    counts = even_layers(layers, stages)
    assert len(counts) == stages and sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[0] <= max(counts[1:-1], default=counts[0]) and counts[-1] <= counts[0], "embedding and output layer cost too"


def test_close_engine_names_are_suggested() -> None:
    with pytest.raises(UserError, match="did you mean sglang"):
        parse("sglng:d1")


@given(st.text(alphabet="megatronsgl:dtpcve0123()|afn[],", max_size=30))
def test_any_text_parses_or_is_a_users_error(text: str) -> None:
    try:
        s = parse(text)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert str(s) == text and parse(str(replace(s))) == s


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"megatron"}))
def test_dimensions_given_in_code_are_checked_too(engine: str) -> None:
    for letter, name in LETTERS.items():
        if letter not in ENGINES[engine]:
            with pytest.raises(UserError, match=f"no dimension {letter}"):
                ParallelStrategy(engine, **{name: 2})
    with pytest.raises(UserError, match="expert tensor parallelism"):
        ParallelStrategy(engine, etp=2)
    with pytest.raises(UserError, match="at least 1"):
        ParallelStrategy(engine, dp=0)
