"""From rows to tokens: the template applied once, nothing truncated, supervised examples that continue prompts as rollouts do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_tokenizer

from areal_mega.core.errors import UserError
from areal_mega.data.prompts import fit_prompts, prompt_tokens
from areal_mega.data.supervised import supervised_example, supervised_examples

CHAT: dict[str, Any] = {"id": "c", "messages": [{"role": "user", "content": "7+5?"}], "answer": "12", "response": "It is 12."}
RAW: dict[str, Any] = {"id": "r", "prompt": "7+5=", "answer": "12", "response": "12"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def test_template_is_applied_once_and_ends_where_the_answer_begins(tokenizer: Any) -> None:
    ids = prompt_tokens(tokenizer, CHAT)
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == "<|im_start|>user\n7+5?<|im_end|>\n<|im_start|>assistant\n"


def test_raw_prompt_is_verbatim(tokenizer: Any) -> None:
    assert tokenizer.decode(prompt_tokens(tokenizer, RAW)) == "7+5="


def test_tokenizer_without_template_is_named(tokenizer: Any) -> None:
    plain = tiny_tokenizer()
    plain.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        prompt_tokens(plain, CHAT)
    assert prompt_tokens(plain, RAW)


def test_prompt_without_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no tokens"):
        prompt_tokens(tokenizer, {"id": "e", "prompt": ""})


@pytest.mark.parametrize("row", [CHAT, RAW])
def test_supervised_example_is_prompt_response_end(tokenizer: Any, row: dict[str, Any]) -> None:
    example = supervised_example(tokenizer, row)
    ids, mask = example["input_ids"], example["loss_mask"]
    assert (ids.dtype, mask.dtype, ids.shape) == (np.int32, np.bool_, mask.shape)
    prompt = prompt_tokens(tokenizer, row)
    assert ids[: len(prompt)].tolist() == prompt and not mask[: len(prompt)].any() and mask[len(prompt) :].all()
    assert tokenizer.decode(ids[mask].tolist()) == row["response"] + "<|im_end|>"


def test_supervised_examples_keep_order_and_name_what_is_missing(tokenizer: Any) -> None:
    assert [len(e["input_ids"]) for e in supervised_examples(tokenizer, [RAW, CHAT])] == [7, len(prompt_tokens(tokenizer, CHAT)) + 10]
    with pytest.raises(UserError, match="row 'n' has no `response`"):
        supervised_examples(tokenizer, [RAW, {"id": "n", "prompt": "1+1=", "answer": "2"}])


def test_long_prompts_are_errors_or_skipped_and_never_cut(tokenizer: Any) -> None:
    long = {"id": "long", "prompt": "1+" * 30 + "1=", "answer": "31"}
    with pytest.raises(UserError, match=r"row 'long' has 62 tokens and data.max_prompt_tokens is 10; raise it by 52"):
        fit_prompts([RAW, long], tokenizer, max_tokens=10, overlong="error")
    fitting = fit_prompts([RAW, long], tokenizer, max_tokens=10, overlong="skip")
    assert (fitting.rows, fitting.skipped) == ([RAW], ("long",))
    assert fit_prompts([long], tokenizer, max_tokens=62, overlong="error").skipped == ()
    with pytest.raises(UserError, match="all 1 prompts are longer"):
        fit_prompts([long], tokenizer, max_tokens=10, overlong="skip")
