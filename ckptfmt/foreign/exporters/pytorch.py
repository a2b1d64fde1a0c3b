"""`.pt`: what `torch.load(weights_only=True)` opens, written without torch.

The tree is as it is: nested dicts and lists, ints as keys, ties one tensor. Only names that torch's
restricted unpickler takes are written.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.engine import ABSENT
from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.exporters.base import Exporter, ExportPlan, read_written
from ckptfmt.foreign.exporters.pickle_writer import Call, Named, Persistent, WithState, pack_pickle
from ckptfmt.foreign.exporters.staging import Staging
from ckptfmt.foreign.exporters.torch_values import plain
from ckptfmt.foreign.exporters.tree import (
    PIECE_NBYTES,
    ExportTensor,
    ExportTree,
    Value,
    packed_halves,
    raw_bytes,
)
from ckptfmt.foreign.exporters.zip_writer import ALIGN_NBYTES, ZipWriter
from ckptfmt.foreign.pytorch.composites import INDICES
from ckptfmt.foreign.pytorch.dtypes import DTYPES, X2, TorchDtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STORAGES = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long",
    "float16": "Half", "float32": "Float", "float64": "Double", "bfloat16": "BFloat16",
    "bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
    "qint8": "QInt8", "quint8": "QUInt8", "qint32": "QInt32", "quint4x2": "QUInt4x2",
    "quint2x4": "QUInt2x4",
}  # fmt: skip
"""Dtypes with a storage class; torch gives all others an untyped one, and the dtype beside it."""
_TENSOR, _OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_COMPOSITE = "torch.tensor"
_SPARSE = ("sparse_coo", *INDICES)


class PytorchExporter(Exporter):
    """Row `pytorch` of EXPORTERS."""

    format = "pytorch"

    def plan(self, tree: ExportTree, options: Mapping[str, Any]) -> ExportPlan:
        return _Planning(tree).done()

    def write(self, plan: ExportPlan, staging: Staging) -> Sequence[tuple[str, str]]:
        # torch takes a name without dots for the archive's folder.
        top = os.path.basename(self.name).split(".")[0] or "archive"
        room = plan.nbytes + len(plan.state.pickle) + 4096
        with staging.stream(self.name, room) as stream:
            archive = ZipWriter(stream)

            def add(name: str, data: bytes) -> None:
                archive.add(f"{top}/{name}", len(data), [data])

            # This order, and the aligned bytes, let torch compute where a storage is.
            add("data.pkl", plan.state.pickle)
            add(".format_version", b"1")
            add(".storage_alignment", str(ALIGN_NBYTES).encode())
            add("byteorder", b"little")
            storages = plan.state.storages
            tensors = [tensor for tensor, _ in storages]
            for number, ((tensor, pieces), (_, storage)) in enumerate(
                zip(plan.tree.read(tensors), storages, strict=True)
            ):
                data = storage.bytes_of(tensor, pieces)
                archive.add(f"{top}/data/{number}", storage.nbytes, data)
            add("version", b"3\n")
            archive.finish()
        return [(self.name, self.name)]

    def read_back(self, plan: ExportPlan, staging: Staging) -> Mapping[str, ForeignTensor]:
        return read_written(staging.path(self.name), self.format)


class _Storage:
    """How one tensor lies in a storage of its own."""

    __slots__ = ("dtype", "format", "nbytes", "shape", "strides")

    def __init__(self, tensor: ExportTensor, dtype: TorchDtype, memory_format: str) -> None:
        self.dtype, self.format = dtype, memory_format
        self.shape = tensor.shape
        if dtype.name == X2:
            self.shape = (*tensor.shape[:-1], tensor.shape[-1] // 2)
        self.strides = _strides(self.shape, memory_format)
        self.nbytes = -(-math.prod(self.shape) * dtype.itemsize // _per_byte(dtype))

    def bytes_of(
        self, tensor: ExportTensor, pieces: Iterator[NDArray[Any]]
    ) -> Iterator[NDArray[np.uint8]]:
        if self.dtype.packed > 1:
            from ckptfmt.format import pack_array

            if self.dtype.name == X2:
                yield from packed_halves(pieces)
            else:
                for piece in pieces:  # all of it: a quantized tensor is planned as one piece
                    yield np.frombuffer(pack_array(piece), np.uint8)
            return
        for piece in pieces:
            yield raw_bytes(np.moveaxis(piece, 1, -1) if self.format else piece)


def _per_byte(dtype: TorchDtype) -> int:
    return 1 if dtype.name == X2 else dtype.packed


def _strides(shape: tuple[int, ...], memory_format: str) -> tuple[int, ...]:
    """In elements; as torch has them for tensors without elements too."""
    order = list(range(len(shape)))
    if memory_format:
        order = [0, *order[2:], 1]
    made, step = [0] * len(shape), 1
    for axis in reversed(order):
        made[axis] = step
        step *= max(shape[axis], 1)
    return tuple(made)


class _Written:
    """What `write` needs: the pickle, and each tensor with its storage."""

    __slots__ = ("pickle", "storages")

    def __init__(self, pickle: bytes, storages: list[tuple[ExportTensor, _Storage]]) -> None:
        self.pickle, self.storages = pickle, storages


class _Planning:
    """Makes the pickle of a tree, and finds out what torch cannot hold."""

    def __init__(self, tree: ExportTree) -> None:
        self._plan = ExportPlan(tree)
        self._storages: list[tuple[ExportTensor, _Storage]] = []
        self._made: dict[int, Any] = {}
        self._composites = {
            name: attributes[_COMPOSITE]
            for name, attributes in tree.container_attributes.items()
            if isinstance(attributes.get(_COMPOSITE), dict)
        }

    def done(self) -> ExportPlan:
        tree, plan = self._plan.tree, self._plan
        makers: dict[str, Callable[[Any], Any]] = {}
        for name, facts in self._composites.items():
            kind = facts.get("kind")
            if kind in _SPARSE:
                makers[name] = partial(_sparse, str(kind))
            elif kind == "quantized":
                makers[name] = partial(_quantized, facts)
        for name, attributes in tree.container_attributes.items():
            versions = attributes.get("torch.module_versions")
            if isinstance(versions, dict):
                makers[name] = partial(_with_versions, versions)
        for name, (kind, _) in tree.containers.items():
            if kind in ("defaultdict", "namedtuple", "type"):
                other = "a dict" if kind == "defaultdict" else "a tuple"
                plan.transformed[name or "(root)"] = other if kind != "type" else "its plain data"
        root = tree.nested(self._leaf, makers)
        plan.tensors = [tensor for tensor, _ in self._storages]
        plan.state = _Written(pack_pickle(root), self._storages)
        return plan

    def _leaf(self, name: str, leaf: ExportTensor | Value) -> Any:
        inside = self._composite_of(name)
        if inside is not None and inside.get("kind") not in (*_SPARSE, "quantized"):
            self._plan.skipped[name] = f"part of a tensor of the kind {inside.get('kind')}"
            return ABSENT
        if isinstance(leaf, Value):
            return self._value(name, leaf.value)
        if leaf.row not in self._made:
            is_part = inside is not None and name.endswith("/int_repr")
            quantized = str(inside["dtype"]) if inside is not None and is_part else ""
            self._made[leaf.row] = self._tensor(leaf, quantized)
        made = self._made[leaf.row]
        if isinstance(made, str):
            self._plan.skipped[name] = made
            return ABSENT
        self._plan.names[name] = name
        return made

    def _composite_of(self, name: str) -> Mapping[str, Any] | None:
        """What makes one tensor of the dict that a leaf is in."""
        if not self._composites:
            return None
        parts = name.split("/")
        above = ("/".join(parts[:n]) for n in range(len(parts) - 1, -1, -1))
        return next((self._composites[n] for n in above if n in self._composites), None)

    def _value(self, name: str, value: Any) -> Any:
        try:
            made, remark = plain(value)
            pack_pickle(made)
        except UnsupportedError as error:
            self._plan.skipped[name] = f"a value of the type {error.found}, which is code for torch"
            return ABSENT
        if remark:
            self._plan.transformed[name] = remark
        self._plan.names[name] = name
        return made

    def _tensor(self, tensor: ExportTensor, quantized: str) -> Any:
        """The call that rebuilds it, or why there is none."""
        dtype = DTYPES.get(quantized or str(tensor.attributes.get("torch.dtype") or ""))
        if dtype is None or dtype.stored != tensor.dtype:
            name = X2 if tensor.dtype == "float4_e2m1fn" else tensor.dtype
            dtype = DTYPES.get(name)
        if dtype is None or (dtype.is_quantized and not quantized):
            return f"torch has no dtype {tensor.dtype}"
        if dtype.name == X2 and (not tensor.shape or tensor.shape[-1] % 2):
            return "torch packs elements of 4 bits in pairs along the last axis, which is odd here"
        if dtype.is_quantized and dtype.packed > 1 and tensor.nbytes > PIECE_NBYTES:
            return "a quantized tensor of over 64 MiB with several elements a byte"
        memory_format = str(tensor.attributes.get("torch.memory_format") or "")
        if memory_format and not _fits(tensor, memory_format):
            self._plan.transformed[tensor.name] = f"not in {memory_format}, but in C order"
            memory_format = ""
        storage = _Storage(tensor, dtype, memory_format)
        key = str(len(self._storages))
        self._storages.append((tensor, storage))
        known = _STORAGES.get(dtype.name)
        numel = math.prod(storage.shape)
        if known is None:
            kind, count = Named("torch.storage.UntypedStorage"), storage.nbytes
        else:
            kind, count = Named(f"torch.{known}Storage"), -(-numel // _per_byte(dtype))
        persistent = Persistent(("storage", kind, key, "cpu", count))
        place = (persistent, 0, storage.shape, storage.strides)
        if quantized:
            return place
        grad = tensor.attributes.get("torch.requires_grad") is True
        hooks = OrderedDict[str, Any]()
        if known is None:
            return Call(_OF_DTYPE, (*place, grad, hooks, Named(f"torch.{dtype.name}")))
        return Call(_TENSOR, (*place, grad, hooks))


def _fits(tensor: ExportTensor, memory_format: str) -> bool:
    """Whether the values can be written in this order, piece by piece."""
    axes = {"channels_last": 4, "channels_last_3d": 5}.get(memory_format)
    one = tensor.nbytes // max(tensor.shape[0], 1) if tensor.shape else 0
    return axes == len(tensor.shape) and (tensor.nbytes <= PIECE_NBYTES or one <= PIECE_NBYTES)


def _with_versions(versions: Mapping[str, Any], made: Any) -> Any:
    """A `state_dict`, which is an OrderedDict in torch, with the versions of its modules: 1 where
    nothing else is said."""
    prefixes = {"": 1}
    for key in made:
        parts = str(key).split(".")[:-1]
        prefixes.update({".".join(parts[:n]): 1 for n in range(1, len(parts) + 1)})
    every = {**prefixes, **versions}
    metadata = OrderedDict(
        (prefix, {} if version is None else {"version": version})
        for prefix, version in every.items()
    )
    return WithState(made, {"_metadata": metadata})


def _sparse(kind: str, made: dict[str, Any]) -> Any:
    layout = Call("torch.serialization._get_layout", (f"torch.{kind}",))
    size = Call("torch.Size", (tuple(made["shape"]),))
    if kind == "sparse_coo":
        parts: tuple[Any, ...] = (made["indices"], made["values"], size)
        if made.get("coalesced") is not None:
            parts = (*parts, made["coalesced"])
    else:
        first, second = INDICES[kind]
        parts = (made[first], made[second], made["values"], size)
    return Call("torch._utils._rebuild_sparse_tensor", (layout, parts))


def _quantized(facts: Mapping[str, Any], made: dict[str, Any]) -> Any:
    scheme = Named(f"torch.{facts['scheme']}")
    if "scale" in made:
        parameters: tuple[Any, ...] = (scheme, float(made["scale"]), int(made["zero_point"]))
    else:
        parameters = (scheme, made["scales"], made["zero_points"], made["axis"])
    grad = facts.get("requires_grad") is True
    place = made["int_repr"]
    return Call("torch._utils._rebuild_qtensor", (*place, parameters, grad, OrderedDict()))
