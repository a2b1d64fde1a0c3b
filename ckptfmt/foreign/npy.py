"""One `.npy` array in a mapped file, or in an entry of an archive: its header, checked, and a tensor.

The header is a Python dict as text, of which only literals are read. Objects would be a pickle;
they are refused, as are structures and dtypes whose meaning depends on the machine.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import UnsupportedError
from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.flat import box_of_runs
from ckptfmt.foreign.mapping import corrupt as damage
from ckptfmt.foreign.mapping import gathered
from ckptfmt.format import dtype_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader

REASON = "numpy"
MAGIC = b"\x93NUMPY"
HEAD_NBYTES_MAX = 1 << 16
"""NumPy itself reads no header of more than 10,000 bytes from a stranger."""
_NDIM_MAX = 64
_NUMEL_MAX = 1 << 62
_UNICODE_MAX = 0x10FFFF
_DTYPE = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f[248]|c(?:8|16)|[SUV](?:0|[1-9][0-9]{0,8})"
    r"|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,7}\])?)\Z"
)
_LONG = re.compile(rb"(?<=[0-9])L(?=[,)])")
"""Python 2 wrote lengths so."""

Read = Callable[[int, int], "NDArray[np.uint8]"]
"""Bytes of the file or entry: (start, how many)."""


corrupt = partial(damage, REASON)


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the values. `start`: byte where they begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parse_npy(head: bytes, nbytes: int, where: str) -> Header:
    """The header of an array.

    Args:
        head: The first bytes, `HEAD_NBYTES_MAX` of them if there are so many.
        nbytes: Of the whole.
    Raises:
        UnsupportedError: The dtype is none that can be carried.
        CorruptError: Anything does not hold.
    """
    if not head.startswith(MAGIC) or len(head) < 10:
        raise corrupt("no NumPy array", "magic", where, ascii(head[:8]))
    major, minor = head[6], head[7]
    if major not in (1, 2, 3) or minor:
        raise UnsupportedError(
            "an unknown version of the format",
            reason=f"{REASON}-version",
            where=where,
            expected="1.0, 2.0 or 3.0",
            found=f"{major}.{minor}",
        )
    begin = 10 if major == 1 else 12
    length = int.from_bytes(head[8:begin], "little")
    start = begin + length
    if start > min(nbytes, HEAD_NBYTES_MAX):
        raise corrupt("the header is too long", "header", where, f"{length} bytes")
    fields = _literal(head[begin:start], where)
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise corrupt("a header with other keys", "header", where)
    shape, is_fortran = fields["shape"], fields["fortran_order"]
    if type(is_fortran) is not bool or type(shape) is not tuple:
        raise corrupt("a header of other types", "header", where)
    if len(shape) > _NDIM_MAX or not all(type(n) is int and n >= 0 for n in shape):
        raise corrupt("not a shape", "shape", where, ascii(shape)[:200])
    dtype = _dtype(fields["descr"], where)
    if math.prod(n for n in shape if n) * max(dtype.itemsize, 1) >= _NUMEL_MAX:
        raise corrupt("an array without end", "shape", where, ascii(shape)[:200])
    made = Header(dtype, shape, is_fortran, start)
    if start + made.nbytes != nbytes:
        raise corrupt(
            "the length is not what the header says (truncated?)",
            "truncated",
            where,
            f"{nbytes} bytes, not {start + made.nbytes}",
        )
    return made


def _literal(text: bytes, where: str) -> Any:
    try:
        return ast.literal_eval(_LONG.sub(b"", text).decode("utf-8").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise corrupt("the header cannot be parsed", "header", where, str(error)[:80]) from error


def _dtype(text: object, where: str) -> np.dtype[Any]:
    what = "a dtype that no checkpoint has"
    if type(text) is not str:
        what = "a structured array: save its fields one by one"
    elif text.lstrip("|<>=") in ("O", "O8", "O4"):
        what = "an array of Python objects, which would be a pickle"
    elif _DTYPE.match(text):
        try:
            return np.dtype(text)
        except (TypeError, ValueError):  # a unit of time that there is not
            pass
    raise UnsupportedError(
        what,
        reason=f"{REASON}-dtype",
        where=where,
        found=ascii(text)[:80],
        do="load it with NumPy, and save plain arrays",
    )


def npy_tensor(header: Header, read: Read, where: str, *, is_mapped: bool) -> ForeignTensor:
    """The lazy tensor of an array.

    Args:
        is_mapped: `read` gives views; else it inflates, and its ranges should ascend.
    """
    array = _Array(header, read, where)
    native = header.dtype.newbyteorder("=")
    is_view = is_mapped and not header.is_fortran and header.dtype.isnative
    box: BoxReader | None = None
    if is_mapped and header.is_fortran:
        box = array.fortran_box
    elif not header.is_fortran and not (is_view and native.kind not in "bU"):
        box = box_of_runs(header.shape, array.run)
    return ForeignTensor(
        name="",
        foreign_name="",
        dtype=dtype_of(native).name,
        shape=header.shape,
        nbytes=header.nbytes,
        where=where,
        fetch=array.fetch,
        must_check=native.kind in "bU",
        box=box if header.nbytes else None,
    )


class _Array:
    """The values of one array."""

    def __init__(self, header: Header, read: Read, where: str) -> None:
        self._header, self._read, self._where = header, read, where

    def fetch(self) -> NDArray[Any]:
        header = self._header
        flat = self.run(0, math.prod(header.shape))
        if header.is_fortran:
            return gathered(flat.reshape(header.shape, order="F"))
        return flat.reshape(header.shape)

    def run(self, first: int, last: int) -> NDArray[Any]:
        """Elements as they follow one another in the file, in the machine's byte order."""
        header = self._header
        size = header.dtype.itemsize
        if not size:
            return np.empty(last - first, header.dtype)
        raw = self._read(header.start + first * size, (last - first) * size)
        return self._native(raw.view(header.dtype))

    def fortran_box(self, sides: tuple[slice, ...]) -> NDArray[Any]:
        header = self._header
        raw = self._read(header.start, header.nbytes).view(header.dtype)
        return self._native(gathered(raw.reshape(header.shape, order="F")[sides]))

    def _native(self, array: NDArray[Any]) -> NDArray[Any]:
        made = array.astype(array.dtype.newbyteorder("="), copy=False)
        if made.dtype.kind in "bU" and made.size:
            self._check(made)
        return made

    def _check(self, array: NDArray[Any]) -> None:
        is_text = array.dtype.kind == "U"
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint32 if is_text else np.uint8)
        if words.size and words.max() > (_UNICODE_MAX if is_text else 1):
            what = "a character that is none" if is_text else "a bool is neither 0 nor 1"
            raise corrupt(what, "value", self._where, int(words.max()))
