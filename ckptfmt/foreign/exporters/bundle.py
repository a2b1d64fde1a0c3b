"""TensorFlow checkpoints, written without TensorFlow: a data file, an index with the object graph,
and the folder's `checkpoint` file.

A leaf is a variable at the path of its keys, so that `tf.train.Checkpoint(**objects).read` finds it
in objects that hold each other under those names; its other paths (ties, and what TensorFlow knew
it by when it was saved) lead to it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.bundle.graph import GRAPH_KEY, RECORD_FIELD
from ckptfmt.foreign.bundle.names import ALIASES, ATTRIBUTES, FULL_NAME, VALUE
from ckptfmt.foreign.bundle.object_names import STATE
from ckptfmt.foreign.bundle.paths import INDEX_SUFFIX, STATE_FILE, read_state, shard_path
from ckptfmt.foreign.bundle.types import QUANTIZED, STRING, TYPES
from ckptfmt.foreign.crc32c import crc32c, masked
from ckptfmt.foreign.exporters.base import Exporter, ExportPlan
from ckptfmt.foreign.exporters.names import keys_of
from ckptfmt.foreign.exporters.record import note_keys, record_of
from ckptfmt.foreign.exporters.staging import Staging, replace_file
from ckptfmt.foreign.exporters.stream import ExportStream
from ckptfmt.foreign.exporters.tree import ExportTensor, ExportTree, raw_bytes
from ckptfmt.foreign.protobuf import FIXED32, pack_field, pack_varint
from ckptfmt.foreign.sstable import pack_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

Keys = tuple[str, ...]
ALIGN_NBYTES = 64
_NUMBERS = {kind.dtype: number for number, kind in TYPES.items() if number not in QUANTIZED}
_QUANTIZED = {TYPES[number].name: number for number in QUANTIZED}
_UINT32_MAX = 0xFFFFFFFF


class TensorBundleExporter(Exporter):
    """Row `tensorbundle` of EXPORTERS. The destination is a prefix: `out/ckpt-7`."""

    format = "tensorbundle"

    def __init__(self, dst: str) -> None:
        super().__init__(dst.removesuffix(INDEX_SUFFIX))
        self._names = [shard_path(self.name, 0, 1), self.name + INDEX_SUFFIX]

    def targets(self) -> Sequence[str]:
        return [os.path.join(self.parent, name) for name in self._names]

    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        plan = ExportPlan(tree)
        paths: dict[Keys, str] = {}
        for tensor in tree.tensors:
            if reason := _reason(tensor):
                plan.skip(tensor, reason)
                continue
            plan.tensors.append(tensor)
            if tensor.dtype == "string":
                plan.dtypes[tensor.name] = "bytes"
                plan.transformed[tensor.name] = "bytes, as all text of TensorFlow"
            first = _object_key(tensor.name, paths)
            for name in tensor.names:
                _object_key(name, paths)
                plan.names[name] = first
                if name != tensor.name:
                    plan.transformed[name] = f"another path to {tensor.name}"
        plan.carry_scalars(lambda name: _object_key(name, paths), _reason)
        note_keys(plan)
        plan.dtypes.update(
            {t.name: "bytes" for t in plan.tensors if t.array is not None and t.dtype == "string"}
        )
        plan.state = _Graph(tree.root)
        for tensor in plan.tensors:
            plan.state.add(tensor, plan.names[tensor.name])
        plan.state.link_slots()
        return plan

    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        data, index = self._names
        rows: list[tuple[bytes, bytes]] = []
        with staging.stream(data, plan.nbytes + ALIGN_NBYTES * len(plan.tensors)) as stream:
            for tensor, pieces in plan.tree.read(plan.tensors):
                key = plan.names[tensor.name].encode()
                if tensor.is_variable:
                    (strings,) = pieces
                    rows.append((key, _put_strings(stream, strings)))
                else:
                    rows.append((key, _put_tensor(stream, tensor, pieces)))
            graph = np.empty((), object)
            # TensorFlow passes fields over that it does not know.
            text = record_of(plan, is_plain=lambda name, key: False).encode()
            graph[()] = plan.state.pack() + (pack_field(RECORD_FIELD, text) if text else b"")
            rows.append((GRAPH_KEY.encode(), _put_strings(stream, graph)))
        # One shard, little-endian, version 1 of the producer.
        header = pack_field(1, 1) + pack_field(3, pack_field(1, 1))
        staging.put(index, pack_table([(b"", header), *sorted(rows)]))
        return [(name, name) for name in self._names]

    def published(self) -> None:
        """Let the folder's `checkpoint` file name this one as the latest, as TensorFlow does."""
        path = os.path.join(self.parent, STATE_FILE)
        every: list[str] = []
        if os.path.lexists(path):
            try:
                every = [name for name in read_state(path).every if name != self.name]
            except CorruptError:
                return  # not a file of this kind: it stays as it is
        lines = [f"model_checkpoint_path: {_quoted(self.name)}"]
        lines += [f"all_model_checkpoint_paths: {_quoted(name)}" for name in (*every, self.name)]
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def _reason(tensor: ExportTensor) -> str:
    """Why a tensor cannot be carried, or ""."""
    known = tensor.dtype in _NUMBERS or tensor.dtype == "string"
    return "" if known else f"TensorFlow has no dtype {tensor.dtype}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _object_key(name: str, paths: dict[Keys, str]) -> str:
    """The key of a leaf as an object's variable.

    Raises:
        UnsupportedError: It can have none, or another leaf has the same.
    """
    keys = tuple(keys_of(name))
    if not keys or "" in keys or keys[0].startswith("\0"):  # as the keys of slices do
        raise UnsupportedError(
            "a variable of TensorFlow must have a name",
            reason="export-name",
            where=repr(name),
            do="put it into a dict, under a key that is not empty and begins with no zero byte",
        )
    if paths.setdefault(keys, name) != name:
        raise UnsupportedError(
            "two leaves would have one name",
            reason="export-name",
            where=f"{paths[keys]}, {name}",
            do="leave one of them out: names=",
        )
    return "/".join(map(_escaped, keys)) + ATTRIBUTES + VALUE


def _escaped(key: str) -> str:
    return key.replace(".", "..").replace("/", ".S")


class _Graph:
    """TensorFlow's objects: one for each inner node of the tree and each variable.

    Args:
        root: The container that is exported; "" for all. Aliases begin below the object that was
            saved, which is the first key of a whole tree.
    """

    def __init__(self, root: str) -> None:
        self._depth = 0 if root else 1
        self._children: list[dict[str, int]] = [{}]
        self._variables: dict[int, tuple[str, str]] = {}
        self._by_path: dict[Keys, int] = {}
        self._slots: list[tuple[Keys, Keys, str]] = []

    def add(self, tensor: ExportTensor, key: str) -> None:
        paths = [tuple(keys_of(name)) for name in tensor.names]
        full_name = tensor.attributes.get(FULL_NAME)
        number = self._new()
        self._variables[number] = (key, full_name if isinstance(full_name, str) else "")
        for path in paths:
            self._lead(path, number)
            for begin in range(len(path)):  # by what is below its model, too
                self._by_path.setdefault(path[begin:], number)
        for path in self._aliases(tensor, paths[0]):
            self._lead(path, number)
            self._note_slot(paths[0], path)

    def _note_slot(self, path: Keys, alias: Keys) -> None:
        """`<optimizer>/state/<variable>/<slot>` that Keras has as `<optimizer>/_momentums/3`."""
        optimizer = alias[:-2]
        rest = path[len(optimizer) :]
        is_state = path[: len(optimizer)] == optimizer and rest[:1] == (STATE,) and len(rest) > 2
        if is_state and alias[-1].isdigit() and alias[-2] != "_variables":
            self._slots.append((optimizer, rest[1:-1], alias[-1]))

    def link_slots(self) -> None:
        """Lead from Keras's optimizers to the variables that they train, so that a reader finds out
        whose slot is whose: `<optimizer>/_trainable_variables/3`."""
        for optimizer, variable, position in self._slots:
            number = self._by_path.get(variable)
            if number is not None:
                self._lead((*optimizer, "_trainable_variables", position), number)

    def _aliases(self, tensor: ExportTensor, path: Keys) -> Iterable[Keys]:
        found = tensor.attributes.get(ALIASES)
        for alias in found if isinstance(found, list) else []:
            keys = tuple(keys_of(alias)) if isinstance(alias, str) else ()
            if keys and "" not in keys:
                yield (*path[: self._depth], *keys)

    def _new(self) -> int:
        self._children.append({})
        return len(self._children) - 1

    def _lead(self, path: Keys, number: int) -> None:
        """An edge to a variable; no path leads through one, and the first to a name keeps it."""
        at = 0
        for key in path[:-1]:
            below = self._children[at].get(key)
            if below is None:
                below = self._children[at][key] = self._new()
            if below in self._variables:
                return
            at = below
        self._children[at].setdefault(path[-1], number)

    def pack(self) -> bytes:
        """The graph as a protocol buffer."""
        return b"".join(pack_field(1, self._node(at)) for at in range(len(self._children)))

    def _node(self, at: int) -> bytes:
        made = b"".join(
            pack_field(1, pack_field(1, number) + pack_field(2, name.encode()))
            for name, number in self._children[at].items()
        )
        if at in self._variables:
            key, full_name = self._variables[at]
            parts = pack_field(1, VALUE.encode())
            parts += pack_field(2, full_name.encode()) if full_name else b""
            made += pack_field(2, parts + pack_field(3, key.encode()))
        return made + pack_field(5, pack_field(1, 1))  # it has values, itself or below


def _entry(number: int, shape: Sequence[int], start: int, nbytes: int, crc: int) -> bytes:
    dims = b"".join(pack_field(2, pack_field(1, n) if n else b"") for n in shape)
    made = pack_field(1, number) + pack_field(2, dims)
    made += pack_field(4, start) if start else b""
    made += pack_field(5, nbytes) if nbytes else b""
    return made + pack_varint(6 << 3 | FIXED32) + masked(crc).to_bytes(4, "little")


def _put_tensor(
    stream: ExportStream, tensor: ExportTensor, pieces: Iterable[NDArray[Any]]
) -> bytes:
    stream.pad(ALIGN_NBYTES)
    start, crc = stream.position, 0
    for piece in pieces:
        crc = stream.put_values(raw_bytes(piece), crc32c, crc)
    quantized = str(tensor.attributes.get("tf.dtype") or "")
    number = _QUANTIZED.get(quantized, 0)
    if not number or TYPES[number].dtype != tensor.dtype:
        number = _NUMBERS[tensor.dtype]
    return _entry(number, tensor.shape, start, stream.position - start, crc)


def _put_strings(stream: ExportStream, strings: NDArray[Any]) -> bytes:
    """Varint lengths, their checksum, the bytes. Each length is hashed as 32 bits, or as 64."""
    items = [s.encode() if isinstance(s, str) else bytes(s) for s in strings.ravel().tolist()]
    lengths = [len(item) for item in items]
    hashed = b"".join(n.to_bytes(4 if n <= _UINT32_MAX else 8, "little") for n in lengths)
    crc = crc32c(hashed)
    word = masked(crc).to_bytes(4, "little")
    start, crc = stream.position, crc32c(word, crc)
    stream.put(b"".join(map(pack_varint, lengths)) + word)
    for item in items:
        stream.put(item)
        crc = crc32c(item, crc)
    return _entry(STRING, strings.shape, start, stream.position - start, crc)
