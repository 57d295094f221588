"""Supervised examples for the warm-up: prompt, the data's own answer, end of sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_mega.core.errors import UserError
from areal_mega.data.prompts import prompt_tokens


def supervised_example(tokenizer: Any, row: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """``input_ids`` (int32, [length]) and ``loss_mask`` (bool, [length]; True on the response and the end-of-sequence token).

    Prompt and response are tokenised apart, exactly as a rollout continues a prompt: a joint encoding could merge the tokens at
    the border into one that generation never produces.

    Raises:
        UserError: a row without ``response``, or a tokenizer without an end-of-sequence token.
    """
    if not row.get("response"):
        raise UserError(f"row '{row['id']}' has no `response`: the supervised warm-up (warmup.steps > 0) needs one in every row")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-sequence token, which ends every response")
    prompt = prompt_tokens(tokenizer, row)
    response = [int(i) for i in tokenizer.encode(row["response"], add_special_tokens=False)] + [int(tokenizer.eos_token_id)]
    return {
        "input_ids": np.array(prompt + response, dtype=np.int32),
        "loss_mask": np.array([False] * len(prompt) + [True] * len(response), dtype=np.bool_),
    }


def supervised_examples(tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, np.ndarray]]:
    """One example per row, in their order."""
    return [supervised_example(tokenizer, row) for row in rows]
