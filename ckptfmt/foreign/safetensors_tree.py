"""The tree behind a file of named tensors: what joined names, and tensors alone, do not say.

An export of ours writes it into the file's metadata, under `ckptfmt.tree`; other readers take it
for a text. It is JSON: `leaves`, a list of [name, tensor in the file, attributes] or [name, null,
value], and `containers`, of [name, kind, argument, attributes]; values, arguments and attributes
are packed (spec 03) in base64. Nothing in it is believed: the names must make a tree, and every
tensor must be there.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ckptfmt.errors import CheckpointError, CorruptError
from ckptfmt.foreign.base import ForeignContainer, ForeignTensor, ForeignTree, ForeignValue, tree_of

TREE_KEY = "ckptfmt.tree"
RECORD_NBYTES_MAX = 12 << 20
"""Below what an importer takes of a file's metadata."""


class _AsForeign:
    """Kinds of values that belong to a framework stay what the file says."""

    def pack(self, obj: object) -> tuple[str, object] | None:
        return None

    def unpack(self, tag: str, payload: object) -> object:
        return ForeignValue(tag, payload)


def pack_record(
    leaves: Iterable[tuple[str, str | None, bytes]],
    containers: Iterable[tuple[str, str, bytes, bytes]],
) -> str:
    """The text of a record. Attributes that are empty are b""."""
    return json.dumps(
        {
            "leaves": [[name, tensor, _text(data)] for name, tensor, data in leaves],
            "containers": [[n, kind, _text(a), _text(marks)] for n, kind, a, marks in containers],
        },
        separators=(",", ":"),
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def with_tree(flat: ForeignTree, where: str) -> ForeignTree:
    """The tree that the file's record describes; `flat` itself if it has none.

    Raises:
        CorruptError: The record is no tree of the file's tensors.
    """
    text = flat.metadata.get(TREE_KEY)
    if not isinstance(text, str):
        return flat
    tensors = {tensor.foreign_name: tensor for tensor in flat.tensors.values()}
    metadata = {key: value for key, value in flat.metadata.items() if key != TREE_KEY}
    # Rows are longer than this: many short lists would take far more memory than the file.
    _check(text.count("[") * 12 <= len(text) + 64, "too many lists")
    try:
        root = _root(json.loads(text), tensors, where)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptError(
            "the record of the tree does not hold",
            reason="foreign-tree",
            where=f"{where}, {TREE_KEY}",
            found=f"{type(error).__name__}: {error}"[:200],
            do="get the file again",
        ) from error
    return tree_of(root, flat.format, metadata=metadata, skipped=flat.skipped, ignored=flat.ignored)


def _root(record: Any, tensors: Mapping[str, ForeignTensor], where: str) -> Any:
    from ckptfmt.engine import build_tree
    from ckptfmt.format import pack_value

    names: list[str] = []
    leaves: list[Any] = []
    ties: dict[str, ForeignTensor] = {}
    for name, tensor, data in record["leaves"]:
        _check(isinstance(name, str), "a name")
        names.append(name)
        if tensor is None:
            leaves.append(_value(data, where))
        else:
            leaves.append(_tensor(tensors[tensor], ties, data, where))
    left = tensors.keys() - ties.keys()
    _check(not left, f"tensors that it does not name: {sorted(left)[:5]}")
    containers: list[tuple[str, str, bytes]] = []
    makers: dict[str, Callable[[Any], Any]] = {}
    for name, kind, argument, marks in record["containers"]:
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


def _tensor(
    tensor: ForeignTensor, ties: dict[str, ForeignTensor], data: Any, where: str
) -> ForeignTensor:
    from dataclasses import replace

    identity = tensor.identity or (where, tensor.foreign_name)
    attributes = _attributes(data, where) if data else {}
    made = replace(tensor, identity=identity, attributes=attributes)
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

    return parse_value(_bytes(data), _AsForeign(), where=f"{where}, {TREE_KEY}")


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
            where=TREE_KEY,
            do="get the file again",
        )
