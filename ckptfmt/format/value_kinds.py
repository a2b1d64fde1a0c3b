"""The kinds of values beyond msgpack's own: a row each, with its tag, its types and both ways.

To add one: a row in KINDS, a row in the table of spec 03, vectors. Spec: 03-names.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import keyword
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np

from ckptfmt.errors import UsageError
from ckptfmt.format.value_scalars import (
    Decoder,
    Encoder,
    array_of,
    decode_complex,
    decode_date,
    decode_int,
    decode_moment,
    decode_np,
    decode_np_dtype,
    decode_path,
    decode_timedelta,
    decode_timezone,
    encode_moment,
    encode_np,
    encode_np_dtype,
    encode_path,
    encode_zone,
    is_path,
    require,
    typed,
)

FIELDS_MAX = 1000
"""Fields of a namedtuple: each is source text that `collections.namedtuple` compiles."""
FACTORIES: Mapping[str, type] = {
    kind.__name__: kind for kind in cast("list[type]", [int, float, str, list, dict, set])
}


class Kind(NamedTuple):
    """A kind of value. A decoder may raise ValueError and the like for a wrong payload."""

    tag: str
    encode: Callable[[Any, Encoder, int], object]
    decode: Callable[[Any, Decoder, int], object]
    types: tuple[type, ...] = ()


def _unique(made: Any, count: int) -> Any:
    require(len(made) == count, "an item stands twice")
    return made


def _decode_set(kind: Callable[[list[Any]], Any]) -> Callable[[Any, Decoder, int], Any]:
    def decode(raw: Any, decoder: Decoder, level: int) -> Any:
        made = kind(decoder.items(raw, level))
        packed = [msgpack.packb(item, use_bin_type=True) for item in raw]
        require(all(a < b for a, b in pairwise(packed)), "items of a set are not in order")
        return _unique(made, len(raw))

    return decode


def _decode_pairs(kind: Callable[[Any], Any]) -> Callable[[Any, Decoder, int], Any]:
    return lambda raw, decoder, level: _unique(kind(decoder.pairs(raw, level)), len(raw))


def _counter(pairs: list[tuple[Any, Any]]) -> collections.Counter[Any]:
    return collections.Counter(dict(pairs))  # Counter(pairs) would count the pairs


def factory_name(factory: object) -> str | None:
    """The name of a defaultdict's factory."""
    for name, kind in FACTORIES.items():
        if factory is kind:
            return name
    if factory is None:
        return None
    raise UsageError(
        "a defaultdict's factory cannot be saved",
        reason="value",
        expected=f"one of {', '.join(FACTORIES)}, None",
        found=getattr(factory, "__qualname__", type(factory).__name__),
        do="save dict(x)",
    )


def factory_of(name: object) -> Callable[[], Any] | None:
    """The factory that a name means; ValueError for any other name."""
    if name is None:
        return None
    require(type(name) is str and name in FACTORIES, "unknown factory of a defaultdict")
    return FACTORIES[cast("str", name)]


def _encode_defaultdict(obj: Any, encoder: Encoder, level: int) -> object:
    return [factory_name(obj.default_factory), encoder.pairs(obj, level)]


def _decode_defaultdict(raw: Any, decoder: Decoder, level: int) -> Any:
    name, pairs = array_of(raw, 2)
    made = collections.defaultdict(factory_of(name), decoder.pairs(pairs, level))
    return _unique(made, len(pairs))


def is_namedtuple(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return issubclass(kind, tuple) and isinstance(fields, tuple) and hasattr(kind, "_make")


@lru_cache(maxsize=1024)
def namedtuple_class(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The class of a stored namedtuple; one class for equal names and fields.

    `collections.namedtuple` compiles these names: they are checked here first.
    """
    require(len(fields) <= FIELDS_MAX, "too many fields")
    for position, field in enumerate((name, *fields)):
        legal = field.isidentifier() and not keyword.iskeyword(field) and len(field) <= 255
        hidden = field.startswith("_") and position > 0 and field != f"_{position - 1}"
        require(legal and not hidden, f"{ascii(field)[:40]} is not a legal field or class")
    made = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc]
    require(made._fields == fields, "fields are not unique")
    return made


def namedtuple_parts(obj: Any) -> tuple[str, list[str]]:
    """Class name and fields of a namedtuple; UsageError if it would not come back."""
    kind = type(obj)
    try:
        namedtuple_class(kind.__name__, kind._fields)
    except (ValueError, AttributeError, TypeError) as error:
        reason = getattr(error, "what", str(error))
    else:
        if not getattr(obj, "__dict__", None) and len(obj) == len(kind._fields):
            return kind.__name__, list(kind._fields)
        reason = "it has attributes beside its fields"
    raise UsageError(
        f"a namedtuple cannot be saved: {reason}",
        reason="value",
        found=kind.__qualname__,
        do="use register_type, or save its _asdict()",
    )


def _encode_namedtuple(obj: Any, encoder: Encoder, level: int) -> object:
    return [*namedtuple_parts(obj), encoder.items(obj, level)]


def _decode_namedtuple(raw: Any, decoder: Decoder, level: int) -> Any:
    name, fields, items = array_of(raw, 3)
    require(type(fields) is list and all(type(f) is str for f in fields), "fields are not str")
    kind = namedtuple_class(typed(name, str), tuple(fields))
    require(type(items) is list and len(items) == len(fields), "items do not fit the fields")
    return kind(*decoder.items(items, level))


def _decode_range(raw: Any, decoder: Decoder, level: int) -> range:
    return range(*(typed(part, int) for part in decoder.items(array_of(raw, 3), level)))


def _decode_slice(raw: Any, decoder: Decoder, level: int) -> slice:
    return slice(*decoder.items(array_of(raw, 3), level))


def _decode_deque(raw: Any, decoder: Decoder, level: int) -> collections.deque[Any]:
    maxlen, items = array_of(raw, 2)
    made = collections.deque(decoder.items(items, level), maxlen)
    require(maxlen is None or len(items) <= typed(maxlen, int), "more items than maxlen")
    return made


def _items(obj: Any, encoder: Encoder, level: int) -> object:
    return encoder.items(obj, level)


def _sorted_items(obj: Any, encoder: Encoder, level: int) -> object:
    return encoder.sorted_items(obj, level)


def _pairs(obj: Any, encoder: Encoder, level: int) -> object:
    return encoder.pairs(obj, level)


def _never(obj: Any, encoder: Encoder, level: int) -> object:
    raise UsageError("the packer has this itself", reason="value")


def _namespace(kind: Any) -> Kind:
    tag = "namespace" if kind is types.SimpleNamespace else "argparse.Namespace"
    return Kind(
        tag,
        lambda obj, encoder, level: encoder.fields(vars(obj), level),
        lambda raw, decoder, level: kind(**decoder.fields(raw, level)),
        (kind,),
    )


KINDS: tuple[Kind, ...] = (
    Kind("int", _never, decode_int),
    Kind("complex", lambda obj, *_: [obj.real, obj.imag], decode_complex, (complex,)),
    Kind("tuple", _items, lambda raw, d, level: tuple(d.items(raw, level)), (tuple,)),
    Kind("set", _sorted_items, _decode_set(set), (set,)),
    Kind("frozenset", _sorted_items, _decode_set(frozenset), (frozenset,)),
    Kind("dict", _pairs, _decode_pairs(dict)),
    Kind("odict", _pairs, _decode_pairs(collections.OrderedDict), (collections.OrderedDict,)),
    Kind("counter", _pairs, _decode_pairs(_counter), (collections.Counter,)),
    Kind("defaultdict", _encode_defaultdict, _decode_defaultdict, (collections.defaultdict,)),
    Kind("namedtuple", _encode_namedtuple, _decode_namedtuple),
    Kind("np", encode_np, decode_np),
    Kind("np.dtype", encode_np_dtype, decode_np_dtype),
    Kind("path", encode_path, decode_path),
    Kind("datetime", encode_moment, decode_moment(datetime.datetime), (datetime.datetime,)),
    Kind("time", encode_moment, decode_moment(datetime.time), (datetime.time,)),
    Kind("date", lambda obj, *_: obj.isoformat(), decode_date, (datetime.date,)),
    Kind(
        "timedelta",
        lambda obj, *_: [obj.days, obj.seconds, obj.microseconds],
        decode_timedelta,
        (datetime.timedelta,),
    ),
    Kind(
        "timezone",
        lambda obj, encoder, _: encode_zone(obj, encoder),
        decode_timezone,
        (datetime.timezone,),
    ),
    Kind(
        "range",
        lambda obj, encoder, level: encoder.items([obj.start, obj.stop, obj.step], level),
        _decode_range,
        (range,),
    ),
    Kind(
        "slice",
        lambda obj, encoder, level: encoder.items([obj.start, obj.stop, obj.step], level),
        _decode_slice,
        (slice,),
    ),
    Kind(
        "bytearray",
        lambda obj, *_: bytes(obj),
        lambda raw, *_: bytearray(typed(raw, bytes)),
        (bytearray,),
    ),
    Kind(
        "deque",
        lambda obj, encoder, level: [obj.maxlen, encoder.items(obj, level)],
        _decode_deque,
        (collections.deque,),
    ),
    _namespace(types.SimpleNamespace),
    _namespace(argparse.Namespace),
)
KINDS_BY_TAG: Mapping[str, Kind] = {kind.tag: kind for kind in KINDS}
_BY_TYPE: Mapping[type, Kind] = {kind: row for row in KINDS for kind in row.types}


def find_kind(obj: object, *, registered: bool) -> Kind | None:
    """The row of an object's type. `registered`: of those that a registered type comes before."""
    kind = type(obj)
    if registered:
        return KINDS_BY_TAG["namedtuple"] if is_namedtuple(kind) else None
    row = _BY_TYPE.get(kind)
    if row is not None:
        return row
    if isinstance(obj, np.generic):
        return KINDS_BY_TAG["np"]
    if is_path(kind):
        return KINDS_BY_TAG["path"]
    return KINDS_BY_TAG["np.dtype"] if isinstance(obj, np.dtype) else None


def explain(obj: object) -> tuple[str, str]:
    """Why an object is no value, and what to do about it."""
    kind = type(obj)
    name = kind.__qualname__
    if isinstance(obj, enum.Enum):
        return "an enum cannot be saved", "save its .value or .name, or use register_type"
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return (
            "a dataclass that is not registered cannot be saved",
            f"use ckptfmt.register_type({name}, ...), or save dataclasses.asdict(x)",
        )
    if isinstance(obj, np.ndarray):
        return "an array stands where only plain values may", "move it out, or save its .tolist()"
    for base in (int, float, complex, str, bytes, tuple, list, dict, set, frozenset):
        if isinstance(obj, base):
            return (
                f"a subclass of {base.__name__} would come back as {base.__name__}",
                f"save {base.__name__}(x), or use register_type",
            )
    if callable(obj):
        return "code cannot be saved", "leave it out, or save its name"
    instead = "or leave it out"
    if isinstance(obj, io.IOBase):
        instead = "or save its name"
    elif isinstance(obj, collections.abc.Iterator | collections.abc.MappingView):
        instead = "or save list(x)"
    elif hasattr(obj, "__dict__") and not isinstance(obj, types.ModuleType):
        instead = "or save vars(x)"
    return (
        "an object of this type cannot be saved",
        f"use ckptfmt.register_type({name}, ...), {instead}",
    )
