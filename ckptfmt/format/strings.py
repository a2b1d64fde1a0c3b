"""Regions of variable length: n + 1 offsets (u64, from the payload's start), then the payload.

Spec: 04-dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from ckptfmt.errors import CorruptError, UsageError


def pack_strings(items: Sequence[Any], *, utf8: bool) -> bytearray:
    """The region of some str (`utf8`) or bytes, in C order."""
    try:
        pieces: Sequence[bytes] = [text.encode() for text in items] if utf8 else items
    except UnicodeEncodeError as error:
        raise UsageError(
            "a string is not valid Unicode (lone surrogate)",
            reason="dtype",
            found=ascii(error.object)[:80],
            do="encode it to bytes",
        ) from None
    offsets = np.zeros(len(pieces) + 1, "<u8")
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    made = bytearray(offsets.tobytes())
    made += b"".join(pieces)
    return made


def _bad(what: str, expected: object = None, found: object = None) -> NoReturn:
    raise CorruptError(
        what,
        reason="strings",
        expected=expected,
        found=found,
        do='restore another step or run "ckptfmt verify"',
    )


def parse_strings(data: bytes, count: int, *, utf8: bool) -> list[Any]:
    """The str or bytes of a region of `count` elements.

    Raises:
        CorruptError: Offsets that descend or leave the payload, or text that is not UTF-8.
    """
    if count == 0 and not data:
        return []
    head = 8 * (count + 1)
    if len(data) < head:
        _bad("a region of strings ends within its offsets", head, len(data))
    offsets = np.frombuffer(data, "<u8", count + 1)
    payload_nbytes = len(data) - head
    if offsets[0] != 0 or offsets[-1] != payload_nbytes:
        span = f"{offsets[0]} and {offsets[-1]}"
        _bad("offsets of strings do not span the payload", f"0 and {payload_nbytes}", span)
    if (offsets[1:] < offsets[:-1]).any():
        _bad("offsets of strings descend")
    ends = (offsets + np.uint64(head)).tolist()
    pieces = [data[start:stop] for start, stop in pairwise(ends)]
    if not utf8:
        return pieces
    try:
        return [piece.decode() for piece in pieces]
    except UnicodeDecodeError as error:
        _bad("a string is not UTF-8", found=error.reason)
