"""Kinds of values that hold no other values: numbers, NumPy scalars, paths, times.

Each has a pair of functions for its payload; the rows are in `value_kinds`. Spec: 05-values.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import numpy as np

from ckptfmt.errors import CorruptError, UnsupportedError, UsageError
from ckptfmt.format.dtypes import (
    Dtype,
    dtype_of,
    known_bits,
    numpy_dtype,
    pack_array,
    parse_array,
)


class Encoder(Protocol):
    """What a kind may ask of the packer. `level` is that of the container, not of its items."""

    def encode(self, obj: object, level: int) -> object: ...
    def text(self, text: str) -> str: ...
    def items(self, items: Iterable[object], level: int) -> list[object]: ...
    def fields(self, items: Mapping[str, object], level: int) -> dict[str, object]: ...
    def pairs(self, items: Mapping[Any, object], level: int) -> list[list[object]]: ...
    def sorted_items(self, items: Iterable[object], level: int) -> list[object]: ...


class Decoder(Protocol):
    """What a kind may ask of the parser; each refuses a payload of another form."""

    def decode(self, raw: Any, level: int) -> Any: ...
    def items(self, raw: Any, level: int) -> list[Any]: ...
    def fields(self, raw: Any, level: int) -> dict[str, Any]: ...
    def pairs(self, raw: Any, level: int) -> list[tuple[Any, Any]]: ...


def require(condition: bool, what: str) -> None:
    """Refuse a payload. The parser adds which value it is."""
    if not condition:
        raise CorruptError(what, reason="value")


def typed(raw: Any, *kinds: type) -> Any:
    require(type(raw) in kinds, f"expected {kinds[0].__name__}, found {type(raw).__name__}")
    return raw


def array_of(raw: Any, count: int) -> list[Any]:
    require(type(raw) is list and len(raw) == count, f"expected an array of {count}")
    return cast("list[Any]", raw)


def decode_int(raw: Any, decoder: Decoder, level: int) -> int:
    made = int.from_bytes(typed(raw, bytes), "little", signed=True)
    require(not -(1 << 63) <= made < 1 << 64, "an int that msgpack has itself")
    require(len(raw) == made.bit_length() // 8 + 1, "an int with needless bytes")
    return made


def decode_complex(raw: Any, decoder: Decoder, level: int) -> complex:
    real, imag = array_of(raw, 2)
    return complex(typed(real, float), typed(imag, float))


def encode_np(obj: Any, encoder: Encoder, level: int) -> object:
    # NumPy strips trailing zeros when it takes a string out of an array, so these go past arrays.
    if type(obj) is np.str_:
        data = encoder.text(str(obj)).encode("utf-32-le")
        return [f"str{len(data) * 8}", data]
    if type(obj) is np.bytes_:
        return [f"bytes{len(obj) * 8}", bytes(obj)]
    if type(obj) is not obj.dtype.type:
        raise UsageError(
            "a subclass of a NumPy scalar cannot be saved",
            reason="value",
            found=type(obj).__qualname__,
            do=f"convert it to {obj.dtype.type.__name__}",
        )
    return [dtype_of(obj.dtype).name, bytes(pack_array(np.asarray(obj)))]


def _numpy_dtype(name: Any) -> tuple[Dtype, np.dtype[Any]]:
    """The dtype of a name that the format and the installed libraries know."""
    bits = known_bits(typed(name, str))
    if bits is not None:
        require(bits >= 0, "an illegal width of a dtype")
        dtype = Dtype(name, bits)
        into = numpy_dtype(dtype)
        if into.metadata is None:
            return dtype, into
    raise UnsupportedError(
        "a dtype is unknown",
        reason="value-dtype",
        found=ascii(name)[:80],
        do="upgrade ml_dtypes or ckptfmt",
    )


def decode_np(raw: Any, decoder: Decoder, level: int) -> Any:
    name, data = array_of(raw, 2)
    dtype, _ = _numpy_dtype(name)
    require(not dtype.is_variable, "a scalar of variable length")
    require(len(typed(data, bytes)) == dtype.itemsize, "another length than the dtype says")
    if name.startswith("str"):
        return np.str_(data.decode("utf-32-le"))
    if name.startswith("bytes"):
        return np.bytes_(data)
    try:
        return parse_array(data, dtype, ())[()]
    except CorruptError as error:
        require(False, error.what)


def encode_np_dtype(obj: Any, encoder: Encoder, level: int) -> object:
    known = dtype_of(obj)
    if numpy_dtype(known) != obj or obj.metadata is not None:
        raise UsageError(
            "this dtype would come back as another",
            reason="value",
            found=repr(obj),
            do='save its .str, or its .newbyteorder("<")',
        )
    return known.name


def decode_np_dtype(raw: Any, decoder: Decoder, level: int) -> np.dtype[Any]:
    return _numpy_dtype(raw)[1]


def encode_path(obj: Any, encoder: Encoder, level: int) -> object:
    return encoder.text(str(obj))


def decode_path(raw: Any, decoder: Decoder, level: int) -> pathlib.Path:
    return pathlib.Path(typed(raw, str))


def encode_moment(obj: Any, encoder: Encoder, level: int) -> object:
    """ISO 8601 text of a datetime, date or time, if that says everything."""
    text: str = obj.isoformat()
    zone = getattr(obj, "tzinfo", None)
    back = type(obj).fromisoformat(text)
    if zone is not None and (type(zone) is not datetime.timezone or repr(back) != repr(obj)):
        raise UsageError(
            "a time zone with a name or rules cannot be saved",
            reason="value",
            found=repr(zone)[:80],
            do="use .astimezone(datetime.timezone.utc)",
        )
    if getattr(obj, "fold", 0):
        raise UsageError(
            "a time with fold=1 cannot be saved", reason="value", do="use .replace(fold=0)"
        )
    return text


def decode_moment(kind: Any) -> Callable[[Any, Decoder, int], Any]:
    """The parser of ISO 8601 text, in the one spelling that `isoformat` gives."""

    def decode(raw: Any, decoder: Decoder, level: int) -> Any:
        made = kind.fromisoformat(typed(raw, str))
        require(made.isoformat() == raw, "not the usual ISO form")
        return made

    return decode


def encode_timedelta(obj: Any, encoder: Encoder, level: int) -> object:
    return [obj.days, obj.seconds, obj.microseconds]


def decode_timedelta(raw: Any, decoder: Decoder, level: int) -> datetime.timedelta:
    parts = [typed(part, int) for part in array_of(raw, 3)]
    made = datetime.timedelta(*parts)
    require([made.days, made.seconds, made.microseconds] == parts, "parts out of range")
    return made
