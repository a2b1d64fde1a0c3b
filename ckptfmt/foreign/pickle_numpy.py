"""NumPy's arrays, scalars and dtypes in a pickle: their bytes, checked against shape and dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.pickle_builders import need, typed
from ckptfmt.foreign.pickle_machine import Builder, Global, Settable, illegal
from ckptfmt.foreign.pickle_tree import Node, TreeMaker
from ckptfmt.format import dtype_named, dtype_of, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TEXT = re.compile(r"[<>|=]?(?:[?bB]|[iu][1248]|f[248]|c8|c16|[bB]1|[SU][0-9]{1,9}|[mM]8|O8?)\Z")
_EXTENSION = re.compile(r"ml_dtypes\.([a-z0-9_]{1,30})\Z")
_SCALAR_NAMES = (
    *("bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")
_NDIM_MAX = 64


class DtypeNode(Settable, Node):
    """A dtype; its state sets byte order, and the unit of a time."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def set_state(self, state: Any) -> None:
        typed(state, tuple)
        need(len(state) >= 5 and state[1] in ("<", ">", "|", "="), "the state of a dtype")
        need(not state[2] and not state[3] and not state[4], "a structured dtype")
        if self.dtype.kind in "mM" and len(state) > 8 and state[8]:
            unit = state[8][1]
            unit_name = unit[0].decode() if type(unit[0]) is bytes else unit[0]
            need(unit_name in _UNITS and unit[1] == 1, "a unit of time")
            if unit_name != "generic":
                self.dtype = np.dtype(f"{self.dtype.kind}8[{unit_name}]")
        if state[1] in "<>":
            self.dtype = self.dtype.newbyteorder(state[1])

    def carry(self, maker: TreeMaker, name: str) -> Any:
        return self.dtype


class ArrayNode(Settable, Node):
    """An array: empty until its state comes."""

    __slots__ = ("array", "objects")

    def __init__(self) -> None:
        self.array: NDArray[Any] = np.empty(0, np.uint8)
        self.objects: list[Any] | None = None

    def set_state(self, state: Any) -> None:
        version, shape, dtype, is_fortran, data = typed(state, tuple)
        need(version in (1, 0), "the state of an array")
        found = typed(dtype, DtypeNode).dtype
        if found.kind == "O":
            self.objects = typed(data, list)
            return
        raw = data.encode("latin-1") if type(data) is str else typed(data, bytes, bytearray)
        self.array = array_of(raw, found, shape, is_fortran=bool(is_fortran))

    def carry(self, maker: TreeMaker, name: str) -> Any:
        if self.objects is not None:
            maker.opaque[name] = "numpy.ndarray"
            return {"class": "numpy.ndarray", "items": maker.make(self.objects, f"{name}/items", 1)}
        return tensor_of(self.array, f"{maker.where}, {name}")


def tensor_of(array: NDArray[Any], where: str) -> ForeignTensor:
    """An array that is in memory, as a tensor."""
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    return ForeignTensor(
        name="",
        foreign_name="",
        dtype=dtype_of(native.dtype).name,
        shape=native.shape,
        nbytes=native.nbytes,
        where=where,
        fetch=lambda: native,
        identity=("numpy", id(array)),
    )


def array_of(
    raw: bytes | bytearray, dtype: np.dtype[Any], shape: Any, *, is_fortran: bool = False
) -> NDArray[Any]:
    """The array of some bytes, which must be exactly as many as it takes."""
    sizes = [typed(n, int) for n in typed(shape, tuple)]
    need(len(sizes) <= _NDIM_MAX and all(n >= 0 for n in sizes), "the shape of an array")
    need(dtype.itemsize > 0 and math.prod(sizes) * dtype.itemsize == len(raw), "an array's length")
    return np.frombuffer(raw, dtype).reshape(sizes, order="F" if is_fortran else "C")


def _dtype(args: tuple[Any, ...]) -> DtypeNode:
    text = args[0]
    if type(text) is Global:
        match = _EXTENSION.match(text.name)
        if match:
            found = dtype_named(match[1])
            if found is None or found.bits < 8:
                raise illegal("an unknown dtype")
            return DtypeNode(numpy_dtype(found))
        text = text.name.removeprefix("numpy.")
        need(text in _SCALAR_NAMES, "an unknown dtype")
        return DtypeNode(np.dtype(text))
    text = text.decode() if type(text) is bytes else text
    need(_TEXT.match(typed(text, str)) is not None, f"the dtype {text[:40]!r}")
    return DtypeNode(np.dtype(text))


def _reconstruct(args: tuple[Any, ...]) -> ArrayNode:
    kind, shape, _ = args
    need(type(kind) is Global and kind.name == "numpy.ndarray", "a subclass of an array")
    need(shape == (0,), "the start of an array")
    return ArrayNode()


def _frombuffer(args: tuple[Any, ...]) -> ArrayNode:
    raw, dtype, shape, order = args
    made = ArrayNode()
    found = typed(dtype, DtypeNode).dtype
    need(order in ("C", "F"), "the order of an array")
    data = typed(raw, bytes, bytearray)
    made.array = array_of(data, found, shape, is_fortran=order == "F")
    return made


def _scalar(args: tuple[Any, ...]) -> Any:
    dtype, raw = args
    found = typed(dtype, DtypeNode).dtype
    need(found.kind not in "OV" or found.itemsize <= 2, "a scalar of objects")
    data = raw.encode("latin-1") if type(raw) is str else typed(raw, bytes)
    native = array_of(data, found, ()).astype(found.newbyteorder("="))
    return native[()]


_BY_NAME: Mapping[str, Builder] = {
    "multiarray._reconstruct": _reconstruct,
    "multiarray.scalar": _scalar,
    "numeric._frombuffer": _frombuffer,
}
NUMPY_BUILDERS: Mapping[str, Builder] = {
    "numpy.dtype": _dtype,
    **{
        f"numpy.{core}.{name}": builder
        for core in ("core", "_core")
        for name, builder in _BY_NAME.items()
    },
}
"""Name -> builder."""
