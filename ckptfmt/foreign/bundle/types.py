"""Dtypes of TensorFlow, and what an index says of one tensor."""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """A dtype of TensorFlow: its name there, ours ("" where it cannot be carried), bytes each."""

    name: str
    dtype: str
    nbytes: int


STRING = 7
BOOL = 10
TYPES: dict[int, TensorType] = {
    1: TensorType("float32", "float32", 4),
    2: TensorType("float64", "float64", 8),
    3: TensorType("int32", "int32", 4),
    4: TensorType("uint8", "uint8", 1),
    5: TensorType("int16", "int16", 2),
    6: TensorType("int8", "int8", 1),
    STRING: TensorType("string", "bytes", 0),
    8: TensorType("complex64", "complex64", 8),
    9: TensorType("int64", "int64", 8),
    BOOL: TensorType("bool", "bool", 1),
    11: TensorType("qint8", "int8", 1),
    12: TensorType("quint8", "uint8", 1),
    13: TensorType("qint32", "int32", 4),
    14: TensorType("bfloat16", "bfloat16", 2),
    15: TensorType("qint16", "int16", 2),
    16: TensorType("quint16", "uint16", 2),
    17: TensorType("uint16", "uint16", 2),
    18: TensorType("complex128", "complex128", 16),
    19: TensorType("float16", "float16", 2),
    20: TensorType("resource", "", 0),
    21: TensorType("variant", "", 0),
    22: TensorType("uint32", "uint32", 4),
    23: TensorType("uint64", "uint64", 8),
    24: TensorType("float8_e5m2", "float8_e5m2", 1),
    25: TensorType("float8_e4m3fn", "float8_e4m3fn", 1),
    26: TensorType("float8_e4m3fnuz", "float8_e4m3fnuz", 1),
    27: TensorType("float8_e4m3b11fnuz", "float8_e4m3b11fnuz", 1),
    28: TensorType("float8_e5m2fnuz", "float8_e5m2fnuz", 1),
    29: TensorType("int4", "int4", 1),
    30: TensorType("uint4", "uint4", 1),
    31: TensorType("int2", "int2", 1),
    32: TensorType("uint2", "uint2", 1),
    33: TensorType("float4_e2m1fn", "float4_e2m1fn", 1),
}
"""By the number in `types.proto`. Types under 8 bits take a byte an element in a bundle."""

QUANTIZED = frozenset({11, 12, 13, 15, 16})


class Slice(NamedTuple):
    """A box of a tensor: per axis where it begins and how long it is (-1: the whole axis)."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


class Entry(NamedTuple):
    """A tensor, or a slice of one: `nbytes` bytes of a shard from `offset` on."""

    type: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    crc: int
    slices: tuple[Slice, ...]
