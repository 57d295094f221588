"""Bodies of calls: msgpack, with extension types for arrays, tuples, large integers and a closed registry of data classes.

What is decoded equals what was encoded, types included (a tuple stays a tuple, an array keeps dtype and shape). A type that is not
known here is an error on the sending side; bytes that are not a valid body are an error on the receiving side. Nothing is pickled,
and no class is ever looked up by an import path that came over the wire.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from areal_mega.core.metrics import Metric
from areal_mega.core.types import Group, Prompt, RTensor, Sample, SampleId, Trajectory, VersionCount

_ARRAY, _SCALAR, _DATACLASS, _TUPLE, _BIG_INT = 1, 2, 3, 4, 5
_PLAIN_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
_MAX_DEPTH = 64
"""Deepest nesting of extension types. Each level is one Python call, so the bound keeps a hostile body from overflowing the stack."""
_TOP_BUFFER = 256 * 1024
_ALIGN = 16
"""Bytes: where an array's data begins within its value, so that a view of them is aligned for every dtype."""
_MAX_EXT_BYTES = 2**32 - 1
"""msgpack's own bound for one extension value."""

_by_name: dict[str, type] = {}
_fields: dict[type, tuple[str, ...]] = {}


class CodecError(ValueError):
    """A value that cannot be encoded, or bytes that are no valid body. The message says which."""


def register[T](cls: type[T]) -> type[T]:
    """Let instances of a data class travel. Usable as a decorator; both ends must have registered it under the same class name."""
    assert dataclasses.is_dataclass(cls), f"{cls.__name__} is not a data class"
    known = _by_name.setdefault(cls.__name__, cls)
    assert known is cls, f"two data classes are called {cls.__name__}: {known.__module__} and {cls.__module__}"
    _fields[cls] = tuple(f.name for f in dataclasses.fields(cls) if f.init)
    return cls


for _cls in (Prompt, Trajectory, RTensor, SampleId, VersionCount, Sample, Group, Metric):
    register(_cls)


def encode(value: Any) -> bytes:
    """Bytes of ``value``: None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars, registered data classes.

    Raises:
        CodecError: a type outside that list, an object or structured array, an array beyond 4 GiB, or nesting beyond reason.
    """
    try:
        return _pack(value, 0)
    except (OverflowError, RecursionError, UnicodeError) as error:
        raise CodecError(f"cannot encode: {error}") from error


def decode(body: bytes | bytearray | memoryview) -> Any:
    """The value that ``encode`` made these bytes from. Arrays are read-only views of what was received, aligned.

    Raises:
        CodecError: the bytes are not a body, name an unknown data class, or give it other fields than it has.
    """
    return _unpack(body, 0)


def _pack(value: Any, depth: int) -> bytes:
    def default(item: Any) -> msgpack.ExtType:
        if depth >= _MAX_DEPTH:
            raise CodecError(f"cannot encode: nested deeper than {_MAX_DEPTH} levels")
        return _to_ext(item, lambda inner: _pack(inner, depth + 1))

    try:
        # Its buffer grows as needed; a large one for every small part of a value would cost more than the packing.
        packer = msgpack.Packer(
            default=default,
            strict_types=True,
            use_bin_type=True,
            unicode_errors="surrogatepass",
            buf_size=_TOP_BUFFER if not depth else 512,
        )
        packed = packer.pack(value)
    except CodecError:
        raise
    except (TypeError, ValueError) as error:  # msgpack's own limits: nesting, lengths, integers
        raise CodecError(f"cannot encode: {error}") from error
    assert isinstance(packed, bytes)
    return packed


def _to_ext(item: Any, pack: Callable[[Any], bytes]) -> msgpack.ExtType:
    cls = type(item)
    if (fields := _fields.get(cls)) is not None:
        return _ext(_DATACLASS, pack([cls.__name__, {name: getattr(item, name) for name in fields}]))
    if cls is tuple:
        return _ext(_TUPLE, pack(list(item)))
    if cls is int:  # only those beyond 64 bits come here
        return _ext(_BIG_INT, item.to_bytes(item.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(item, np.ndarray):
        return _array_ext(_ARRAY, item, pack)
    if isinstance(item, np.generic):
        return _array_ext(_SCALAR, np.asarray(item), pack)
    raise CodecError(f"cannot encode a {cls.__module__}.{cls.__qualname__}: not a plain value, array or registered data class")


def _array_ext(code: int, array: np.ndarray, pack: Callable[[Any], bytes]) -> msgpack.ExtType:
    if not _PLAIN_DTYPE.fullmatch(array.dtype.str):
        raise CodecError(f"cannot encode an array of dtype {array.dtype}: only bool, int, uint, float and complex travel")
    head = pack([array.dtype.str, list(array.shape)])
    start = 2 + len(head)
    # ascontiguousarray would turn 0-d into 1-d; the shape is already in the head. A view as bytes spares one copy of large arrays.
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
    return _ext(code, b"".join((len(head).to_bytes(2, "big"), head, b"\0" * (-start % _ALIGN), raw)))


def _ext(code: int, payload: bytes) -> msgpack.ExtType:
    if len(payload) > _MAX_EXT_BYTES:
        raise CodecError(f"cannot encode a value of {len(payload)} bytes: one value may have {_MAX_EXT_BYTES} (4 GiB); send it in parts")
    return msgpack.ExtType(code, payload)


def _unpack(body: bytes | bytearray | memoryview, depth: int) -> Any:
    def ext_hook(code: int, payload: bytes) -> Any:
        if depth >= _MAX_DEPTH:
            raise CodecError(f"not a valid body: nested deeper than {_MAX_DEPTH} levels")
        return _from_ext(code, payload, lambda inner: _unpack(inner, depth + 1))

    try:
        return msgpack.unpackb(body, ext_hook=ext_hook, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
    except CodecError:
        raise
    # msgpack raises ValueError and its subclasses for broken bytes, TypeError for an unhashable key of a map.
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"not a valid body: {type(error).__name__}: {error}") from error


def _from_ext(code: int, payload: bytes, unpack: Callable[[Any], Any]) -> Any:
    match code:
        case 1:
            return _array(payload, unpack)
        case 2:
            array = _array(payload, unpack)
            if array.ndim:
                raise CodecError(f"not a valid body: a scalar of shape {array.shape}")
            return array[()]
        case 3:
            return _instance(unpack(payload))
        case 4:
            items = unpack(payload)
            if not isinstance(items, list):
                raise CodecError("not a valid body: a tuple without a list in it")
            return tuple(items)
        case 5:
            return int.from_bytes(payload, "big", signed=True)
        case _:
            raise CodecError(f"not a valid body: unknown extension type {code}")


def _instance(content: Any) -> Any:
    match content:
        case [str(name), dict(values)]:
            pass
        case _:
            raise CodecError("not a valid body: a data class is a name and its fields")
    cls = _by_name.get(name)
    if cls is None:
        raise CodecError(f"not a valid body: no data class called {name!r} is registered here")
    expected, given = set(_fields[cls]), set(values)
    if expected != given:
        missing, unknown = sorted(expected - given), sorted(map(str, given - expected))
        raise CodecError(f"not a valid body: {name} lacks {missing} and has unknown {unknown}; do both ends run the same version?")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise CodecError(f"not a valid body: {name}: {error}") from error


def _array(payload: bytes, unpack: Callable[[Any], Any]) -> np.ndarray:
    split = 2 + int.from_bytes(payload[:2], "big")
    match unpack(memoryview(payload)[2:split]):
        case [str(dtype_text), list(shape)]:
            pass
        case _:
            raise CodecError("not a valid body: an array begins with its dtype and shape")
    if not _PLAIN_DTYPE.fullmatch(dtype_text) or not all(type(n) is int and n >= 0 for n in shape):
        raise CodecError(f"not a valid body: an array of dtype {dtype_text!r} and shape {shape}")
    try:
        dtype = np.dtype(dtype_text)
    except TypeError as error:
        raise CodecError(f"not a valid body: an array of dtype {dtype_text!r}") from error
    raw = memoryview(payload)[split + -split % _ALIGN :]
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise CodecError(f"not a valid body: {len(raw)} bytes for an array of dtype {dtype} and shape {shape}")
    try:
        return np.frombuffer(raw, dtype).reshape(shape) if len(raw) else np.empty(shape, dtype)
    except ValueError as error:  # more dimensions, or a larger zero-size shape, than numpy has
        raise CodecError(f"not a valid body: an array of shape {shape}: {error}") from error
