"""The normal form of a dataset row: checked once, when the data is loaded, so that nothing later has to guess."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from areal_mega.core.errors import UserError

Row = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def normalise(row: Mapping[str, Any], where: str) -> Row:
    """Check one row and return it as plain JSON types (``id`` may still be absent: `with_ids` gives it).

    A number as ``answer`` becomes its text; nothing else is converted.

    Args:
        row: ``messages`` or ``prompt``, ``answer``, optionally ``id``, ``response`` and more.
        where: file and line (or row) for messages.

    Raises:
        UserError: what is missing or of the wrong type, and where.
    """
    out = {str(key): _plain(value, f"{where}: '{key}'") for key, value in row.items()}
    if ("messages" in out) == ("prompt" in out):
        found = "both" if "messages" in out else "neither"
        raise UserError(f"{where}: a row needs `messages` (a chat) or `prompt` (a raw string), and has {found}")
    if "prompt" in out:
        _text(out, "prompt", where)
    else:
        _check_messages(out["messages"], where)
    out["answer"] = answer_text(out, where)
    for optional in ("id", "response"):
        if out.get(optional) is None:
            out.pop(optional, None)
        elif optional == "id" and isinstance(out["id"], int):
            out["id"] = str(out["id"])
        else:
            _text(out, optional, where)
    return out


def answer_text(row: Mapping[str, Any], where: str) -> str:
    """The answer as text. An answer that is absent or empty is the user's mistake: its samples could never be right."""
    answer = row.get("answer")
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise UserError(f"{where}: no `answer`; give every row one, or remove the row")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise UserError(f"{where}: `answer` must be text or a number, not {type(answer).__name__}")
    return answer if isinstance(answer, str) else json.dumps(answer)


def with_ids(rows: Iterable[tuple[str, Row]]) -> list[Row]:
    """Give each ``(where, row)`` without an id one made of its content, so that ids survive reordering and `limit`.

    Equal rows without ids are told apart by their occurrence (``…-2``). An id that the data gives twice is an error.
    """
    out: list[Row] = []
    seen: dict[str, str] = {}
    occurrences: Counter[str] = Counter()
    for where, row in rows:
        if "id" not in row:
            text = json.dumps([row.get("messages"), row.get("prompt"), row["answer"]], ensure_ascii=False, sort_keys=True)
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            occurrences[digest] += 1
            row = {**row, "id": digest if occurrences[digest] == 1 else f"{digest}-{occurrences[digest]}"}
        if row["id"] in seen:
            raise UserError(f"{where}: id '{row['id']}' was already used at {seen[row['id']]}; ids must be unique")
        seen[row["id"]] = where
        out.append(row)
    return out


def check_rows(rows: Iterable[Mapping[str, Any]], origin: str) -> list[Row]:
    """Normal form of rows that a program made (a user's own list, or a HuggingFace ``Dataset``)."""
    return with_ids((where, normalise(row, where)) for where, row in ((f"{origin}, row {i}", r) for i, r in enumerate(rows)))


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: `messages` must be a list of {{role, content}}, not {_kind(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or not isinstance(message.get("content"), str):
            raise UserError(f"{where}: message {i} must have `role` and a text `content`")
        if message["role"] not in ROLES:
            raise UserError(f"{where}: message {i} has role '{message['role']}'; roles are {', '.join(ROLES)}")
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: `messages` ends with the assistant's turn; put a worked answer into `response` instead")


def _text(row: Row, key: str, where: str) -> None:
    if not isinstance(row[key], str) or not row[key]:
        raise UserError(f"{where}: `{key}` must be a text that is not empty, not {_kind(row[key])}")


def _kind(value: Any) -> str:
    return "an empty one" if isinstance(value, (str, list)) and not value else type(value).__name__


def _plain(value: Any, where: str) -> Any:
    """JSON types only: rows travel to other processes, and not by pickle."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, where) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, where) for v in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, as Parquet readers give them
        return _plain(value.tolist(), where)
    raise UserError(f"{where} is a {type(value).__name__}; rows hold text, numbers, lists and mappings only")
