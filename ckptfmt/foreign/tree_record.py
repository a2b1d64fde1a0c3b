"""The tree behind a file of named tensors: what the format's names, and tensors alone, do not say.

An export of ours writes it into the file, where other readers do not look, under `ckptfmt.tree`. It
is JSON, every part of which may be missing: `leaves`, a list of [name, tensor in the file,
attributes] or [name, null, value]; `containers`, of [name, kind, argument, attributes]; `beside`, a
map of tensors in the file to the leaves that they say once more, for other readers: copies of a tie,
numbers as arrays; `dtypes`, of what the file holds as raw bytes; `about`, the checkpoint's step,
metadata and metrics. Values, arguments and attributes are packed (spec 03) in base64. Nothing in it
is believed: the names must make a tree, every tensor must be there, and where a copy says something
else than its leaf, somebody has changed the file, and the copy holds.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CheckpointError, CorruptError
from ckptfmt.foreign.base import (
    ForeignContainer,
    ForeignTensor,
    ForeignTree,
    ForeignValue,
    like,
    tree_of,
)
from ckptfmt.foreign.streaming import boxes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD_KEY = "ckptfmt.tree"
RECORD_NBYTES_MAX = 64 << 20
_NUMEL = 4 << 20
"""Elements that are compared at once."""
_WIDE: Mapping[type, type[np.generic]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}


class _AsForeign:
    """Kinds of values that belong to a framework stay what the file says."""

    def pack(self, obj: object) -> tuple[str, object] | None:
        return None

    def unpack(self, tag: str, payload: object) -> object:
        return ForeignValue(tag, payload)


def pack_record(
    leaves: Iterable[tuple[str, str | None, bytes]],
    containers: Iterable[tuple[str, str, bytes, bytes]],
    *,
    beside: Mapping[str, str],
    dtypes: Mapping[str, str],
    about: bytes,
) -> str:
    """The text of a record; "" if it says nothing. Attributes that are empty are b""."""
    parts = {
        "leaves": [[name, tensor, _text(data)] for name, tensor, data in leaves],
        "containers": [[n, kind, _text(a), _text(marks)] for n, kind, a, marks in containers],
        "beside": dict(beside),
        "dtypes": dict(dtypes),
        "about": _text(about),
    }
    said = {key: part for key, part in parts.items() if part}
    return json.dumps(said, separators=(",", ":")) if said else ""


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def with_record(flat: ForeignTree, where: str, text: str | None) -> ForeignTree:
    """The tree that a file's record describes; `flat` itself if it has none.

    Args:
        flat: All tensors of the file, each under the name that the record has for it.
    Raises:
        CorruptError: The record is no tree of the file's tensors.
    """
    if text is None:
        return flat
    # Rows are longer than this: many short lists would take far more memory than the file.
    _check(text.count("[") * 12 <= len(text) + 64, "too many lists")
    _check(len(text) <= RECORD_NBYTES_MAX, "too long")
    try:
        return _described(flat, json.loads(text), where)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptError(
            "the record of the tree does not hold",
            reason="foreign-tree",
            where=f"{where}, {RECORD_KEY}",
            found=f"{type(error).__name__}: {error}"[:200],
            do="get the file again",
        ) from error


def _described(flat: ForeignTree, record: Any, where: str) -> ForeignTree:
    _check(isinstance(record, dict), "a map")
    tensors = {tensor.foreign_name: tensor for tensor in flat.tensors.values()}
    for name, dtype in record.get("dtypes", {}).items():
        tensors[name] = _viewed(tensors[name], dtype)
    if "leaves" in record:
        made = tree_of(
            _root(record, tensors, where),
            flat.format,
            metadata=flat.metadata,
            skipped=flat.skipped,
            ignored=flat.ignored,
        )
    else:
        made = flat
    made = replace(made, file=flat.file)
    return _with_about(made, _value(record["about"], where)) if "about" in record else made


def _with_about(tree: ForeignTree, about: Any) -> ForeignTree:
    """The tree with what its checkpoint says about itself."""
    step, metadata, metrics = (about.get(key) for key in ("step", "metadata", "metrics"))
    _check(step is None or (type(step) is int and 0 <= step < 10**16), "a step")
    _check(type(metadata) is dict and type(metrics) is dict, "metadata")
    _check(all(type(key) is str for key in (*metadata, *metrics)), "keys of metadata")
    _check(all(type(number) is float for number in metrics.values()), "metrics")
    return replace(tree, metadata=metadata, step=step, metrics=metrics)


def _viewed(tensor: ForeignTensor, dtype: Any) -> ForeignTensor:
    """A tensor whose elements stand in the file as raw bytes."""
    from ckptfmt.format import dtype_named, numpy_dtype

    known = dtype_named(dtype) if isinstance(dtype, str) else None
    raw = dtype_named(tensor.dtype)
    fits = known is not None and raw is not None and raw.name.startswith("void")
    _check(fits and known.bits == raw.bits and not known.is_variable, "a dtype")  # type: ignore[union-attr]
    assert known is not None
    kind, box = numpy_dtype(known), tensor.box
    _check(kind.type.__module__ == "ml_dtypes", "a dtype of raw bytes")

    def fetch() -> NDArray[Any]:
        return tensor.fetch().view(kind)

    def read(sides: tuple[slice, ...]) -> NDArray[Any]:
        assert box is not None
        return box(sides).view(kind)

    return like(tensor, dtype=known.name, fetch=fetch, box=None if box is None else read)


def _root(record: Any, tensors: Mapping[str, ForeignTensor], where: str) -> Any:
    from ckptfmt.engine import build_tree
    from ckptfmt.format import pack_value

    names: list[str] = []
    leaves: list[Any] = []
    ties: dict[str, ForeignTensor] = {}
    copies = {leaf: tensors[name] for name, leaf in record.get("beside", {}).items()}
    for name, tensor, data in record["leaves"]:
        _check(isinstance(name, str), "a name")
        names.append(name)
        copy = copies.get(name)
        if tensor is None:
            value = _value(data, where)
            is_same = copy is None or _is_value(value, copy)
            leaves.append(value if is_same else copy)
        elif copy is None or _are_equal(tensors[tensor], copy):
            leaves.append(_tensor(tensors[tensor], ties, data, where))
        else:
            leaves.append(_tensor(copy, ties, data, where))
    left = tensors.keys() - ties.keys() - record.get("beside", {}).keys()
    _check(not left, f"tensors that it does not name: {sorted(left)[:5]}")
    containers: list[tuple[str, str, bytes]] = []
    makers: dict[str, Callable[[Any], Any]] = {}
    for name, kind, argument, marks in record.get("containers", ()):
        _check(isinstance(name, str) and isinstance(kind, str), "a container")
        if kind == "type":
            # A registered type: its plain data, as other processes get it.
            kind, inner = _value(argument, where)[1:]
            containers.append((name, kind, pack_value(inner)))
        else:
            containers.append((name, kind, _bytes(argument)))
        if marks:
            makers[name] = partial(_container, _attributes(marks, where))
    return build_tree(names, leaves, containers, makers=makers, registered=False)


def _is_value(value: Any, tensor: ForeignTensor) -> bool:
    """Whether an array without axes says this value."""
    if tensor.shape:
        return False
    found = tensor.fetch()
    if isinstance(value, str | bytes):
        text = found[()]
        return text in (value, value.encode() if isinstance(value, str) else value)
    made = np.asarray(value, None if isinstance(value, np.generic) else _WIDE.get(type(value)))
    return made.dtype == found.dtype and made.tobytes() == found.tobytes()


def _are_equal(one: ForeignTensor, other: ForeignTensor) -> bool:
    """Whether two tensors hold the same bytes, compared piece by piece."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    total = math.prod(one.shape)
    return all(
        _piece(one, sides).tobytes() == _piece(other, sides).tobytes()
        for begin in range(0, total, _NUMEL)
        for sides in boxes_of(one.shape, begin, min(begin + _NUMEL, total))
    )


def _piece(tensor: ForeignTensor, sides: tuple[slice, ...]) -> NDArray[Any]:
    if tensor.box is not None:
        return tensor.box(sides)
    index: tuple[Any, ...] = (*sides, ...)
    made: NDArray[Any] = tensor.fetch()[index]
    return made


def _tensor(
    tensor: ForeignTensor, ties: dict[str, ForeignTensor], data: Any, where: str
) -> ForeignTensor:
    identity = tensor.identity or (where, tensor.foreign_name)
    attributes = _attributes(data, where) if data else {}
    made = like(tensor, identity=identity, attributes=attributes)
    ties[tensor.foreign_name] = made
    return made


def _container(attributes: dict[str, object], made: Any) -> Any:
    _check(isinstance(made, dict), "attributes of a list")
    return ForeignContainer(made, attributes)


def _attributes(data: Any, where: str) -> dict[str, object]:
    made = _value(data, where)
    _check(type(made) is dict and all("." in key for key in made), "attributes")
    found: dict[str, object] = made
    return found


def _value(data: Any, where: str) -> Any:
    from ckptfmt.format import parse_value

    return parse_value(_bytes(data), _AsForeign(), where=f"{where}, {RECORD_KEY}")


def _bytes(data: Any) -> bytes:
    _check(isinstance(data, str), "a text")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        _check(False, "base64")
    return b""


def _check(good: bool, what: str) -> None:
    if not good:
        raise CorruptError(
            f"the record of the tree does not hold: {what}",
            reason="foreign-tree",
            where=RECORD_KEY,
            do="get the file again",
        )
