"""What the names in torch's pickles make: tensors and values, of plain arguments, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.foreign.base import ForeignValue
from ckptfmt.foreign.pickle_builders import PLAIN_BUILDERS, need, typed
from ckptfmt.foreign.pickle_machine import Builder, Global, Record, illegal
from ckptfmt.foreign.pickle_numpy import NUMPY_BUILDERS, ArrayNode
from ckptfmt.foreign.pickle_tree import OMIT, Node, TreeMaker
from ckptfmt.foreign.pytorch.composites import INDICES, Composite, nested, quantized
from ckptfmt.foreign.pytorch.dtypes import DTYPES, TorchDtype
from ckptfmt.foreign.pytorch.storages import Storage
from ckptfmt.foreign.pytorch.tensors import Strided

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLAIN_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_LAYOUTS = ("strided", "sparse_coo", *INDICES, "jagged")
_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
_DEVICES = (
    "cpu",
    "cuda",
    "mps",
    "xpu",
    "xla",
    "meta",
    "hpu",
    "ipu",
    "mtia",
    "hip",
    "privateuseone",
)
_LOGICAL_FREE = 1 << 30
_TENSORS_FREE, _TENSOR_NBYTES_MIN = 1 << 14, 64
"""torch writes 60 to 100 bytes about a tensor, its name, and its values."""


class Missing(Node):
    """A tensor without data."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def carry(self, maker: TreeMaker, name: str) -> Any:
        maker.skipped[name or "(root)"] = self.reason
        return OMIT


class Remarked(Node):
    """A tensor of which something is left out that is no data."""

    __slots__ = ("inner", "remark")

    def __init__(self, inner: Node, remark: str) -> None:
        self.inner, self.remark = inner, remark

    def carry(self, maker: TreeMaker, name: str) -> Any:
        maker.ignored[name or "(root)"] = self.remark
        return self.inner.carry(maker, name)


class Rebuild:
    """The builders for one file, which together make no more than its size allows.

    A million views of one storage are a short pickle and a huge checkpoint.
    """

    def __init__(self, file_nbytes: int) -> None:
        self._room = _LOGICAL_FREE + 16 * file_nbytes
        self._tensors = _TENSORS_FREE + file_nbytes // _TENSOR_NBYTES_MIN

    def builders(self) -> dict[str, Builder]:
        """Name -> builder; every name that a state of tensors and plain data needs."""
        named: dict[str, Builder] = {
            "_rebuild_tensor": self.tensor,
            "_rebuild_tensor_v2": self.tensor,
            "_rebuild_tensor_v3": self.tensor_of_dtype,
            "_rebuild_parameter": _parameter,
            "_rebuild_parameter_with_state": _parameter_with_state,
            "_rebuild_qtensor": self.quantized,
            "_rebuild_sparse_tensor": _sparse,
            "_rebuild_nested_tensor": _nested,
            "_rebuild_device_tensor_from_numpy": self.from_numpy,
            "_rebuild_xla_tensor": self.from_numpy,
            "_rebuild_device_tensor_from_cpu_tensor": _from_cpu,
            "_rebuild_meta_tensor_no_storage": _meta,
        }
        made: dict[str, Builder] = {**PLAIN_BUILDERS, **NUMPY_BUILDERS}
        made |= {f"torch._utils.{name}": builder for name, builder in named.items()}
        made |= {
            "torch._tensor._rebuild_from_type": self.from_type,
            "torch._tensor._rebuild_from_type_v2": self.from_type,
            "torch.nn.parameter.Parameter": _parameter,
            "torch.Size": size_builder,
            "torch.device": _device,
            "torch.serialization._get_layout": layout_builder,
        }
        self._by_name = made
        return made

    def counted(self, tensor: Strided) -> Strided:
        """The tensor, if it lies in its storage and in what the file allows. `illegal` otherwise."""
        tensor.check()
        self._room -= tensor.logical_nbytes
        self._tensors -= 1
        need(self._room >= 0, "tensors of far more bytes than the file")
        need(self._tensors >= 0, "more tensors than a file of this size can describe")
        return tensor

    def tensor(self, args: tuple[Any, ...]) -> Strided:
        storage, offset, size, stride, *rest = args
        need(len(rest) <= 3, "too many arguments")
        metadata = rest[2] if len(rest) == 3 else None
        need(not typed(storage, Storage).is_untyped, "a storage without a dtype")
        made = Strided(storage, storage.dtype, _int(offset), ints(size), ints(stride))
        return self.counted(_with(made, rest[0] if rest else False, metadata))

    def tensor_of_dtype(self, args: tuple[Any, ...]) -> Strided:
        storage, offset, size, stride, requires_grad, _, dtype, *rest = args
        found = dtype_of(dtype)
        made = Strided(typed(storage, Storage), found, _int(offset), ints(size), ints(stride))
        return self.counted(_with(made, requires_grad, rest[0] if rest else None))

    def quantized(self, args: tuple[Any, ...]) -> Composite:
        storage, offset, size, stride, parameters, requires_grad, *_ = args
        integers = self.tensor((storage, offset, size, stride))
        made = quantized(integers, parameters)
        made.requires_grad = requires_grad is True
        return made

    def from_numpy(self, args: tuple[Any, ...]) -> Strided:
        """A tensor of an accelerator that pickled its values as an array (bfloat16 as float32)."""
        array, dtype, _, requires_grad, *_ = args
        found, values = dtype_of(dtype), typed(array, ArrayNode).array
        from ckptfmt.foreign.pytorch.tensors import numpy_of

        stored = np.ascontiguousarray(values.astype(numpy_of(found.stored)))
        raw: NDArray[np.uint8] = stored.reshape(-1).view(np.uint8)
        storage = Storage(
            ("numpy", id(array)), found, raw.nbytes, "an array", raw=lambda at, n: raw[at : at + n]
        )
        strides = tuple(n // found.itemsize for n in stored.strides)
        made = Strided(storage, found, 0, stored.shape, strides)
        return self.counted(_with(made, requires_grad, None))

    def from_type(self, args: tuple[Any, ...]) -> Any:
        """A tensor with attributes, or of a subclass: the tensor, and a remark."""
        function, kind, inner, *state = args
        builder = self._by_name.get(typed(function, Global).name)
        if builder is None or builder == self.from_type:
            return Record(function.name, (kind, inner, *state))
        made = builder(typed(inner, tuple))
        name = typed(kind, Global).name
        remark = "" if name in _PLAIN_CLASSES else f"the subclass {name}"
        if state and isinstance(state[0], dict) and state[0]:
            remark += f"{' and ' if remark else ''}attributes of the tensor"
        return Remarked(made, remark) if remark else made


def _with(tensor: Strided, requires_grad: Any, metadata: Any) -> Strided:
    tensor.requires_grad = requires_grad is True
    if metadata:
        flags = typed(metadata, dict)
        tensor.conj, tensor.neg = flags.get("conj") is True, flags.get("neg") is True
    return tensor


def _int(value: Any) -> int:
    need(type(value) is int and -(1 << 63) <= value < 1 << 63, "a size that is no int")
    return int(value)


def ints(value: Any) -> tuple[int, ...]:
    """Sizes or strides, as a tuple, a list or a `torch.Size`."""
    items = value.payload if isinstance(value, ForeignValue) else value
    return tuple(_int(n) for n in typed(items, tuple, list))


def dtype_of(value: Any) -> TorchDtype:
    name = typed(value, Global).name
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None or not name.startswith("torch."):
        raise illegal(f"the dtype {name[:80]}")
    return found


def _parameter(args: tuple[Any, ...]) -> Any:
    """A parameter is its tensor; whether it wants gradients is its module's."""
    data, *_ = args
    if isinstance(data, Strided):
        return replace(data, requires_grad=False, made=None)
    if isinstance(data, Composite):
        return replace(data, requires_grad=False)
    need(isinstance(data, Node), "a parameter of no tensor")
    return data


def _parameter_with_state(args: tuple[Any, ...]) -> Any:
    made = _parameter(args)
    return Remarked(made, "attributes of the parameter") if len(args) > 3 and args[3] else made


def _sparse(args: tuple[Any, ...]) -> Composite:
    layout, data = args
    named = typed(layout, str, Global)
    kind = (named if type(named) is str else named.name).removeprefix("torch.")
    parts = typed(data, tuple, list)
    if kind == "sparse_coo":
        indices, values, size, *coalesced = parts
        need(len(coalesced) <= 1, "too many parts")
        items = {"shape": list(ints(size)), "indices": indices, "values": values}
        return Composite(kind, {"coalesced": coalesced == [True]}, items)
    need(kind in INDICES, f"the layout {kind[:40]}")
    outer, inner, values, size = parts
    first, second = INDICES[kind]
    items = {"shape": list(ints(size)), first: outer, second: inner, "values": values}
    return Composite(kind, {}, items)


def _nested(args: tuple[Any, ...]) -> Composite:
    values, sizes, strides, offsets = args
    return nested(typed(values, Strided), sizes, strides, offsets)


def _from_cpu(args: tuple[Any, ...]) -> Strided:
    data, dtype, _, requires_grad, *_ = args
    tensor: Strided = typed(data, Strided)
    need(tensor.dtype == dtype_of(dtype), "a tensor that changes its dtype")
    return replace(tensor, requires_grad=requires_grad is True, made=None)


def _meta(args: tuple[Any, ...]) -> Missing:
    return Missing("a meta tensor, which has no data")


def size_builder(args: tuple[Any, ...]) -> ForeignValue:
    return ForeignValue("torch.Size", list(ints(args[0] if args else ())))


def _device(args: tuple[Any, ...]) -> ForeignValue:
    kind, *rest = args
    text = typed(kind, str)
    need(text.partition(":")[0] in _DEVICES and len(text) < 40, f"the device {text[:40]!r}")
    if rest:
        text = f"{text}:{_int(rest[0])}"
    return ForeignValue("torch.device", text)


def layout_builder(args: tuple[Any, ...]) -> str:
    (name,) = args
    need(typed(name, str).removeprefix("torch.") in _LAYOUTS, "an unknown layout")
    return str(name)


def value_of(name: str) -> Any:
    """The plain value that a name of torch means, or None: `torch.float32`, `torch.strided`."""
    last = name.removeprefix("torch.")
    if last == name:
        return None
    if last in DTYPES:
        return ForeignValue("torch.dtype", last)
    return name if last in (*_LAYOUTS, *_FORMATS) else None


def attributes_of(state: Any) -> Mapping[str, object] | None:
    """The versions that a module's `state_dict` carries beside its tensors, where they are not 1."""
    metadata = state.get("_metadata") if isinstance(state, dict) else None
    if not isinstance(metadata, dict) or len(state) != 1:
        return None
    versions: dict[str, object] = {}
    for prefix, entry in metadata.items():
        if type(prefix) is not str or not isinstance(entry, dict):
            return None
        version = entry.get("version")
        if version != 1 and (version is None or type(version) is int):
            versions[prefix] = version
    return {"torch.module_versions": versions}


def storage_finder(
    find: Callable[[Any, TorchDtype, int, bool], Storage],
) -> Callable[[Any], Any]:
    """`persistent` for a pickle machine: ("storage", class, key, location, numel, ...)."""
    return partial(_persistent, find)


def _persistent(find: Callable[[Any, TorchDtype, int, bool], Storage], key: Any) -> Any:
    from ckptfmt.foreign.pytorch.dtypes import storage_dtype

    what, kind, *rest = typed(key, tuple)
    if what == "module":
        return typed(kind, Global)  # its source stands beside it, and is left there
    need(what == "storage", f"a reference to {str(what)[:40]!r}")
    name, _, numel, *view = rest
    found = storage_dtype(typed(kind, Global).name)
    if found is None:
        raise illegal(f"the storage {kind.name[:80]}")
    dtype, is_untyped = found
    need(type(numel) is int and 0 <= numel < 1 << 62, "a storage's length")
    whole = find(name, dtype, numel * dtype.itemsize, is_untyped)
    if not view or view[0] is None:
        return whole
    _, offset, length = typed(view[0], tuple)
    start, nbytes = _int(offset) * dtype.itemsize, _int(length) * dtype.itemsize
    need(start >= 0 and nbytes >= 0 and start + nbytes <= whole.nbytes, "a view beyond a storage")
    return whole.part(start, nbytes)
