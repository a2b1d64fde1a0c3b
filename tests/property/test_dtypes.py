"""Any array of any dtype and layout comes back bit for bit. Spec: 04-dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptfmt.format import dtype_of, numpy_dtype, pack_array, packed_nbytes, parse_array

NUMPY = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("U0", "U3", "S0", "S5", "V0", "V3", "M8[ns]", "M8[7D]", "m8[us]", "m8"),
]
EXTENSION = [
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
]
WORDS = {"complex64": 4, "complex128": 8, "U3": 4, "complex32": 2, "bcomplex32": 2}


@st.composite
def arrays(draw: st.DrawFn) -> tuple[NDArray[Any], bytes]:
    """An array of random bits in some layout, and the bytes it should have."""
    name = draw(st.sampled_from([*NUMPY, *EXTENSION]))
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in EXTENSION else np.dtype(name)
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    count = int(np.prod(shape))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    raw = random.integers(0, 256, count * dtype.itemsize, np.uint8)
    bits = dtype_of(dtype).bits
    if bits < 8 or name == "bool":
        raw &= (1 << (1 if name == "bool" else bits)) - 1
    array: NDArray[Any] = np.ndarray(shape, dtype, raw.tobytes() or b"")
    layout = draw(st.sampled_from(["c", "fortran", "negative", "strided", "broadcast", "swapped"]))
    if layout == "fortran":
        array = np.asfortranarray(array)
    elif layout == "negative" and array.ndim:
        array = np.ascontiguousarray(array[::-1])[::-1]
    elif layout == "strided" and array.ndim:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    elif layout == "broadcast":
        array = np.broadcast_to(array, (2, *shape))
        raw = np.concatenate([raw, raw])
    elif (
        layout == "swapped" and dtype.itemsize > 1 and dtype.kind != "V" and dtype.byteorder != "|"
    ):
        word = WORDS.get(name, dtype.itemsize)
        swapped = raw.view(f"u{word}").byteswap().tobytes() or b""
        array = np.ndarray(shape, dtype.newbyteorder(">"), swapped)
    return array, raw.tobytes()


@given(arrays())
def test_an_array_comes_back_bit_for_bit(made: tuple[NDArray[Any], bytes]) -> None:
    array, raw = made
    dtype = dtype_of(array)
    packed = pack_array(array)
    assert packed.nbytes == packed_nbytes(dtype, array.size)
    if not dtype.is_packed:
        assert bytes(packed) == raw
    back = parse_array(packed, dtype, array.shape)
    assert back.shape == array.shape
    assert back.dtype == numpy_dtype(dtype)
    assert np.ascontiguousarray(back).tobytes() == raw
    assert bytes(pack_array(back)) == bytes(packed)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@given(st.lists(TEXT, max_size=9), st.booleans())
def test_text_of_any_length_comes_back(items: list[str], objects: bool) -> None:
    array = np.array(items, object if objects and items else np.dtypes.StringDType())
    back = parse_array(pack_array(array), dtype_of(array), array.shape)
    assert back.tolist() == items


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=9))
def test_bytes_of_any_length_come_back(items: list[bytes]) -> None:
    array = np.empty(len(items), object)
    array[:] = items
    back = parse_array(pack_array(array), dtype_of(array), array.shape)
    assert back.tolist() == items
