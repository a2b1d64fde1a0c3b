"""Builders of Python's own plain data: what a call to these names makes, without the call.

Each takes the arguments as they stand in the pickle and checks their types; whatever is not exactly
as these classes pickle themselves is illegal, and the machine says where.
"""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from ckptfmt.foreign.pickle_machine import Builder, Global, Record, illegal

_TUPLES_MAX = 4096
_SCALARS = (str, bytes, int, float, bool, type(None))
_FACTORIES: dict[str, Callable[[], Any]] = {
    **{kind.__name__: kind for kind in (int, float, str, list, dict, set)},
    "long": int,
    "unicode": str,
}
"""By their names in `builtins` and, of protocols below 3, in Python 2's `__builtin__`."""


def need(good: object, what: str) -> None:
    """Raise `illegal(what)` unless it is good."""
    if not good:
        raise illegal(what)


def typed(obj: Any, *kinds: type) -> Any:
    """The object, if it is of exactly one of these types."""
    if type(obj) not in kinds:
        raise illegal(f"{' or '.join(k.__name__ for k in kinds)} wanted, not {type(obj).__name__}")
    return obj


def _hashable(items: Any) -> list[Any]:
    """Elements whose hashes nobody can steer far: no nested tuples, and few flat ones."""
    found = list(typed(items, list, tuple))
    tuples = [item for item in found if type(item) is tuple]
    need(len(tuples) <= _TUPLES_MAX, "too many tuples in a set")
    for item in (*(i for i in found if type(i) is not tuple), *(i for t in tuples for i in t)):
        need(type(item) in _SCALARS, f"an element of type {type(item).__name__} in a set")
        need(type(item) is not int or -(1 << 63) <= item < 1 << 64, "a large int in a set")
    return found


def _items(args: tuple[Any, ...]) -> list[Any]:
    need(len(args) <= 1, "more than one argument")
    return _hashable(args[0]) if args else []


def _encode(args: tuple[Any, ...]) -> bytes:
    text, encoding = args
    need(encoding in ("latin1", "latin-1"), "another encoding than latin1")
    made: bytes = typed(text, str).encode("latin-1")
    return made


def _bytes(args: tuple[Any, ...]) -> bytes:
    return _encode(args) if len(args) == 2 else bytes(typed(args[0], bytes) if args else b"")


def _ordered(args: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    if not args:
        return OrderedDict()
    pairs = [typed(pair, list, tuple) for pair in typed(args[0], list, tuple)]
    need(len(args) == 1 and all(len(pair) == 2 for pair in pairs), "not pairs")
    keys = _hashable([pair[0] for pair in pairs])
    return OrderedDict(zip(keys, (pair[1] for pair in pairs)))


def _defaultdict(args: tuple[Any, ...]) -> defaultdict[Any, Any] | Record:
    need(len(args) <= 2, "too many arguments")
    made: defaultdict[Any, Any] = defaultdict()
    if args and args[0] is not None:
        name = typed(args[0], Global, Record).name
        factory = _FACTORIES.get(name.removeprefix("__builtin__.").removeprefix("builtins."))
        if factory is None or type(args[0]) is Record:
            return Record("collections.defaultdict", args)  # its factory is code: opaque
        made.default_factory = factory
    if len(args) == 2:
        made.update(typed(args[1], dict, OrderedDict))
    return made


def _counter(args: tuple[Any, ...]) -> Counter[Any]:
    made: Counter[Any] = Counter()
    if args:
        (counts,) = args
        # dict.update: a Counter's own would add up.
        dict.update(made, typed(counts, dict, OrderedDict))
    return made


def _deque(args: tuple[Any, ...]) -> deque[Any]:
    need(len(args) <= 2, "too many arguments")
    items = typed(args[0], list, tuple) if args else ()
    limit = typed(args[1], int, type(None)) if len(args) == 2 else None
    return deque(items, limit)


def _range(args: tuple[Any, ...]) -> range:
    return range(*(typed(n, int) for n in args))


def _slice(args: tuple[Any, ...]) -> slice:
    return slice(*(typed(n, int, type(None)) for n in args))


def _complex(args: tuple[Any, ...]) -> complex:
    real, imag = args
    return complex(typed(real, float, int), typed(imag, float, int))


def _datetime(args: tuple[Any, ...]) -> datetime.datetime:
    need(len(args) in (1, 2), "not the state of a datetime")
    zone = (typed(args[1], datetime.timezone),) if len(args) == 2 else ()
    made: datetime.datetime = _FROM_STATE["datetime"](_ten(args[0], 10), *zone)
    return made


def _ten(state: Any, nbytes: int) -> bytes:
    raw: bytes = state.encode("latin-1") if type(state) is str else typed(state, bytes)
    need(len(raw) == nbytes, "a state of another length")
    return raw


def _date(args: tuple[Any, ...]) -> datetime.date:
    (state,) = args
    made: datetime.date = _FROM_STATE["date"](_ten(state, 4))
    return made


def _timedelta(args: tuple[Any, ...]) -> datetime.timedelta:
    days, seconds, micros = args
    return datetime.timedelta(typed(days, int), typed(seconds, int), typed(micros, int))


def _timezone(args: tuple[Any, ...]) -> datetime.timezone:
    if len(args) == 2:
        return datetime.timezone(typed(args[0], datetime.timedelta), typed(args[1], str))
    (offset,) = args
    return datetime.timezone(typed(offset, datetime.timedelta))


def _path(kind: type[pathlib.PurePath]) -> Builder:
    return lambda args: kind(*(typed(part, str) for part in args))


# These classes take the bytes of their own state, which their stubs do not tell.
_FROM_STATE: Mapping[str, Any] = {"datetime": datetime.datetime, "date": datetime.date}
_BUILTINS: Mapping[str, Builder] = {
    "set": lambda args: set(_items(args)),
    "frozenset": lambda args: frozenset(_items(args)),
    "bytearray": lambda args: bytearray(_bytes(args)),
    "bytes": _bytes,
    "complex": _complex,
    "range": _range,
    "xrange": _range,
    "slice": _slice,
}
PLAIN_BUILDERS: Mapping[str, Builder] = {
    **{f"builtins.{name}": builder for name, builder in _BUILTINS.items()},
    **{f"__builtin__.{name}": builder for name, builder in _BUILTINS.items()},
    "_codecs.encode": _encode,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    **dict.fromkeys(
        (
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath")
        ),
        _path(pathlib.PurePosixPath),
    ),
    **dict.fromkeys(
        (
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("WindowsPath", "PureWindowsPath")
        ),
        _path(pathlib.PureWindowsPath),
    ),
}
"""Name -> builder. A defaultdict's or a Counter's later items come through the dict's own opcodes."""
