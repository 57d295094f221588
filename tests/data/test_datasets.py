"""Loaders: one normal form, stable ids, and a line for every mistake in the data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from areal_mega.config.schema import DatasetSection
from areal_mega.core.errors import UserError
from areal_mega.data.arithmetic import OPERATIONS, arithmetic_rows
from areal_mega.data.registry import load_rows
from areal_mega.data.rows import check_rows

QUESTIONS = Path(__file__).parent / "questions.jsonl"


def load(loader: str = "gsm8k", path: Path | None = QUESTIONS, **fields: Any) -> list[dict[str, Any]]:
    return load_rows(DatasetSection(loader=loader, path=None if path is None else str(path), **fields))


def write(folder: Path, *records: Any, name: str = "train.jsonl") -> Path:
    file = folder / name
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return file


def own_loader(path: str | None, split: str, *, n: int = 2) -> Iterator[dict[str, Any]]:
    for i in range(n):
        yield {"id": f"{split}-{i}", "prompt": f"{i}+{i}=", "answer": 2 * i}


def test_gsm8k_rows_have_the_normal_form() -> None:
    rows = load()
    assert [row["answer"] for row in rows] == ["21", "1,250", "-5"]
    (message,) = rows[0]["messages"]
    assert message["role"] == "user"
    assert message["content"].startswith("A shelf holds 7 jars") and message["content"].endswith("'#### <number>'.")
    assert rows[0]["response"].endswith("#### 21")
    assert len({row["id"] for row in rows}) == 3


def test_gsm8k_instruction_is_the_users_choice() -> None:
    assert load(kwargs={"instruction": "Just the number."})[0]["messages"][0]["content"].endswith("are there?\n\nJust the number.")
    assert load(kwargs={"instruction": ""})[0]["messages"][0]["content"].endswith("are there?")


def test_ids_do_not_depend_on_order_or_limit(tmp_path: Path) -> None:
    lines = QUESTIONS.read_text().splitlines()
    backwards = load(path=write(tmp_path, *lines[::-1]))
    assert [row["id"] for row in backwards] == [row["id"] for row in load()][::-1]
    assert [row["id"] for row in load(limit=2)] == [row["id"] for row in load()][:2]


def test_equal_rows_get_different_ids(tmp_path: Path) -> None:
    line = QUESTIONS.read_text().splitlines()[0]
    first, second = load(path=write(tmp_path, line, line))
    assert second["id"] == first["id"] + "-2"


def test_folder_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    records = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "test.parquet")
    write(tmp_path, *records)
    assert load(path=tmp_path) == load(path=tmp_path, split="test") == load(path=tmp_path / "test.parquet") == load()


def test_empty_lines_hold_no_record(tmp_path: Path) -> None:
    assert len(load(path=write(tmp_path, *QUESTIONS.read_text().splitlines(), "", "  "))) == 3


def test_jsonl_columns_are_renamed_and_others_kept(tmp_path: Path) -> None:
    file = write(tmp_path, {"q": "1+1=", "a": 2, "level": 3, "id": 7})
    assert load("jsonl", file, kwargs={"columns": {"prompt": "q", "answer": "a"}}) == [
        {"prompt": "1+1=", "answer": "2", "level": 3, "id": "7"}
    ]


def test_own_loader_by_import_path() -> None:
    assert [row["answer"] for row in load("data.test_datasets:own_loader", None, kwargs={"n": 3})] == ["0", "2", "4"]


def test_rows_of_a_program_are_checked_alike() -> None:
    assert check_rows([{"prompt": "1+1=", "answer": 2}], "train_dataset")[0]["answer"] == "2"
    with pytest.raises(UserError, match="train_dataset, row 1: no `answer`"):
        check_rows([{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2="}], "train_dataset")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "How many?"}, "line 2: no `answer`"),
        ({"question": "How many?", "answer": " "}, "line 2: no `answer`"),
        ({"question": "How many?", "answer": "three"}, "line 2: `answer` does not end with '#### <number>'"),
        ({"question": "How many?", "answer": "#### "}, "line 2: `answer` does not end with"),
        ({"answer": "#### 3"}, "line 2: no `question`"),
        ("{broken", "line 2: not JSON"),
        ("[1]", "line 2: must be a JSON object"),
    ],
)
def test_gsm8k_mistakes_name_file_and_line(tmp_path: Path, record: Any, message: str) -> None:
    file = write(tmp_path, QUESTIONS.read_text().splitlines()[0], record)
    with pytest.raises(UserError) as raised:
        load(path=file)
    assert str(file) in str(raised.value) and message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "1+1="}, "no `answer`"),
        ({"prompt": "1+1=", "answer": None}, "no `answer`"),
        ({"prompt": "1+1=", "answer": True}, "text or a number, not bool"),
        ({"prompt": "1+1=", "answer": ["2"]}, "text or a number, not list"),
        ({"prompt": "", "answer": "2"}, "`prompt` must be a text"),
        ({"answer": "2"}, "has neither"),
        ({"prompt": "a", "messages": [], "answer": "2"}, "has both"),
        ({"messages": [], "answer": "2"}, "`messages` must be a list"),
        ({"messages": [{"role": "user"}], "answer": "2"}, "message 0 must have"),
        ({"messages": [{"role": "human", "content": "x"}], "answer": "2"}, "role 'human'"),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "2"}, "ends with the assistant's turn"),
        ({"prompt": "1+1=", "answer": "2", "response": 2}, "`response` must be a text"),
    ],
)
def test_rows_that_are_not_in_normal_form(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        load("jsonl", write(tmp_path, record))
    assert message in str(raised.value) and "line 1" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loader": "gsm9k"}, "choose arithmetic, gsm8k, jsonl"),
        ({"loader": "data.test_datasets:own_loadr"}, "did you mean 'own_loader'"),
        ({"loader": "gsm8k", "path": "/nowhere/train.jsonl"}, "does not exist"),
        ({"loader": "gsm8k", "path": str(QUESTIONS.parent), "split": "other"}, "none of other.jsonl"),
        ({"loader": "gsm8k", "path": str(QUESTIONS), "kwargs": {"instuction": ""}}, "instuction"),
        ({"loader": "jsonl"}, "needs a path"),
        ({"loader": "jsonl", "path": str(QUESTIONS), "kwargs": {"columns": {"prompt": "q"}}}, "no column 'q'"),
        ({"loader": "arithmetic", "path": "x"}, "reads no file"),
        ({"loader": "arithmetic", "split": "test"}, "train and valid"),
        ({"loader": "arithmetic", "kwargs": {"operations": ["/"]}}, "distinct +, -, *"),
        ({"loader": "arithmetic", "kwargs": {"low": 5, "high": 4}}, "5 > 4"),
        ({"loader": "arithmetic", "kwargs": {"held_out": 0}}, "between 0 and 1"),
        ({"loader": "arithmetic", "kwargs": {"high": 10**6}}, "set count"),
        ({"loader": "arithmetic", "kwargs": {"high": 1, "count": 100}}, "count asks for 100"),
    ],
)
def test_wrong_sections_are_one_line(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_rows(DatasetSection(**section))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_two_rows_with_one_id_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {"id": "a", "prompt": "1", "answer": "1"}, {"id": "a", "prompt": "2", "answer": "2"})
    with pytest.raises(UserError, match=r"line 2: id 'a' was already used at .*line 1"):
        load("jsonl", file)


def problems(split: str, **kwargs: Any) -> list[dict[str, Any]]:
    return [dict(row) for _, row in arithmetic_rows(path=None, split=split, **kwargs)]


@settings(deadline=None, max_examples=50)
@given(
    low=st.integers(-20, 20),
    width=st.integers(0, 12),
    operations=st.lists(st.sampled_from(list(OPERATIONS)), min_size=1, unique=True),
    held_out=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
)
def test_arithmetic_splits_are_disjoint_and_complete(low: int, width: int, operations: list[str], held_out: float, seed: int) -> None:
    kwargs: dict[str, Any] = {"low": low, "high": low + width, "operations": operations, "held_out": held_out}
    train, valid = problems("train", seed=seed, **kwargs), problems("valid", seed=seed + 1, **kwargs)
    ids = [row["id"] for row in train + valid]
    assert len(set(ids)) == len(ids) == len(operations) * (width + 1) ** 2
    held = {row["id"] for row in valid}
    for row in train:
        assert eval(row["id"]) == int(row["answer"])
        assert row["prompt"] == row["id"] + "=" and row["response"] == row["answer"]
    for a in range(low, low + width + 1):
        for b in range(low, low + width + 1):
            for op in set(operations) & {"+", "*"}:
                names = [f"{x}{op}{y}" if y >= 0 else f"{x}{op}({y})" for x, y in ((a, b), (b, a))]
                assert (names[0] in held) == (names[1] in held), "a problem and its mirror image are in different splits"


def test_arithmetic_is_deterministic_and_count_is_a_prefix() -> None:
    assert problems("train", seed=3) == problems("train", seed=3) != problems("train", seed=4)
    assert problems("train", seed=3, count=10) == problems("train", seed=3)[:10]
    held_out = len(problems("valid"))
    assert 0.08 < held_out / 10_000 < 0.12


def test_arithmetic_of_large_numbers_is_drawn_without_repeats() -> None:
    rows = problems("train", high=10**9, count=2000)
    assert len({row["id"] for row in rows}) == 2000
