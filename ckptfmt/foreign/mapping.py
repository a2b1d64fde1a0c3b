"""A foreign file mapped for reading, and ranges of it as arrays of a dtype."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt import config
from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.file_map import FileMap, open_map
from ckptfmt.format import Dtype, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHECK_NBYTES = 16 << 20
WHOLE_CHUNKS_NBYTES_FREE = 384 << 20
"""What a chunk that is decoded whole may take with its decoded form, whatever the settings."""


def corrupt(
    form: str, what: str, reason: str, where: str, found: object = None, *, expected: object = None
) -> CorruptError:
    """Damage in a file of a format."""
    return CorruptError(
        what,
        reason=f"{form}-{reason}",
        where=where,
        expected=expected,
        found=found,
        do="get the file again",
    )


def map_file(path: str, where: str, form: str) -> tuple[FileMap, int]:
    """A file without links in its path, and its bytes."""
    data, nbytes = open_map(path, where)
    if data is None:
        raise corrupt(form, "the file is empty", "truncated", where)
    return data, nbytes


def starts_with(path: str, magic: bytes) -> bool:
    """Whether a regular file begins so; False for what cannot be read. A FIFO would wait."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def check_apart(spans: Iterable[tuple[int, int, str]], form: str, where: str) -> None:
    """No two of the ranges (start, stop, name) overlap: a small file cannot be a large checkpoint."""
    end, before = 0, ""
    for start, stop, name in sorted(span for span in spans if span[0] < span[1]):
        if start < end:
            at = f"{where}[{start}:{stop}), tensor {ascii(name)[:200]}"
            found = f"with {ascii(before)[:200]}"
            raise corrupt(form, "two tensors overlap", "overlap", at, found)
        end, before = stop, name


def check_whole_chunk(nbytes: int, form: str, where: str) -> None:
    """A chunk that can only be decoded whole fits into the memory that this process may take.

    Raises:
        UnsupportedError: Before any of it is taken: it and its decoded form are more than
            `staging_nbytes`, and more than what every conversion may take.
    """
    if 2 * nbytes > max(WHOLE_CHUNKS_NBYTES_FREE, config.current().staging_nbytes):
        raise UnsupportedError(
            "a compressed chunk that can only be decoded whole is larger than the memory allowed",
            reason=f"{form}-chunk-memory",
            where=where,
            expected=f"2 x {nbytes} bytes",
            found=f"staging_nbytes={config.current().staging_nbytes}",
            do="raise CKPTFMT_STAGING_BYTES or configure(staging_nbytes=...), "
            "or write the file again in smaller chunks",
        )


def native(raw: NDArray[np.uint8], dtype: Dtype, *, swapped: bool) -> NDArray[Any]:
    """Bytes as elements of a dtype of 8 bits or more, in the machine's order; read-only.

    Args:
        swapped: They stand in the other order than the machine's. Complex numbers swap by halves.
    """
    made = numpy_dtype(dtype)
    width = made.itemsize // (2 if made.kind == "c" else 1)
    if swapped and width > 1:
        raw = raw.view(f"u{width}").byteswap().view(np.uint8)
        raw.flags.writeable = False
    return raw.view(made)


def word(nbytes: int) -> np.dtype[Any]:
    """Elements of so many bytes whose bits nothing looks at. NumPy copies void ones by a call each,
    ten times as slowly as integers."""
    return np.dtype(f"u{nbytes}" if nbytes in (1, 2, 4, 8) else f"V{nbytes}")


def gathered(array: NDArray[Any]) -> NDArray[Any]:
    """A strided view in C order, copied first as it lies: reading a large file a column at a time
    costs a miss for each element."""
    return np.ascontiguousarray(np.array(array, order="K"))


def check_bools(raw: NDArray[np.uint8], form: str, where: str) -> None:
    """Every element is 0 or 1."""
    for start in range(0, raw.size, _CHECK_NBYTES):
        block = raw[start : start + _CHECK_NBYTES]
        if block.max() > 1:
            at = start + int(np.argmax(block > 1))
            what = "a bool is neither 0 nor 1"
            raise corrupt(form, what, "bool", f"{where}, element {at}", int(raw[at]))


def numel(shape: Iterable[int]) -> int:
    """Elements, by exact integers."""
    return math.prod(shape)
