"""GSM8K: grade-school word problems whose worked answers end with ``#### <number>`` (arXiv 2110.14168)."""

from __future__ import annotations

from collections.abc import Iterator

from areal_mega.core.errors import UserError
from areal_mega.data.files import Located, read_records

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "Think step by step, then give the final answer on its own last line as '#### <number>'."


def gsm8k_rows(*, path: str | None, split: str, instruction: str = INSTRUCTION, config: str = "main") -> Iterator[Located]:
    """Rows of GSM8K: one user message (question and instruction), the number as ``answer``, the worked answer as ``response``.

    Args:
        path: JSONL or Parquet file, folder, or hub name; None is ``openai/gsm8k`` of the hub.
        split: ``train`` or ``test``.
        instruction: put below the question; empty for none.
        config: configuration of the hub dataset.

    Raises:
        UserError: a record without ``question``, or whose ``answer`` has no ``#### <number>``, with file and line.
    """
    for where, record in read_records(path or HUB_NAME, split, config):
        question, worked = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not question.strip():
            raise UserError(f"{where}: no `question`; the gsm8k loader reads records {{question, answer}}")
        if not isinstance(worked, str) or not worked.strip():
            raise UserError(f"{where}: no `answer`; the gsm8k loader reads records {{question, answer}}")
        _, marker, number = worked.rpartition("####")
        if not marker or not number.strip():
            raise UserError(f"{where}: `answer` does not end with '#### <number>'; for answers of another form use the jsonl loader")
        content = f"{question.strip()}\n\n{instruction}" if instruction else question.strip()
        yield where, {"messages": [{"role": "user", "content": content}], "answer": number.strip(), "response": worked.strip()}
