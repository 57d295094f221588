"""Every kind of answer that a GSM8K verifier gets wrong somewhere: each form right, and each near miss wrong."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.rewards.arithmetic import arithmetic_reward
from areal_mega.rewards.gsm8k import gsm8k_reward
from areal_mega.rewards.numbers import Quantity, Reading, last_quantity, read_quantity


def score(completion: str, answer: str = "18", **kwargs: object) -> dict[str, float]:
    return gsm8k_reward("", completion, {"answer": answer}, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("18.", 18),
        ("18.00", 18),
        (".5", Fraction(1, 2)),
        ("-3", -3),
        ("\u22123", -3),
        ("+7", 7),
        ("$1,234", 1234),
        ("\\$18", 18),
        ("$ 18", 18),
        ("-$5", -5),
        ("$-5", -5),
        ("€5", 5),
        ("1,234,567.50 dollars", Fraction(2469135, 2)),
        ("10\u202f000", 10000),
        ("1.2 million", 1_200_000),
        ("1e3", 1000),
        ("3/4", Fraction(3, 4)),
        ("-1/2", Fraction(-1, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("18 eggs", 18),
        ("18cm", 18),
        ("18 m^2", 18),
        ("$18/hour", 18),
        ("**18**", 18),
        ("(18)", 18),
        ("18 \\text{ dollars}", 18),
        ("the answer is 18", 18),
        ("x = 18", 18),
        ("12 + 6 = $18", 18),
        ("18 = x", 18),
        ("42 apples in 3 boxes", 42),
    ],
)
def test_plain_numbers_are_read_exactly(text: str, value: int | Fraction) -> None:
    assert read_quantity(text) == Quantity(Fraction(value))


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("", Reading.NOTHING),
        ("eighteen", Reading.NOTHING),
        ("1/0", Reading.NOTHING),
        ("9" * 5000, Reading.NOTHING),
        ("1e999999", Reading.NOTHING),
        ("7 or 8", Reading.SEVERAL),
        ("7, 8", Reading.SEVERAL),
        ("7 and 8", Reading.SEVERAL),
        ("3 apples and 4 pears", Reading.SEVERAL),
        ("5 to 6", Reading.SEVERAL),
        ("1,23", Reading.SEVERAL),
        ("5 * 4", Reading.EXPRESSION),
        ("2^3", Reading.EXPRESSION),
        ("\\frac{3}{4}", Reading.EXPRESSION),
        ("10 000", Reading.EXPRESSION),
    ],
)
def test_what_is_not_one_plain_number(text: str, reading: Reading) -> None:
    assert read_quantity(text) is reading


@pytest.mark.parametrize(
    ("text", "value"),
    [("10-3", 3), ("10 - 3", 3), ("part-3", 3), ("he loses -3", -3), ("So $1,234.50.", Fraction(2469, 2)), ("5 + 6 = 11 apples.", 11)],
)
def test_last_number_of_running_text(text: str, value: int | Fraction) -> None:
    assert last_quantity(text) == Quantity(Fraction(value))


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "${}", "{}.00", "{} apples", "**{}**", "= {}", "{}."]))
def test_any_integer_in_any_form_is_right_and_its_neighbour_wrong(value: int, form: str) -> None:
    completion = f"Some steps 1 + 1 = 2.\n#### {form.format(value)}\nAnd more text, with 77 numbers."
    assert score(completion, str(value)) == {"reward": 1.0, "correct": 1.0, "parsed": 1.0, "format": 1.0}
    assert score(completion, str(value + 1))["reward"] == 0.0


# No powers: a tower of them keeps any algebra system busy for ever, which is what the runner's time-out is for.
@settings(deadline=None)
@given(st.one_of(st.text(), st.text(alphabet="0123456789.,$-+/=%() \\{}frac\n#")))
def test_no_text_breaks_the_verifier(text: str) -> None:
    for completion in (text, f"#### {text}", f"\\boxed{{{text}}}"):
        out = score(completion)
        assert out["correct"] in (0.0, 1.0) and out["parsed"] in (0.0, 1.0)
        assert out["correct"] <= out["parsed"]


@pytest.mark.parametrize(
    ("completion", "answer", "correct"),
    [
        ("#### 18" + "\n\nNext question: ..." * 200, "18", 1),  # much text after the answer
        ("#### 17\n#### 18", "18", 1),  # the last one counts
        ("#### 18\n#### 17", "18", 0),
        ("#### 1", "18", 0),  # not its first character
        ("#### 180", "18", 0),
        ("####18", "18", 1),
        ("####: 18", "18", 1),
        ("####\n18", "18", 1),
        ("#### \\frac{3}{4}", "0.75", 1),
        ("#### $\\sqrt{16}$", "4", 1),
        ("#### 5 * 4", "20", 1),
        ("#### 5 * 4", "21", 0),
        ("#### 1 000 000", "1,000,000", 1),
        ("#### 50%", "50", 1),
        ("#### 50%", "0.5", 1),
        ("#### 0.5%", "50%", 0),
        ("The answer is \\boxed{18}.", "18", 1),
        ("\\boxed{\\frac{1}{2}} of them", "1/2", 1),
        ("\\boxed{17} then \\boxed{18}", "18", 1),
        ("so she has 17 + 1 = 18 left.", "18", 1),
        ("18 eggs in 3 boxes", "18", 0),  # without a marker the last number counts
        ("#### \\boxed{18}", "18", 1),
        ("#### 17 \\boxed{18}", "18", 0),
        ("#### 17\n\\boxed{18}", "18", 0),  # a marker goes before a box
        ("\\boxed{18", "18", 1),  # a box that was never closed is no box
        ("#### 18.0000001", "18", 0),
    ],
)
def test_which_answer_counts(completion: str, answer: str, correct: int) -> None:
    out = score(completion, answer)
    assert (out["reward"], out["correct"], out["parsed"]) == (correct, correct, 1.0)


@pytest.mark.parametrize("completion", ["", "I do not know.", "####", "#### ", "#### 7 or 18", "\\boxed{?}", "\\boxed"])
def test_no_answer_is_wrong_and_counted_apart(completion: str) -> None:
    assert (score(completion, "18")["reward"], score(completion, "18")["parsed"]) == (0.0, 0.0)


def test_strict_wants_the_marker() -> None:
    assert score("\\boxed{18}", strict=True) == {"reward": 0.0, "correct": 0.0, "parsed": 0.0, "format": 0.0}
    assert score("#### 18", strict=True)["reward"] == 1.0


def test_format_reward_is_apart_from_correctness() -> None:
    assert score("#### 17", format_reward=0.1) == {"reward": 0.1, "correct": 0.0, "parsed": 1.0, "format": 1.0}
    assert score("18", format_reward=0.1) == {"reward": 1.0, "correct": 1.0, "parsed": 1.0, "format": 0.0}
    assert score("#### nothing", format_reward=0.1)["reward"] == 0.0


def test_zero_is_an_answer() -> None:
    assert score("#### 0", "0")["reward"] == 1.0
    assert score("#### 0", "1") == {"reward": 0.0, "correct": 0.0, "parsed": 1.0, "format": 1.0}


@pytest.mark.parametrize("answer", ["", "unknown", "7 or 8"])
def test_unreadable_reference_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="reference"):
        score("#### 18", answer)


@pytest.mark.parametrize(
    ("completion", "reward", "parsed"),
    [
        ("42", 1, 1),
        (" 42\n", 1, 1),
        ("+42", 1, 1),
        ("042", 1, 1),
        ("43", 0, 1),
        ("-42", 0, 1),
        ("42.", 0, 0),
        ("42 43", 0, 0),
        ("4 2", 0, 0),
        ("", 0, 0),
        ("forty", 0, 0),
        ("\u0664\u0662", 0, 0),  # digits of another script
        ("1" * 5000, 0, 0),
    ],
)
def test_arithmetic(completion: str, reward: float, parsed: float) -> None:
    assert arithmetic_reward("17+25=", completion, {"answer": "42"}) == {"reward": reward, "parsed": parsed}
