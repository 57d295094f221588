"""Values beside the arrays (schedules, RNG states, argument groups) as bytes that are data and never code."""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_mega.checkpoint.arrays import DTYPE_NAMES, DTYPES
from areal_mega.core.errors import UserError
from areal_mega.rpc.codec import CodecError, decode, encode, register


@register
@dataclass(frozen=True)
class PlainTensor:
    """A small tensor, on the host."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


@register
@dataclass(frozen=True)
class PlainStream:
    """A module's own opaque bytes (Transformer Engine's extra state comes as a ``BytesIO``)."""

    content: bytes


def to_bytes(value: Any, what: str) -> bytes:
    """Raises UserError for a value that holds anything but plain values, arrays and tensors."""
    try:
        return encode(_plain(value))
    except CodecError as error:
        raise UserError(f"{what} cannot be stored ({error}); give plain values, arrays or tensors") from None


def from_bytes(content: bytes, where: str) -> Any:
    try:
        return _rich(decode(content))
    except CodecError as error:
        raise UserError(f"{where} is damaged ({error}); take another copy of the checkpoint") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return PlainTensor(DTYPE_NAMES[value.dtype], tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, io.BytesIO):
        return PlainStream(value.getvalue())
    if type(value) in (dict, OrderedDict):
        return {key: _plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(entry) for entry in value)
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, PlainTensor):
        flat = torch.frombuffer(bytearray(value.content), dtype=torch.uint8) if value.content else torch.empty(0, dtype=torch.uint8)
        return flat.view(DTYPES[value.dtype]).reshape(value.shape)
    if isinstance(value, PlainStream):
        return io.BytesIO(value.content)
    if isinstance(value, dict):
        return {key: _rich(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rich(entry) for entry in value)
    return value
