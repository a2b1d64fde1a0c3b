"""Rules as people write them: rows of a TOML file or of a list, each with one verb.

[[rule]]
transpose = '^(.*)/kernel$'
to = '\\1/weight'
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ckptfmt.errors import NotFoundError, StorageError, UsageError
from ckptfmt.foreign import lazy
from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.layer_rules import parse_layer
from ckptfmt.foreign.optimizers import row_of_class
from ckptfmt.foreign.presets import PRESETS, Layers
from ckptfmt.foreign.rules import Concat, Drop, Pattern, Rename, Rule, Split, Transform
from ckptfmt.types import Rules, StrPath

_FILE_NBYTES_MAX = 16 << 20


class _Row:
    """A row, whose keys must all be taken."""

    def __init__(self, row: Mapping[str, object], where: str) -> None:
        self._row, self.where = row, where
        self._left = set(row)
        self._known: list[str] = []

    def take(
        self, key: str, kind: type | tuple[type, ...], expected: str, default: Any = ...
    ) -> Any:
        self._known.append(key)
        if key not in self._row:
            if default is ...:
                raise self.error(f"{key} = {expected}", f"no {key}")
            return default
        self._left.discard(key)
        value = self._row[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise self.error(f"{key} = {expected}", f"{key} = {value!r}"[:120])
        return value

    def text(self, key: str, default: Any = ...) -> Any:
        return self.take(key, str, "text", default)

    def number(self, key: str, default: Any = ...) -> Any:
        return self.take(key, int, "an integer", default)

    def numbers(self, key: str, default: Any = ...) -> Any:
        found = self.take(key, (list, tuple), "a list of integers", default)
        if found is not default and not all(type(item) is int for item in found):
            raise self.error(f"{key} = a list of integers", f"{key} = {found!r}"[:120])
        return found

    def texts(self, key: str) -> list[str]:
        found = self.take(key, (list, tuple), "a list of texts")
        if not found or not all(isinstance(item, str) for item in found):
            raise self.error(f"{key} = a list of texts", f"{key} = {found!r}"[:120])
        return list(found)

    def finish(self) -> None:
        if self._left:
            found = ", ".join(sorted(map(str, self._left)))
            raise self.error(f"no key but {', '.join(dict.fromkeys(self._known))}", found)

    def error(self, expected: str, found: str) -> UsageError:
        return UsageError(
            "a rule is not understood",
            reason="rule-form",
            where=self.where,
            expected=expected,
            found=found,
            do="docs/convert.md lists the kinds of rules",
        )


def parse_rules(rows: Rules, where: str = "rules", *, in_file: bool = False) -> list[Rule]:
    """The rules that rows describe, in order; a file of rules names no other.

    Raises:
        UsageError: A row is not understood. NotFoundError: A file that it names is not there.
    """
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Sequence):
        raise UsageError(
            "rules are no list",
            reason="rule-form",
            where=where,
            expected='a list of rows: [{"rename": "^module/", "to": ""}]',
            found=type(rows).__name__,
        )
    made: list[Rule] = []
    for at, row in enumerate(rows):
        place = f"{where}[{at}]"
        if not isinstance(row, Mapping):
            raise _Row({}, place).error("a row of keys and values", type(row).__name__)
        made += _parse_row(_Row(row, place), row, in_file)
    return made


def _parse_row(row: _Row, keys: Mapping[str, object], in_file: bool) -> list[Rule]:
    known = [verb for verb in _VERBS if not (in_file and verb == "map")]
    verbs = [key for key in known if key in keys]
    if len(verbs) != 1:
        raise row.error(f"just one of {', '.join(known)}", ", ".join(map(str, keys)) or "nothing")
    made = _VERBS[verbs[0]](row)
    row.finish()
    return made


def read_rules(path: StrPath) -> list[Rule]:
    """The rules of a TOML file: its `[[rule]]` tables, in order."""
    import tomllib  # here: most conversions read no rules

    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(_FILE_NBYTES_MAX)
    except FileNotFoundError:
        raise NotFoundError("no such file of rules", reason="file", where=name) from None
    except OSError as error:
        raise StorageError(
            "cannot read the file of rules",
            reason="access" if isinstance(error, PermissionError) else "read",
            where=name,
            found=error.strerror,
            errno=error.errno,
        ) from error
    try:
        document = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            "a file of rules is no TOML", reason="rule-form", where=name, found=str(error)
        ) from None
    rows = document.pop("rule", None)
    if document or not isinstance(rows, list) or not rows:
        found = ", ".join(document) or "no [[rule]]"
        raise _Row({}, name).error("[[rule]] tables and nothing else", found)
    return parse_rules(rows, name, in_file=True)


def _rename(row: _Row) -> list[Rule]:
    return [Rename(Pattern(row.text("rename"), row.text("to")))]


def _drop(row: _Row) -> list[Rule]:
    return [Drop(Pattern(row.text("drop")))]


def _one(
    verb: str, what: str, op: Callable[[ForeignTensor], ForeignTensor], row: _Row
) -> list[Rule]:
    return [Transform(Pattern(row.text(verb), row.text("to", None)), what, op)]


def _transpose(row: _Row) -> list[Rule]:
    axes = row.numbers("axes", None)
    what = "transpose" if axes is None else f"transpose {list(axes)}"
    return _one("transpose", what, partial(lazy.permuted, axes=axes), row)


def _permute(row: _Row) -> list[Rule]:
    axes = row.numbers("axes")
    return _one("permute", f"permute {list(axes)}", partial(lazy.permuted, axes=axes), row)


def _reshape(row: _Row) -> list[Rule]:
    shape = row.numbers("shape")
    return _one("reshape", f"reshape {list(shape)}", partial(lazy.reshaped, shape=shape), row)


def _cast(row: _Row) -> list[Rule]:
    from ckptfmt.format import dtype_named

    dtype = row.text("dtype")
    known = dtype_named(dtype)
    if known is None or known.is_variable:
        raise row.error("dtype = a NumPy or ml_dtypes name: float16, bfloat16", f"dtype = {dtype}")
    return _one("cast", f"cast {dtype}", partial(lazy.cast, dtype=known.name), row)


def _reorder(row: _Row) -> list[Rule]:
    axis, order = row.number("axis"), row.numbers("order")
    op = partial(lazy.blocks, axis=axis, order=order)
    return _one("reorder", f"reorder {list(order)} along axis {axis}", op, row)


def _split(row: _Row) -> list[Rule]:
    sizes = row.numbers("sizes", None)
    pattern = Pattern(row.text("split"))
    return [Split(pattern, row.texts("to"), row.number("axis", 0), sizes)]


def _concat(row: _Row) -> list[Rule]:
    to = row.text("to")
    sources = [Pattern(text, to) for text in row.texts("concat")]
    return [Concat(sources, row.number("axis", 0))]


def _preset(row: _Row) -> list[Rule]:
    name = row.text("preset")
    made = PRESETS.get(name)
    if made is None:
        raise UsageError(
            "no such preset",
            reason="rule-preset",
            where=row.where,
            found=repr(name),
            expected=f"one of {', '.join(PRESETS)}",
        )
    given = row.take("layers", Mapping, "a table of patterns and kinds of layers", {})
    if not all(isinstance(item, str) for item in given.values()):
        raise row.error("layers = {pattern = kind of layer}", f"layers = {given!r}"[:120])
    for key, kind in given.items():
        if row_of_class(kind) is None:
            parse_layer(key, kind)  # which refuses what is none
    layers = Layers([(Pattern(str(key)), str(kind)) for key, kind in given.items()])
    return [made(layers, row.text("root", None))]


def _file(row: _Row) -> list[Rule]:
    return read_rules(row.text("map"))


_VERBS: dict[str, Callable[[_Row], list[Rule]]] = {
    "rename": _rename,
    "drop": _drop,
    "transpose": _transpose,
    "permute": _permute,
    "reshape": _reshape,
    "reorder": _reorder,
    "split": _split,
    "concat": _concat,
    "cast": _cast,
    "preset": _preset,
    "map": _file,
}
