"""Bodies of /generate: what is accepted, what is refused and how it is said."""

from __future__ import annotations

from typing import Any

import pytest

from areal_mega.serving.protocol import BadRequest, ServingFacts, parse_generate, parse_sampling

FACTS = ServingFacts(
    vocab=100, context_length=64, routed_experts=False, encode=lambda text: [ord(c) % 100 for c in text], decode_known=True
)


def parse(**body: Any) -> Any:
    return parse_generate(body, FACTS)


def test_defaults_are_sglangs() -> None:
    call = parse(input_ids=[1, 2], sampling_params={"max_new_tokens": 8})
    [s] = call.sequences
    assert call.single and not call.stream
    assert (s.params.temperature, s.params.top_p, s.params.top_k, s.params.min_p, s.params.n) == (1.0, 1.0, -1, 0.0, 1)
    assert not s.wanted.logprobs and s.wanted.logprob_start == -1
    assert parse_sampling({}).max_new_tokens == 128


def test_one_answer_per_prompt_and_per_n() -> None:
    assert parse(input_ids=[[1], [2]], sampling_params={"max_new_tokens": 1}).single is False
    assert parse(input_ids=[[1]], sampling_params={"max_new_tokens": 1}).single is False
    call = parse(input_ids=[1], rid="r", sampling_params={"n": 3, "max_new_tokens": 1, "sampling_seed": 5})
    assert not call.single and [s.rid for s in call.sequences] == ["r_0", "r_1", "r_2"]
    assert len({s.seed for s in call.sequences}) == 3
    call = parse(
        input_ids=[[1], [1]],
        rid=["a", "b"],
        return_logprob=[True, False],
        sampling_params=[{"sampling_seed": 3, "max_new_tokens": 1}, {"sampling_seed": 4, "max_new_tokens": 2}],
    )
    assert [(s.rid, s.seed, s.params.max_new_tokens, s.wanted.logprobs) for s in call.sequences] == [("a", 3, 1, True), ("b", 4, 2, False)]


def test_seeds_that_nobody_gave_differ() -> None:
    call = parse(input_ids=[1], sampling_params={"n": 16, "max_new_tokens": 1})
    assert len({s.seed for s in call.sequences}) == 16


def test_text_is_tokenised() -> None:
    assert parse(text="ab", sampling_params={"max_new_tokens": 1}).sequences[0].prompt.tolist() == [97, 98]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "exactly one of input_ids and text"),
        ({"input_ids": [1], "text": "a"}, "exactly one of input_ids and text"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [[]]}, "no tokens"),
        ({"input_ids": [1.5]}, "list of integers"),
        ({"input_ids": [True]}, "list of integers"),
        ({"input_ids": [100]}, "token id 100 is not in the vocabulary of 100"),
        ({"input_ids": [-1]}, "token id -1 is not in the vocabulary"),
        ({"input_ids": [1] * 60}, "You requested a total of 68 tokens: 60 tokens from the input messages and 8 tokens for the completion"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "`sampling_params` has 1 entries for 2 prompts"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "`rid` has 1 entries for 2 prompts"),
        ({"input_ids": [1], "return_logprob": "yes"}, "`return_logprob` must be a bool"),
        ({"input_ids": [1], "return_routed_experts": True}, "start the server with --enable-return-routed-experts"),
        ({"input_ids": [1], "lora_path": "x"}, "`lora_path` is not served"),
        ({"input_ids": [1], "token_ids_logprob": [3]}, "`token_ids_logprob` is not served"),
    ],
)
def test_bodies_that_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refusal:
        parse(**{"sampling_params": {"max_new_tokens": 8}, **body})
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 1}, "unknown field `temprature`, expected one of `max_new_tokens`, `stop`"),
        ({"temperature": -1}, r"temperature must be in \[0, inf\], got -1"),
        ({"temperature": "hot"}, "`temperature` must be a number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p must be in \[0, 1\]"),
        ({"top_k": 0}, "top_k must be -1"),
        ({"top_k": 2.5}, "`top_k` must be an integer"),
        ({"n": 0}, "n must be at least 1"),
        ({"max_new_tokens": -1}, "min_new_tokens must be in"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens must be in"),
        ({"stop": [3]}, "`stop` must be a string"),
        ({"stop_token_ids": ["a"]}, "`stop_token_ids` must be a list of integers"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty` is not served"),
        ({"regex": "a+"}, "`regex` is not served"),
        ({"ignore_eos": 1}, "`ignore_eos` must be a boolean"),
    ],
)
def test_sampling_parameters_that_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_sampling(params)


def test_parameters_that_change_nothing_are_accepted() -> None:
    params = parse_sampling({"repetition_penalty": 1.0, "regex": None, "frequency_penalty": 0, "stop": None, "temperature": 1e-9})
    assert params.stop == () and params.temperature == 0.0


def test_without_a_tokenizer_text_is_refused() -> None:
    facts = ServingFacts(vocab=100, context_length=64, routed_experts=False, encode=None, decode_known=False)
    with pytest.raises(BadRequest, match="without a tokenizer; send input_ids"):
        parse_generate({"text": "a"}, facts)
    with pytest.raises(BadRequest, match="stop strings need a tokenizer"):
        parse_generate({"input_ids": [1], "sampling_params": {"stop": "a", "max_new_tokens": 2}}, facts)
