"""Reading ``config.json``: every architecture field is there, known, or an error; nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_mega.core.errors import UserError

HFConfig = Mapping[str, Any]


def load_hf_config(path: str) -> dict[str, Any]:
    """The plain content of ``config.json`` of a local folder or of a hub name.

    Raises:
        UserError: if there is none, or it is not JSON.
    """
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        file = _hub_config(path)
    elif not file.is_file():
        raise UserError(f"model folder {path} has no config.json; give a HuggingFace model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid JSON ({error}); restore it from the model's source") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object; restore it from the model's source")
    return config


def _hub_config(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"model folder {name} does not exist; give an existing folder or a hub name")
    from transformers.utils import cached_file

    try:
        found = cached_file(name, "config.json")
    except (OSError, ValueError) as error:
        raise UserError(f"model '{name}' is neither a folder nor reachable on the hub: {first_line(error)}") from None
    assert found is not None, "cached_file raises where it finds nothing"
    return Path(found)


def first_line(error: Exception) -> str:
    """A library's message, fit for a one-line error."""
    return str(error).strip().splitlines()[0]


_MISSING = object()


def field(hf: HFConfig, *names: str, default: Any = _MISSING) -> Any:
    """The first of ``names`` that is present and not null.

    Raises:
        UserError: where none is and there is no default.
    """
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    if default is not _MISSING:
        return default
    raise UserError(f"config.json of model_type '{hf.get('model_type')}' lacks {' (or '.join(names)}{')' * (len(names) - 1)}; add it")


def only(hf: HFConfig, name: str, *legal: Any, default: Any, why: str) -> None:
    """Refuse any value of a field but the ones that can be honoured."""
    value = field(hf, name, default=default)
    if value not in legal:
        raise UserError(f"config.json: {name}={value!r} cannot be honoured ({why}); supported: {', '.join(repr(v) for v in legal)}")


def head_dim(hf: HFConfig, default: int | None = None) -> int:
    """Size of one attention head: ``head_dim``, else the family's default, else hidden size over heads."""
    given = field(hf, "head_dim", default=default)
    if given is not None:
        return int(given)
    hidden, heads = field(hf, "hidden_size"), field(hf, "num_attention_heads")
    if hidden % heads:
        raise UserError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is not given; add head_dim"
        )
    return int(hidden // heads)


def tied(hf: HFConfig) -> bool:
    """Whether the output layer is the embedding. The families here default to false."""
    return bool(field(hf, "tie_word_embeddings", default=False))


def no_sliding_window(hf: HFConfig) -> None:
    """Refuse sliding-window attention: Megatron's packed attention here is full and causal."""
    only(hf, "use_sliding_window", False, default=False, why="sliding-window attention is not built")
    other = sorted({kind for kind in field(hf, "layer_types", default=[]) if kind != "full_attention"})
    if other:
        raise UserError(f"config.json: layer_types has {', '.join(other)}, which is not built; supported: full_attention")
