"""Types of GGUF: how many elements a block has, and how many bytes."""

from __future__ import annotations

from typing import NamedTuple

from ckptfmt.format import Dtype, dtype_named


class Block(NamedTuple):
    """A type: its name in ggml, elements and bytes of a block, our dtype of one block."""

    name: str
    elements: int
    nbytes: int
    dtype: Dtype


def _plain(name: str) -> Dtype:
    found = dtype_named(name)
    assert found is not None
    return found


PLAIN = {
    0: ("F32", "float32"),
    1: ("F16", "float16"),
    24: ("I8", "int8"),
    25: ("I16", "int16"),
    26: ("I32", "int32"),
    27: ("I64", "int64"),
    28: ("F64", "float64"),
    30: ("BF16", "bfloat16"),
}
"""Types whose block is an element."""

_QUANTIZED_TEXT = """
    2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34, 10 Q2_K 256 84,
    11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210, 15 Q8_K 256 292,
    16 IQ2_XXS 256 66, 17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50, 20 IQ4_NL 32 18,
    21 IQ3_S 256 110, 22 IQ2_S 256 82, 23 IQ4_XS 256 136, 29 IQ1_M 256 56, 34 TQ1_0 256 54,
    35 TQ2_0 256 66, 39 MXFP4 32 17, 40 NVFP4 64 36, 41 Q1_0 128 18
"""
# Q8_1 (9) is of no file: its block has had two sizes.
_ROWS = [row.split() for row in _QUANTIZED_TEXT.split(",")]

BLOCKS: dict[int, Block] = {
    **{
        number: Block(name, 1, _plain(dtype).itemsize, _plain(dtype))
        for number, (name, dtype) in PLAIN.items()
    },
    **{
        int(number): Block(name, int(elements), int(nbytes), Dtype(f"gguf.{name}", 8 * int(nbytes)))
        for number, name, elements, nbytes in _ROWS
    },
}
"""By the number in the file."""

NUMBERS: dict[int, Dtype] = {
    kind: _plain(name)
    for kind, name in {
        0: "uint8",
        1: "int8",
        2: "uint16",
        3: "int16",
        4: "uint32",
        5: "int32",
        6: "float32",
        10: "uint64",
        11: "int64",
        12: "float64",
    }.items()
}
"""Types of values that are numbers."""
