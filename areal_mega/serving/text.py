"""The server's tokenizer, or none (``--skip-tokenizer-init``)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from areal_mega.core.errors import UserError
from areal_mega.models.hf_io import resolve_folder

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


class Text:
    """Encode, decode, chat template. Without a tokenizer every decoded text is empty, as SGLang answers then."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        # The engine looks for stop strings while the event loop writes answers; transformers' tokenizers keep state in a call.
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        return self.tokenizer is not None

    def encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        with self._lock:
            return list(self.tokenizer.encode(text))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self.tokenizer is None or not len(ids):
            return ""
        with self._lock:
            return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str:
        """Text of one token, kept."""
        if token not in self._pieces:
            self._pieces[token] = self.decode([token], skip_special=False)
        return self._pieces[token]

    def chat(self, messages: list[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation, through the chat template once, ready for the assistant's turn."""
        assert self.tokenizer is not None
        with self._lock:
            ids = self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False, **template)
        return list(ids)

    @property
    def can_chat(self) -> bool:
        return self.tokenizer is not None and bool(getattr(self.tokenizer, "chat_template", None))


def load_text(path: str, skip: bool) -> Text:
    """The tokenizer of a model folder or hub name.

    Raises:
        UserError: there is none that transformers can read.
    """
    if skip:
        return Text(None)
    from transformers import AutoTokenizer

    folder = resolve_folder(path)
    # transformers makes an empty tokenizer of the model's class where the files are missing, and says nothing.
    if not any(next(folder.glob(name), None) for name in _FILES):
        raise UserError(f"no tokenizer in {path}; add its files (one of {', '.join(_FILES)}) or start with --skip-tokenizer-init")
    try:
        return Text(AutoTokenizer.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer in {path} ({first}); add its files or start with --skip-tokenizer-init") from None
