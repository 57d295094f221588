"""From a row to prompt tokens: one function that rollout, evaluation, the warm-up and the length check all use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_mega.core.errors import UserError
from areal_mega.data.rows import Row


def prompt_tokens(tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """Token ids of a row's prompt.

    ``messages`` pass through the tokenizer's chat template once, ending where the assistant's turn begins. ``prompt`` is encoded
    verbatim: no template, and no special token that is not written in it.

    Raises:
        UserError: ``messages`` and a tokenizer that has no chat template, or a prompt of no tokens.
    """
    if "prompt" in row:
        ids = tokenizer.encode(row["prompt"], add_special_tokens=False)
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"row '{row['id']}' has `messages`, and the tokenizer of '{tokenizer.name_or_path}' has no chat template; "
                "use an instruction-tuned model, or data with `prompt`"
            )
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
    if not ids:
        raise UserError(f"row '{row['id']}' has a prompt of no tokens: generation needs at least one to start from")
    return [int(i) for i in ids]


@dataclass(frozen=True, slots=True)
class FittingRows:
    """Rows whose prompts fit, and the ids of those skipped because they did not."""

    rows: list[Row]
    skipped: tuple[str, ...]


def fit_prompts(rows: Sequence[Row], tokenizer: Any, *, max_tokens: int, overlong: Literal["error", "skip"]) -> FittingRows:
    """Tokenise every prompt once and deal with those over ``max_tokens``; no prompt is ever truncated.

    Raises:
        UserError: a prompt is too long and ``overlong`` is ``error``, or all of them are.
    """
    fitting: list[Row] = []
    skipped: list[str] = []
    longest = 0
    for row in rows:
        length = len(prompt_tokens(tokenizer, row))
        longest = max(longest, length)
        if length <= max_tokens:
            fitting.append(row)
        elif overlong == "skip":
            skipped.append(row["id"])
        else:
            raise UserError(
                f"the prompt of row '{row['id']}' has {length} tokens and data.max_prompt_tokens is {max_tokens}; "
                f"raise it by {length - max_tokens} or more, or set data.overlong_prompt: skip"
            )
    if not fitting:
        raise UserError(f"all {len(rows)} prompts are longer than data.max_prompt_tokens {max_tokens} (the longest has {longest} tokens)")
    return FittingRows(fitting, tuple(skipped))
