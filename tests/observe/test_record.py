"""Step records: typed reductions, absence, strict JSON, torn and repeated lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.core.metrics import last, maximum, mean, merge, minimum, total
from areal_mega.observe.jsonl import JsonlSink
from areal_mega.observe.record import StepRecord, read_records, whole_lines


def test_metrics_are_reduced_by_their_own_reduction_and_the_unmeasured_is_absent() -> None:
    ranks = [
        {"a": total(1), "b": mean(1, 1), "c": maximum(3), "d": minimum(3), "e": last(1), "f": mean(0, 0)},
        {"a": total(2), "b": mean(5, 3), "c": maximum(9), "d": minimum(2), "e": last(2), "f": mean(0, 0)},
    ]
    record = StepRecord.of(4, merge(ranks), {"staleness/age": {1: 5, 0: 2}, "empty": {}})
    assert record.metrics == {"a": 3, "b": 1.5, "c": 9, "d": 2, "e": 2}
    assert record.reductions == {"a": "sum", "b": "mean", "c": "max", "d": "min", "e": "last"}
    assert record.histograms == {"staleness/age": {0: 2, 1: 5}}


numbers = st.floats(allow_nan=False)


@given(
    step=st.integers(0, 10**6),
    metrics=st.dictionaries(st.text(min_size=1), numbers, max_size=5),
    bins=st.dictionaries(st.integers(-5, 50), st.integers(0, 10**9), max_size=5),
)
def test_a_line_reads_back_as_it_was(step: int, metrics: dict[str, float], bins: dict[int, int]) -> None:
    record = StepRecord(step=step, time=1700000000.125, metrics=metrics, reductions=dict.fromkeys(metrics, "sum"), histograms={"h": bins})
    line = record.to_line()
    assert "\n" not in line
    assert StepRecord.from_line(line) == record


def test_what_is_not_finite_is_strict_json_all_the_same() -> None:
    line = StepRecord(step=1, time=0.0, metrics={"a": math.nan, "b": math.inf, "c": -math.inf}).to_line()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = StepRecord.from_line(line).metrics
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf


def test_a_line_has_the_documented_shape(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(StepRecord.of(7, {"reward/mean": mean(1, 2)}, {"staleness/age": {0: 120, 1: 33}}))
    data = json.loads((tmp_path / "metrics.jsonl").read_text())  # before close: every step is flushed
    assert data["time"] > 1.7e9
    del data["time"]
    assert data == {
        "step": 7,
        "metrics": {"reward/mean": 0.5},
        "reductions": {"reward/mean": "mean"},
        "histograms": {"staleness/age": {"0": 120, "1": 33}},
    }
    sink.close()


def test_a_step_written_again_wins_name_by_name(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for step, metrics in [(1, {"a": last(1)}), (2, {"a": last(2), "eval/accuracy": last(0.5)}), (3, {"a": last(3)}), (2, {"a": last(20)})]:
        sink.write(StepRecord.of(step, metrics))
    sink.close()
    records = read_records(sink.path)
    assert [r.step for r in records] == [1, 2, 3]
    assert records[1].metrics == {"a": 20, "eval/accuracy": 0.5}


def test_half_a_line_is_cut_off_when_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = StepRecord.of(1, {"a": last(1)}).to_line() + "\n"
    path.write_text(whole + '{"step":2,"met')
    assert [r.step for r in read_records(path)] == [1]  # a reader leaves it alone
    sink = JsonlSink(tmp_path)
    assert sink.torn_bytes == len('{"step":2,"met')
    sink.write(StepRecord.of(2, {"a": last(2)}))
    sink.close()
    assert [r.step for r in read_records(path)] == [1, 2]
    assert JsonlSink(tmp_path).torn_bytes == 0


def test_reading_goes_on_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes("é\nb\nc".encode())
    lines, offset = whole_lines(path)
    assert lines == ["é", "b"] and offset == 5
    with path.open("ab") as file:
        file.write(b"d\n")
    assert whole_lines(path, offset) == (["cd"], 8)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(StepRecord.of(1, {}).to_line() + "\n{}\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a step record"):
        read_records(path)
