"""The model's tokenizer, as rollout workers and the supervised warm-up load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_mega.core.errors import UserError


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a HuggingFace folder or hub name.

    Raises:
        UserError: nothing there, or no tokenizer in it.
    """
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if not folder.exists() and path.startswith((".", "~", "/")):
        raise UserError(f"model folder {folder} does not exist; check model.path")
    try:
        return AutoTokenizer.from_pretrained(str(folder) if folder.exists() else path)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"no tokenizer can be loaded from model.path '{path}': {reason}") from error
