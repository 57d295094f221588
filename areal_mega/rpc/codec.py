"""Bodies of calls: msgpack, with extension types for arrays, tuples, large integers and a closed registry of data classes.

What is decoded equals what was encoded, types included (a tuple stays a tuple, an array keeps dtype and shape). A type that is not
known here is an error on the sending side; bytes that are not a valid body are an error on the receiving side. Nothing is pickled,
and no class is ever looked up by an import path that came over the wire.

A tuple or an instance of a data class is a list whose first item is a *mark*: an extension value that says what the list is, of a data
class its name and its fields. So nesting is msgpack's own, and no part of a body is packed or unpacked by a call of its own.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from areal_mega.core.metrics import Metric
from areal_mega.core.types import Group, Prompt, RTensor, Sample, SampleId, Trajectory, VersionCount

_ARRAY, _SCALAR, _DATACLASS, _TUPLE, _BIG_INT = 1, 2, 3, 4, 5
_PLAIN_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
_HEAD = re.compile(r"([^;]+);((?:\d+,)*)")
"""Of an array: its dtype and its shape."""
_TOP_BUFFER = 256 * 1024
_ALIGN = 16
"""Bytes: where an array's data begins within its value, so that a view of them is aligned for every dtype."""
_MAX_EXT_BYTES = 2**32 - 1
"""msgpack's own bound for one extension value."""
_TUPLE_MARK = msgpack.ExtType(_TUPLE, b"")


class _Mark:
    """What the list is that it begins. ``make`` takes the list's other items."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[list[Any]], Any]) -> None:
        self.make = make


class _Registered:
    """A data class that travels."""

    __slots__ = ("cls", "fields", "mark", "values")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.fields = tuple(f.name for f in dataclasses.fields(cls) if f.init)
        self.mark = msgpack.ExtType(_DATACLASS, " ".join((cls.__name__, *self.fields)).encode())
        get = attrgetter(*self.fields) if len(self.fields) > 1 else lambda item: tuple(getattr(item, name) for name in self.fields)
        self.values: Callable[[Any], tuple[Any, ...]] = get

    def make(self, values: list[Any]) -> Any:
        if len(values) != len(self.fields):
            raise CodecError(f"not a valid body: {self.cls.__name__} with {len(values)} values for its {len(self.fields)} fields")
        try:
            return self.cls(**dict(zip(self.fields, values, strict=True)))
        except (TypeError, ValueError) as error:
            raise CodecError(f"not a valid body: {self.cls.__name__}: {error}") from error


_by_name: dict[str, _Registered] = {}
_by_class: dict[type, _Registered] = {}
_marks: dict[bytes, _Mark] = {}
"""Of data classes, by their bytes in a body."""


class CodecError(ValueError):
    """A value that cannot be encoded, or bytes that are no valid body. The message says which."""


def register[T](cls: type[T]) -> type[T]:
    """Let instances of a data class travel. Usable as a decorator; both ends must have registered it under the same class name."""
    assert dataclasses.is_dataclass(cls), f"{cls.__name__} is not a data class"
    known = _by_name[cls.__name__].cls if cls.__name__ in _by_name else cls
    assert known is cls, f"two data classes are called {cls.__name__}: {known.__module__} and {cls.__module__}"
    if cls not in _by_class:
        entry = _Registered(cls)
        _by_name[cls.__name__] = _by_class[cls] = entry
        _marks[entry.mark.data] = _Mark(entry.make)
    return cls


for _cls in (Prompt, Trajectory, RTensor, SampleId, VersionCount, Sample, Group, Metric):
    register(_cls)


def encode(value: Any) -> bytes:
    """Bytes of ``value``: None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars, registered data classes.

    Raises:
        CodecError: a type outside that list, an object or structured array, an array beyond 4 GiB, or nesting beyond msgpack's limit.
    """
    try:
        packed = msgpack.packb(
            value, default=_plainer, strict_types=True, use_bin_type=True, unicode_errors="surrogatepass", buf_size=_TOP_BUFFER
        )
    except CodecError:
        raise
    # msgpack's own limits: nesting, lengths, integers
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot encode: {'nested too deeply' if 'recursion' in str(error) else error}") from error
    assert isinstance(packed, bytes)
    return packed


def decode(body: bytes | bytearray | memoryview) -> Any:
    """The value that ``encode`` made these bytes from. Arrays are read-only views of what was received, aligned.

    Raises:
        CodecError: the bytes are not a body, name an unknown data class, or give it other fields than it has.
    """
    open_marks = 0

    def ext(code: int, payload: bytes) -> Any:
        nonlocal open_marks
        value = _from_ext(code, payload)
        open_marks += type(value) is _Mark
        return value

    def finished(items: list[Any]) -> Any:
        nonlocal open_marks
        if not items or type(items[0]) is not _Mark:
            return items
        open_marks -= 1
        return items[0].make(items[1:])

    try:
        value = msgpack.unpackb(
            body, ext_hook=ext, list_hook=finished, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
        )  # fmt: skip
    except CodecError:
        raise
    # msgpack raises ValueError and its subclasses for broken bytes, TypeError for an unhashable key of a map.
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"not a valid body: {type(error).__name__}: {error}") from error
    if open_marks:
        raise CodecError("not a valid body: the mark of a tuple or a data class that begins no list")
    return value


def _plainer(item: Any) -> Any:
    """What msgpack knows, for what it does not."""
    cls = type(item)
    if (entry := _by_class.get(cls)) is not None:
        return [entry.mark, *entry.values(item)]
    if cls is tuple:
        return [_TUPLE_MARK, *item]
    if cls is int:  # only those beyond 64 bits come here
        return _ext(_BIG_INT, item.to_bytes(item.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(item, np.ndarray):
        return _array_ext(_ARRAY, item)
    if isinstance(item, np.generic):
        return _array_ext(_SCALAR, np.asarray(item))
    raise CodecError(f"cannot encode a {cls.__module__}.{cls.__qualname__}: not a plain value, array or registered data class")


def _array_ext(code: int, array: np.ndarray) -> msgpack.ExtType:
    if not _PLAIN_DTYPE.fullmatch(array.dtype.str):
        raise CodecError(f"cannot encode an array of dtype {array.dtype}: only bool, int, uint, float and complex travel")
    head = f"{array.dtype.str};{''.join(f'{size},' for size in array.shape)}".encode()
    start = 2 + len(head)
    # ascontiguousarray would turn 0-d into 1-d; the shape is already in the head. A view as bytes spares one copy of large arrays.
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
    return _ext(code, b"".join((len(head).to_bytes(2, "big"), head, b"\0" * (-start % _ALIGN), raw)))


def _ext(code: int, payload: bytes) -> msgpack.ExtType:
    if len(payload) > _MAX_EXT_BYTES:
        raise CodecError(f"cannot encode a value of {len(payload)} bytes: one value may have {_MAX_EXT_BYTES} (4 GiB); send it in parts")
    return msgpack.ExtType(code, payload)


def _from_ext(code: int, payload: bytes) -> Any:
    match code:
        case 3:
            return _marks.get(payload) or _strange(payload)
        case 4:
            if payload:
                raise CodecError("not a valid body: the mark of a tuple says more than that")
            return _TUPLE_BEGINS
        case 1:
            return _array(payload)
        case 2:
            array = _array(payload)
            if array.ndim:
                raise CodecError(f"not a valid body: a scalar of shape {array.shape}")
            return array[()]
        case 5:
            return int.from_bytes(payload, "big", signed=True)
        case _:
            raise CodecError(f"not a valid body: unknown extension type {code}")


_TUPLE_BEGINS = _Mark(tuple)


def _strange(payload: bytes) -> _Mark:
    """Of a data class that is not known in this form."""
    name, *given = payload.decode(errors="replace").split(" ")
    entry = _by_name.get(name)
    if entry is None:
        raise CodecError(f"not a valid body: no data class called {name!r} is registered here")
    missing, unknown = sorted(set(entry.fields) - set(given)), sorted(set(given) - set(entry.fields))
    raise CodecError(f"not a valid body: {name} lacks {missing} and has unknown {unknown}; do both ends run the same version?")


def _array(payload: bytes) -> np.ndarray:
    split = 2 + int.from_bytes(payload[:2], "big")
    found = _HEAD.fullmatch(payload[2:split].decode(errors="replace"))
    if found is None:
        raise CodecError("not a valid body: an array begins with its dtype and shape")
    dtype_text, shape = found[1], tuple(map(int, found[2].split(",")[:-1]))
    if not _PLAIN_DTYPE.fullmatch(dtype_text):
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
