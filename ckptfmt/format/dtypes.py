"""Dtypes and their bytes: little-endian, C-order, packed without gaps under 8 bits.

Element i of a packed region is bits [i*b, (i+1)*b) of a little-endian bit string; spare bits of the
last byte are zero. Spec: 04-dtypes.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from ckptfmt.errors import CorruptError, UnsupportedError, UsageError
from ckptfmt.format.bits import pack_bits, parse_bits
from ckptfmt.format.strings import pack_strings, parse_strings

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Buffer: TypeAlias = "bytes | bytearray | memoryview | Array"

STRING, BYTES = "string", "bytes"


def _little(name: str) -> np.dtype[Any]:
    """NumPy's own object where that is little-endian: it prints as `float32`, not as `<f4`."""
    dtype = np.dtype(name)
    return dtype if sys.byteorder == "little" else dtype.newbyteorder("<")


_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NATIVE = {name: _little(name) for name in _NUMPY_NAMES}
_EXTENSION = {
    name: bits
    for bits, names in {
        1: ("int1", "uint1"),
        2: ("int2", "uint2"),
        4: ("int4", "uint4", "float4_e2m1fn"),
        6: ("float6_e2m3fn", "float6_e3m2fn"),
        8: (
            *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
            *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        ),
        16: ("bfloat16",),
        32: ("complex32", "bcomplex32"),
    }.items()
    for name in names
}
"""Names of ml_dtypes and their bits. The table is the format's, whatever release is installed."""

_FLEXIBLE = re.compile(r"(str|bytes|void)(0|[1-9][0-9]{0,9})\Z")
_TIME = re.compile(
    r"(?:datetime64|timedelta64)(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?\Z"
)
_LETTER = {"str": "U", "bytes": "S", "void": "V"}
_ALIGN = {"str": 32, "bytes": 8, "void": 8}
BITS_MAX = (1 << 32) - 1
NAME_MAX = 255
_NAME_KEY, _BITS_KEY = "ckptfmt.dtype", "ckptfmt.bits"


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype as the format has it.

    Attributes:
        name: The name of NumPy or ml_dtypes, with width and unit: `float32`, `str320`,
            `datetime64[ns]`; `string` and `bytes` for variable length.
        bits: Of one element; 0 for `string` and `bytes`.
    """

    name: str
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory, where types under 8 bits take a whole one."""
        return (self.bits + 7) // 8

    @property
    def is_packed(self) -> bool:
        return 0 < self.bits < 8

    @property
    def is_variable(self) -> bool:
        return self.name == STRING or self.name == BYTES


def known_bits(name: str) -> int | None:
    """Bits of a name that the format defines; None for others, -1 for an illegal width."""
    native = _NATIVE.get(name)
    if native is not None:
        return native.itemsize * 8
    if name in _EXTENSION:
        return _EXTENSION[name]
    if name in (STRING, BYTES):
        return 0
    match = _FLEXIBLE.match(name)
    if match:
        bits = int(match[2])
        return bits if bits % _ALIGN[match[1]] == 0 else -1
    return 64 if _TIME.match(name) else None


def dtype_named(name: str) -> Dtype | None:
    """The dtype of a name that the format defines, or None for others (opaque ones have any bits)."""
    bits = known_bits(name)
    return None if bits is None or bits < 0 else Dtype(name, bits)


def check_dtype(dtype: Dtype, where: str = "") -> None:
    """Refuse a dtype whose bits do not fit its name, or that no dtype can have.

    Spec: 04-dtypes §4.1.
    """
    known = known_bits(dtype.name)
    bits = dtype.bits
    legal = bits < 8 or bits % 8 == 0
    if known is None:
        legal = legal and bits > 0 and 0 < len(dtype.name.encode("utf-8", "replace")) <= NAME_MAX
    else:
        legal = legal and bits == known
    if not legal or not 0 <= bits <= BITS_MAX:
        raise CorruptError(
            "bits do not fit the dtype",
            reason="dtype",
            where=where,
            expected="1 to 7 or a multiple of 8" if known is None else f"{known} bits",
            found=f"{dtype.name[:80]!r} of {bits} bits",
            do='restore another step or run "ckptfmt verify"',
        )


def _refuse(what: str, dtype: object, do: str) -> NoReturn:
    raise UsageError(what, reason="dtype", found=f"dtype {dtype}", do=do)


def dtype_of(what: Array | np.dtype[Any]) -> Dtype:
    """The format's dtype of an array or of a NumPy dtype; an object array is looked into.

    Raises:
        UsageError: No dtype of the format carries it: extended precision, structures, objects.
    Spec: 04-dtypes §4.1.
    """
    if isinstance(what, np.ndarray):
        dtype = what.dtype
        if dtype.kind == "O":
            return _dtype_of_objects(what)
    else:
        dtype = what
    return _dtype_of(dtype) if dtype.metadata is None else _dtype_with_metadata(dtype)


@lru_cache(maxsize=1024)
def _dtype_of(dtype: np.dtype[Any]) -> Dtype:
    kind = dtype.kind
    if dtype.fields is not None or dtype.subdtype is not None:
        _refuse("a structured array cannot be saved", dtype, "save a dict of its fields")
    if kind == "O":
        _refuse("an object array cannot be saved", dtype, "convert it to a typed array or a list")
    if isinstance(dtype, np.dtypes.StringDType):
        if dtype != np.dtypes.StringDType():
            _refuse(
                "a StringDType with na_object= or coerce=False cannot be saved",
                dtype,
                "convert it: .astype(np.dtypes.StringDType())",
            )
        return Dtype(STRING, 0)
    if dtype.type.__module__.split(".")[0] == "ml_dtypes":
        name = dtype.type.__name__
        if name in _EXTENSION:
            return Dtype(name, _EXTENSION[name])
    elif dtype.type.__module__ == "numpy":
        if kind in "USV":
            word = {"U": "str", "S": "bytes", "V": "void"}[kind]
            return Dtype(f"{word}{dtype.itemsize * 8}", dtype.itemsize * 8)
        if dtype.name in _NATIVE or kind in "Mm":
            return Dtype(dtype.name, dtype.itemsize * 8)
        if kind in "fc":
            _refuse(
                "extended precision has no bytes that other machines share",
                dtype,
                "convert it: .astype(np.float64) or .astype(np.complex128)",
            )
    _refuse("an array of this dtype cannot be saved", dtype, "convert it to a dtype of NumPy")


def _dtype_with_metadata(dtype: np.dtype[Any]) -> Dtype:
    metadata: Mapping[str, Any] = dtype.metadata or {}
    name = metadata.get(_NAME_KEY)
    if dtype.kind == "V" and dtype.fields is None and isinstance(name, str):
        opaque = Dtype(name, int(metadata.get(_BITS_KEY, dtype.itemsize * 8)))
        if known_bits(name) is None and opaque.itemsize == dtype.itemsize:
            return opaque
    return _dtype_of(dtype)


def _dtype_of_objects(array: Array) -> Dtype:
    kinds = set(map(type, array.ravel().tolist()))
    if kinds == {str}:
        return Dtype(STRING, 0)
    if kinds <= {bytes}:  # an empty one comes back as it is: `bytes` loads as objects
        return Dtype(BYTES, 0)
    found = ", ".join(sorted(kind.__name__ for kind in kinds)[:5])
    raise UsageError(
        "an object array cannot be saved unless it holds only str or only bytes",
        reason="dtype",
        found=f"an object array of {found}",
        do="convert it to a typed array, or to a list of plain values",
    )


@lru_cache(maxsize=1024)
def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """What a dtype is in memory. An opaque one is void and says its name in `metadata`.

    `string` is StringDType and `bytes` object: their bytes are no array as they stand.
    """
    name = dtype.name
    native = _NATIVE.get(name)
    if native is not None:
        return native
    if name == STRING:
        return np.dtypes.StringDType()
    if name == BYTES:
        return np.dtype(object)
    match = _FLEXIBLE.match(name)
    if match:
        width = dtype.bits // _ALIGN[match[1]]
        return np.dtype(f"<{_LETTER[match[1]]}{width}")
    if _TIME.match(name):
        try:
            return _little(name)
        except (TypeError, ValueError, OverflowError) as error:
            raise UnsupportedError(
                "NumPy does not know this dtype", reason="dtype", found=f"{name}: {error}"
            ) from None
    if name in _EXTENSION:
        import ml_dtypes

        kind = getattr(ml_dtypes, name, None)
        if kind is not None:
            made: np.dtype[Any] = np.dtype(kind)
            return made
    return np.dtype(f"V{dtype.itemsize}", metadata={_NAME_KEY: name, _BITS_KEY: dtype.bits})


def empty_array(dtype: Dtype, shape: Sequence[int]) -> Array:
    """A writable array to be filled. `np.empty` would turn a width of zero (`S0`) into one."""
    into = numpy_dtype(dtype)
    if into.itemsize == 0:
        return np.ndarray(shape, into, bytearray())
    return np.empty(shape, into)


def packed_nbytes(dtype: Dtype, count: int) -> int:
    """Bytes of a region of `count` elements. For `string` and `bytes`: of its offsets alone."""
    if dtype.is_variable:
        return 8 * (count + 1)
    return (count * dtype.bits + 7) // 8


def pack_array(array: Array) -> memoryview:
    """The bytes of a region, without a copy where the array's memory has them already.

    Spec: 04-dtypes §4.2 to §4.4.
    """
    dtype = dtype_of(array)
    if dtype.is_variable:
        return memoryview(pack_strings(array.ravel().tolist(), utf8=dtype.name == STRING))
    if array.size == 0 or dtype.bits == 0:
        return memoryview(b"")
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.byteorder == (">" if sys.byteorder == "little" else "="):
        flat = _swapped(flat, dtype)
    raw = flat.view(np.ndarray).view(np.uint8)
    if dtype.is_packed:
        raw = pack_bits(raw, dtype.bits)
    return memoryview(raw)  # type: ignore[arg-type]  # mypy: an ndarray has no __buffer__ at 3.11


def _swapped(flat: Array, dtype: Dtype) -> Array:
    # By words, not by ndarray.byteswap: that of ml_dtypes swaps a complex32 as one word of four.
    word = dtype.itemsize
    if flat.dtype.kind == "U":
        word = 4
    elif flat.dtype.kind == "c" or dtype.name in ("complex32", "bcomplex32"):
        word //= 2
    return flat.view(f"u{word}").byteswap() if word > 1 else flat


def parse_array(buffer: Buffer, dtype: Dtype, shape: Sequence[int]) -> Array:
    """The array of a region's bytes: a view of them (writable if they are) from 8 bits up.

    Raises:
        CorruptError: The bytes are not a region of this dtype and shape.
    Spec: 04-dtypes §4.2 to §4.4.
    """
    shape = tuple(shape)
    count = math.prod(shape)
    view = memoryview(buffer).cast("B") if not isinstance(buffer, np.ndarray) else buffer
    if dtype.is_variable:
        items = parse_strings(bytes(view), count, utf8=dtype.name == STRING)
        made = np.empty(count, numpy_dtype(dtype))
        made[:] = items
        return made.reshape(shape)
    expected = packed_nbytes(dtype, count)
    if view.nbytes != expected:
        raise CorruptError(
            "a region has another number of bytes than its dtype and shape",
            reason="truncated" if view.nbytes < expected else "trailing-bytes",
            expected=expected,
            found=view.nbytes,
        )
    into = numpy_dtype(dtype)
    if expected == 0:
        return empty_array(dtype, shape)
    if dtype.is_packed:
        raw = np.frombuffer(view, np.uint8)
        return parse_bits(raw, dtype.bits, count).view(into).reshape(shape)
    if sys.byteorder == "big" and into.byteorder == "=":
        raw = np.frombuffer(view, np.uint8).view(into)
        return _swapped(raw, dtype).view(into).reshape(shape)
    return np.ndarray(shape, into, view)
