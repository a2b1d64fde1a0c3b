"""What an object of a tree is: by its exact type, then its framework's adapter, then duck typing.

A framework is told by the root modules of the type's MRO, so that `class Net(nn.Module)` of any
module is torch's. Adapters are imported when the first object of theirs is met.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.engine.adapter import Adapter, Captured, ObjectKind, Part, TensorSource
from ckptfmt.engine.registered import BY_NAME, BY_TYPE, packed
from ckptfmt.engine.rng import generator_state, is_generator, keep_own_generators
from ckptfmt.engine.sharded import Sharded
from ckptfmt.errors import MissingExtraError, UnsupportedError, UsageError
from ckptfmt.format import Dtype, dtype_of, pack_array, parse_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

ADAPTERS: dict[str, tuple[str, str]] = {
    "torch": ("ckptfmt.torch:ADAPTER", "torch"),
    "torchdata": ("ckptfmt.torch:ADAPTER", "torch"),
    "ckptfmt.torch": ("ckptfmt.torch:ADAPTER", "torch"),
    "tensorflow": ("ckptfmt.tensorflow:ADAPTER", "tensorflow"),
    "keras": ("ckptfmt.tensorflow:ADAPTER", "tensorflow"),
    "ckptfmt.tensorflow": ("ckptfmt.tensorflow:ADAPTER", "tensorflow"),
    "ckptfmt.foreign": ("ckptfmt.foreign.adapter:ADAPTER", ""),
}
"""Root module of a type -> ("module:attribute", extra). Entry points of the group below add rows."""
ENTRY_POINTS = "ckptfmt.adapters"

_TAG_ROOTS = {"tf": "tensorflow"}
"""Tags of a framework that does not write its module's name."""
_ARRAY_LIKE = frozenset({"jax", "jaxlib", "tensorstore", "h5py", "zarr", "ckptfmt"})
"""Roots whose arrays are taken by `np.asarray`. A list, not a rule: a pandas Series has `dtype`,
`shape` and `__array__` too, and would lose its labels."""
_NO_ATTRIBUTES: Mapping[str, object] = MappingProxyType({})
_ARRAYS = frozenset({np.ndarray, np.memmap})

_adapters_by_type: dict[type, Adapter | None] = {}
_adapters_by_root: dict[str, Adapter] = {}
_entry_points_read = False


def adapter_of(obj: object) -> Adapter | None:
    """The adapter of an object's framework, or None."""
    kind = type(obj)
    try:
        return _adapters_by_type[kind]
    except KeyError:
        made = _adapters_by_type[kind] = _find_adapter(kind)
        return made


def framework_of(obj: object) -> str:
    """The root module under which the adapter of an object stands in the table, or ""."""
    if adapter_of(obj) is None:
        return ""
    return next(root for root in map(_root, type(obj).__mro__) if root in ADAPTERS)


def _find_adapter(kind: type) -> Adapter | None:
    for cls in kind.__mro__:
        root = _root(cls)
        if root in ADAPTERS:
            return load_adapter(root)
    if all(_root(cls) in ("builtins", "numpy", "collections", "random") for cls in kind.__mro__):
        return None
    if _read_entry_points():
        return _find_adapter(kind)
    return None


def _root(cls: type) -> str:
    module = cls.__module__ or ""
    first, _, rest = module.partition(".")
    return f"ckptfmt.{rest.partition('.')[0]}" if first == "ckptfmt" else first


def _read_entry_points() -> bool:
    """Add the rows that installed packages bring; True if there was a new one."""
    global _entry_points_read  # once per process: the list costs milliseconds
    if _entry_points_read:
        return False
    _entry_points_read = True
    from importlib import metadata  # pulls in the email package: not at every start

    new = {
        point.name: (point.value, point.name)
        for point in metadata.entry_points(group=ENTRY_POINTS)
        if point.name not in ADAPTERS
    }
    ADAPTERS.update(new)
    return bool(new)


def load_adapter(root: str) -> Adapter:
    """The adapter of a root module, imported if it was not yet.

    Raises:
        MissingExtraError: What it needs is not installed.
    """
    made = _adapters_by_root.get(root)
    if made is None:
        where, extra = ADAPTERS[root]
        module, _, attribute = where.partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            raise MissingExtraError(
                f"the adapter for {root} cannot be imported",
                reason=extra,
                found=str(error),
                do=f'pip install "ckptfmt[{extra}]"',
            ) from error
        _adapters_by_root[root] = made
    return made


def keep_generators() -> Callable[[], None]:
    """The generators of this process, those of every framework in use too, as they are now: what is
    returned puts them back."""
    kept = [keep_own_generators()]
    in_use = [r for r, (where, _) in ADAPTERS.items() if where.partition(":")[0] in sys.modules]
    for adapter in {id(made): made for made in map(load_adapter, in_use)}.values():
        keep = getattr(adapter, "keep_generators", None)
        if keep is not None:
            kept.append(keep())

    def put_back() -> None:
        for one in kept:
            one()

    return put_back


def object_kind(obj: object) -> ObjectKind:
    """What an object that is no container is; "value" also for what a value may hold."""
    kind = type(obj)
    if kind in _ARRAYS or kind is TensorSource or kind is Sharded:
        return "tensor"
    if isinstance(obj, np.ndarray):
        raise UsageError(
            "a subclass of numpy.ndarray would come back as numpy.ndarray",
            reason="tree-object",
            found=kind.__qualname__,
            do="save np.asarray(x) (and a mask beside it)",
        )
    if kind in BY_TYPE:
        return "value"
    adapter = adapter_of(obj)
    if adapter is not None:
        found = adapter.kind(obj)
        if found != "unknown":
            return found
    if is_generator(obj) or is_stateful(obj):
        return "stateful"
    return "tensor" if _is_array_like(obj) else "unknown"


def _is_array_like(obj: object) -> bool:
    kind = type(obj)
    return any(cls.__module__.partition(".")[0] in _ARRAY_LIKE for cls in kind.__mro__) and all(
        hasattr(kind, name) for name in ("__array__", "dtype", "shape")
    )


def is_stateful(obj: object) -> bool:
    """Objects that give and take their state themselves."""
    kind = type(obj)
    return not isinstance(obj, type) and (
        (callable(getattr(kind, "state_dict", None)) and hasattr(kind, "load_state_dict"))
        or (callable(getattr(kind, "get_state", None)) and hasattr(kind, "set_state"))
    )


def is_adapted(obj: object) -> bool:
    """True if an adapter gives and takes the state of this object."""
    adapter = adapter_of(obj)
    return adapter is not None and adapter.kind(obj) in ("stateful", "composite")


def captures_last(obj: object) -> bool:
    """True for generators, from which others may draw while their own state is captured."""
    draws = getattr(adapter_of(obj), "is_generator", is_generator)
    return bool(draws(obj))


def capture(obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Captured:
    """The state of a stateful object."""
    adapter = adapter_of(obj)
    if adapter is not None and adapter.kind(obj) in ("stateful", "composite"):
        return adapter.capture(obj, name, peers)
    if is_generator(obj):
        return Captured(generator_state(obj))
    if callable(getattr(obj, "state_dict", None)):
        return Captured(obj.state_dict())
    return Captured(obj.get_state())


def array_source(array: NDArray[Any]) -> TensorSource:
    """The source of a NumPy array. Ties are of one memory, shape, strides and dtype."""
    dtype = array.dtype
    fetch: Callable[[], NDArray[Any]]
    if not dtype.isnative:
        fetch = partial(_native, array)
    elif array.flags.c_contiguous and type(array) is np.ndarray:
        fetch = array.__array__  # itself; a partial of `asarray` takes four times as long to make
    else:
        fetch = partial(np.asarray, array, order="C")
    identity = _identity(array) if array.size else None
    if dtype.kind == "O":
        found = dtype_of(array)
        attributes = {"numpy.object": True} if found.name == "string" else {}
        return TensorSource(found.name, array.shape, fetch, identity, attributes, array)
    return TensorSource(dtype_of(dtype).name, array.shape, fetch, identity, _NO_ATTRIBUTES, array)


def sharded_source(obj: Sharded) -> TensorSource:
    """The source of boxes that the caller cut."""
    parts = [
        Part(tuple(map(int, origin)), array_source(np.asarray(array)))
        for origin, array in obj.parts
    ]
    dtype = dtype_of(obj.dtype).name
    source = TensorSource(dtype, obj.shape, partial(np.zeros, 0), ("id", id(obj)), {}, obj)
    source.parts = parts
    return source


def _identity(array: NDArray[Any]) -> Hashable:
    """Equal for arrays of one memory, shape, strides and dtype.

    Asking NumPy for an address costs more than all the rest of a small array (1.5 us), so an array
    that owns its memory goes by itself, and a view that covers such an array goes by that array.
    """
    base = array.base
    if base is None and array.flags.owndata:
        return id(array)
    layout = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)
    if type(base) is np.ndarray and base.base is None and base.flags.owndata:
        whole = (base.__array_interface__["data"][0], base.shape, base.strides, base.dtype)
        if whole == layout:
            return id(base)
    return layout


def _native(array: NDArray[Any]) -> NDArray[Any]:
    return parse_array(pack_array(array), dtype_of(array), array.shape)


def tensor_source(obj: Any, name: str) -> TensorSource:
    """The source of any tensor; UsageError has the name in `where`."""
    if isinstance(obj, TensorSource):
        return obj
    if isinstance(obj, np.ndarray):
        return array_source(obj)
    if isinstance(obj, Sharded):
        return sharded_source(obj)
    adapter = adapter_of(obj)
    if adapter is not None and adapter.kind(obj) == "tensor":
        return adapter.source(obj, name)
    dtype = obj.dtype if isinstance(obj.dtype, Dtype) else dtype_of(np.dtype(obj.dtype))
    shape = tuple(map(int, obj.shape))
    return TensorSource(
        dtype.name, shape, partial(np.asarray, obj, order="C"), ("id", id(obj)), {}, obj
    )


def adapter_of_tag(tag: str) -> Adapter | None:
    """The adapter of the framework before the dot, where it is installed."""
    root = tag.partition(".")[0]
    root = _TAG_ROOTS.get(root, root)
    return load_adapter(root) if root in ADAPTERS and _is_installed(root) else None


class _Extend:
    """Values of registered types and of frameworks, for `pack_value` and `parse_value`."""

    def pack(self, obj: object) -> tuple[str, object] | None:
        entry = BY_TYPE.get(type(obj))
        if entry is not None:
            return "type", [entry.name, packed(entry, obj)]
        adapter = adapter_of(obj)
        if adapter is None or adapter.kind(obj) != "value":
            return None
        return adapter.pack_value(obj)

    def unpack(self, tag: str, payload: Any) -> object:
        if tag == "type":
            entry = BY_NAME.get(payload[0])
            return NotImplemented if entry is None else entry.unpack(payload[1])
        try:
            adapter = adapter_of_tag(tag)
            return NotImplemented if adapter is None else adapter.unpack_value(tag, payload)
        except (MissingExtraError, UnsupportedError):
            return NotImplemented  # the plain payload and a warning, as for an absent framework


def _is_installed(root: str) -> bool:
    try:
        return importlib.util.find_spec(root) is not None
    except (ImportError, ValueError):  # an import hook that refuses; a module without a spec
        return False


EXTEND = _Extend()
