"""Dtypes: every bit pattern of every type, and what is refused. Spec: 04-dtypes."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ckptfmt.errors import CorruptError, UsageError
from ckptfmt.format.dtypes import (
    Dtype,
    check_dtype,
    dtype_named,
    dtype_of,
    empty_array,
    numpy_dtype,
    pack_array,
    packed_nbytes,
    parse_array,
)

SMALL = [
    *("bool", "int8", "uint8", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
HALF = ["int16", "uint16", "float16", "bfloat16"]
WIDE = [
    *("int32", "int64", "uint32", "uint64", "float32", "float64", "complex64", "complex128"),
    *("complex32", "bcomplex32"),
]
PACKED = {
    **dict.fromkeys(("int1", "uint1"), 1),
    **dict.fromkeys(("int2", "uint2"), 2),
    **dict.fromkeys(("int4", "uint4", "float4_e2m1fn"), 4),
    **dict.fromkeys(("float6_e2m3fn", "float6_e3m2fn"), 6),
}
EXTENSION = [name for name in (*SMALL, *HALF, *WIDE, *PACKED) if hasattr(ml_dtypes, name)]


def make(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if name in EXTENSION else np.dtype(name)


def named(name: str) -> Dtype:
    dtype = dtype_named(name)
    assert dtype is not None
    return dtype


@pytest.mark.parametrize("name", [*SMALL, *HALF, *WIDE, *PACKED])
def test_a_dtype_has_the_name_and_bits_of_the_specification(name: str) -> None:
    """M04-1."""
    dtype = dtype_of(make(name))
    assert dtype == Dtype(name, PACKED.get(name, make(name).itemsize * 8))
    check_dtype(dtype)
    assert numpy_dtype(dtype) == make(name)
    assert dtype_named(name) == dtype


@pytest.mark.parametrize("name", SMALL)
def test_all_patterns_of_an_8_bit_type_are_kept(name: str) -> None:
    """M04-4."""
    raw = np.arange(2 if name == "bool" else 256, dtype=np.uint8)
    array = raw.view(make(name))
    assert bytes(pack_array(array)) == raw.tobytes()
    back = parse_array(raw.tobytes(), named(name), raw.shape)
    assert back.dtype == make(name)
    assert back.view(np.uint8).tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", HALF)
def test_all_patterns_of_a_16_bit_type_are_kept(name: str) -> None:
    """M04-4."""
    raw = np.arange(1 << 16, dtype="<u2")
    array = raw.view(make(name)).reshape(256, 256)
    assert bytes(pack_array(array)) == raw.tobytes()
    back = parse_array(pack_array(array), named(name), (256, 256))
    assert back.dtype == make(name)
    assert back.tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 64, 1000])
def test_types_under_8_bits_are_packed_without_gaps(name: str, count: int) -> None:
    bits = PACKED[name]
    elements = np.random.default_rng(count).integers(0, 1 << bits, count, dtype=np.uint8)
    packed = bytes(pack_array(elements.view(make(name))))
    assert len(packed) == -(-count * bits // 8) == packed_nbytes(Dtype(name, bits), count)
    # The definition, by exact integers: element i is bits [i*b, (i+1)*b) of one long number.
    number = sum(int(element) << (i * bits) for i, element in enumerate(elements))
    assert int.from_bytes(packed, "little") == number
    back = parse_array(packed, Dtype(name, bits), (count,))
    assert back.dtype == make(name)
    assert back.view(np.uint8).tolist() == elements.tolist()


@pytest.mark.parametrize("bits", range(1, 8))
def test_packing_is_the_same_across_blocks(bits: int) -> None:
    count = (1 << 20) * 2 + 13
    elements = np.random.default_rng(bits).integers(0, 1 << bits, count, dtype=np.uint8)
    dtype = Dtype("future_type", bits)
    packed = pack_array(elements.view(numpy_dtype(dtype)))
    assert packed.nbytes == packed_nbytes(dtype, count)
    back = parse_array(packed, dtype, (count,))
    assert np.array_equal(back.view(np.uint8), elements)
    for i in (0, 1, (1 << 20) - 1, 1 << 20, count - 1):
        window = int.from_bytes(packed[i * bits // 8 : i * bits // 8 + 2], "little")
        assert (window >> (i * bits % 8)) & ((1 << bits) - 1) == elements[i]


def test_bits_above_an_element_are_dropped() -> None:
    signs = np.array([0xFF, 0xF8, 0x07], np.uint8).view(ml_dtypes.int4)
    assert bytes(pack_array(signs)) == bytes([0x8F, 0x07])


def test_spare_bits_that_are_set_are_corrupt() -> None:
    """M04-3."""
    with pytest.raises(CorruptError) as caught:
        parse_array(b"\x21\x10", Dtype("int4", 4), (3,))
    assert caught.value.kind == "corrupt-padding"


@pytest.mark.parametrize("name", [*HALF, *WIDE, "str320", "datetime64[ns]", "timedelta64[25s]"])
def test_big_endian_input_is_stored_little_endian(name: str) -> None:
    """M04-2."""
    into = numpy_dtype(named(name))
    word = {"str320": 4, "complex32": 2, "bcomplex32": 2}.get(name, into.itemsize)
    word = word // 2 if into.kind == "c" else word
    raw = np.random.default_rng(1).integers(0, 256, 5 * into.itemsize, np.uint8)
    swapped = raw.view(f"u{word}").byteswap().view(np.uint8)
    array = swapped.view(into.newbyteorder(">"))
    assert bytes(pack_array(array)) == raw.tobytes()


@pytest.mark.parametrize(
    ("dtype", "name", "bits"),
    [
        ("U10", "str320", 320),
        ("S10", "bytes80", 80),
        ("V8", "void64", 64),
        ("U0", "str0", 0),
        ("S0", "bytes0", 0),
        ("V0", "void0", 0),
        ("M8[ns]", "datetime64[ns]", 64),
        ("M8", "datetime64", 64),
        ("m8[25s]", "timedelta64[25s]", 64),
        ("longlong", "int64", 64),
        (">f8", "float64", 64),
    ],
)
def test_numpy_names_carry_width_and_unit(dtype: str, name: str, bits: int) -> None:
    found = dtype_of(np.dtype(dtype))
    assert found == Dtype(name, bits)
    check_dtype(found)
    assert numpy_dtype(found) == np.dtype(dtype).newbyteorder("<")


def test_an_empty_array_keeps_its_dtype_exactly() -> None:
    for name in ("str0", "bytes0", "void0", "float32", "int4", "string", "bytes"):
        for shape in ((2,), (0, 3), ()):
            made = empty_array(named(name), shape)
            assert made.dtype == numpy_dtype(named(name))
            assert made.shape == shape
            assert made.flags.writeable


def test_an_array_of_width_zero_comes_back() -> None:
    array: NDArray[Any] = np.ndarray((3, 2), "S0", b"")
    assert pack_array(array).nbytes == 0
    back = parse_array(b"", dtype_of(array), (3, 2))
    assert back.dtype == array.dtype
    assert back.shape == (3, 2)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, np.longdouble),
        np.zeros(2, np.clongdouble),
        np.zeros(2, "f4,i4"),
        np.array([1, None], object),
        np.array(["a", b"b"], object),
        np.array(["a"], np.dtypes.StringDType(na_object=None)),
        np.array(["a"], np.dtypes.StringDType(coerce=False)),
    ],
    ids=lambda a: str(a.dtype),
)
def test_arrays_that_cannot_come_back_are_refused(array: NDArray[Any]) -> None:
    """M04-2."""
    with pytest.raises(UsageError) as caught:
        dtype_of(array)
    assert caught.value.kind == "usage-dtype"
    assert caught.value.do


@pytest.mark.parametrize("kind", [np.dtypes.StringDType(), object])
def test_text_of_any_length_is_offsets_and_utf8(kind: Any) -> None:
    array = np.array([["a", "é"], ["", "x\0y"]], kind)
    dtype = dtype_of(array)
    assert dtype == Dtype("string", 0)
    packed = bytes(pack_array(array))
    assert packed == struct.pack("<5Q", 0, 1, 3, 3, 6) + "aéx\0y".encode()
    back = parse_array(packed, dtype, (2, 2))
    assert back.dtype == np.dtypes.StringDType()
    assert back.tolist() == array.tolist()


def test_bytes_of_any_length_keep_their_zeros() -> None:
    array = np.array([b"a\0", b"", b"\xff\0"], object)
    back = parse_array(pack_array(array), dtype_of(array), (3,))
    assert back.dtype == object
    assert back.tolist() == [b"a\0", b"", b"\xff\0"]


def test_a_lone_surrogate_in_text_is_refused() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        pack_array(np.array(["\ud800"], object))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<2Q", 0, 1),
        struct.pack("<3Q", 1, 1, 1) + b"a",
        struct.pack("<3Q", 0, 2, 1) + b"a",
        struct.pack("<3Q", 0, 1, 2) + b"a",
        struct.pack("<3Q", 0, 1, 1) + b"ab",
        struct.pack("<3Q", 0, 2**64 - 1, 1) + b"a",
        struct.pack("<3Q", 0, 1, 1) + b"\xff",
        struct.pack("<3Q", 0, 1, 2) + "é".encode(),
    ],
)
def test_bad_offsets_or_text_are_corrupt(data: bytes) -> None:
    """M04-5, M04-6."""
    with pytest.raises(CorruptError) as caught:
        parse_array(data, Dtype("string", 0), (2,))
    assert caught.value.kind == "corrupt-strings"


@pytest.mark.parametrize("bits", [1, 3, 5, 7, 8, 24, 128])
def test_an_unknown_dtype_is_opaque_and_saves_again_as_itself(bits: int) -> None:
    """M04-8."""
    dtype = Dtype("float99_new", bits)
    check_dtype(dtype)
    raw = np.random.default_rng(bits).integers(0, 256, packed_nbytes(dtype, 8), np.uint8)
    array = parse_array(raw, dtype, (2, 4))
    assert array.dtype.kind == "V"
    assert array.dtype.itemsize == max(1, bits // 8)
    assert array.dtype.metadata is not None
    assert array.dtype.metadata["ckptfmt.dtype"] == "float99_new"
    assert dtype_of(array) == dtype
    assert dtype_of(array[1:]) == dtype
    assert bytes(pack_array(array)) == raw.tobytes()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *(("float32", 16), ("int4", 8), ("string", 8), ("bytes", 8), ("str320", 32), ("str33", 33)),
        *(("void9", 9), ("datetime64[ns]", 32), ("future", 0), ("future", 12), ("future", -8)),
        *(("future", 1 << 32), ("", 8), ("x" * 256, 8), ("str99999999999", 99999999999)),
        *(("bytes34359738368", 34359738368),),
    ],
)
def test_bits_that_do_not_fit_the_name_are_corrupt(name: str, bits: int) -> None:
    """M04-1."""
    with pytest.raises(CorruptError) as caught:
        check_dtype(Dtype(name, bits), "$.tree.dtypes[3]")
    assert caught.value.kind == "corrupt-dtype"
    assert caught.value.where == "$.tree.dtypes[3]"


def test_packing_copies_nothing_where_the_memory_has_the_bytes() -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    packed = pack_array(array)
    array[0, 0] = 7
    assert struct.unpack("<f", packed[:4]) == (7.0,)


def test_a_parsed_array_is_a_view_and_writable_if_the_bytes_are() -> None:
    data = bytearray(16)
    array = parse_array(data, Dtype("float32", 32), (2, 2))
    array[1, 1] = 1.0
    assert data[12:] == struct.pack("<f", 1.0)
    assert not parse_array(bytes(16), Dtype("float32", 32), (4,)).flags.writeable


@pytest.mark.parametrize("nbytes", [0, 15, 17])
def test_a_region_of_another_length_is_corrupt(nbytes: int) -> None:
    with pytest.raises(CorruptError):
        parse_array(bytes(nbytes), Dtype("float32", 32), (4,))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), ()])
@pytest.mark.parametrize("name", ["float32", "int4", "string", "bytes", "bfloat16"])
def test_empty_and_scalar_shapes_are_exact(name: str, shape: tuple[int, ...]) -> None:
    dtype = named(name)
    into = numpy_dtype(dtype)
    array = np.empty(shape, into)
    if array.size:
        array[...] = {"string": "x", "bytes": b"x"}.get(name, 1)
    back = parse_array(pack_array(array), dtype, shape)
    assert back.shape == shape
    assert back.dtype == into
    assert back.tolist() == array.tolist()


def test_layouts_have_the_bytes_of_their_c_order_copy() -> None:
    base = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    for array in (
        np.asfortranarray(base),
        base.transpose(2, 0, 1),
        base[::-1, ::2, 1:],
        np.broadcast_to(base[0, 0], (5, 4)),
        base[..., None],
    ):
        assert bytes(pack_array(array)) == np.ascontiguousarray(array).tobytes()
