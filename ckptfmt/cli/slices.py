"""`NAME[0:8,3]`: a leaf's name with a region behind it."""

from __future__ import annotations

import re
from collections.abc import Container
from types import EllipsisType
from typing import TypeAlias

from ckptfmt.errors import UsageError

Part: TypeAlias = "int | slice | EllipsisType"
Region: TypeAlias = tuple[Part, ...]

_SUBJECT = re.compile(r"(?P<name>.*)\[(?P<region>[-0-9:., ]*)\]\Z", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]{1,19}\Z")


def parse_subject(text: str, names: Container[str]) -> tuple[str, Region | None]:
    """Split a name and its region. A leaf that is really called `w[0]` wins over a slice of `w`."""
    match = None if text in names else _SUBJECT.match(text)
    if match is None:
        return text, None
    return match["name"], parse_region(match["region"])


def parse_region(text: str) -> Region:
    """The region between the brackets, as NumPy would read it: ints, slices, at most one `...`."""
    parts = [part.strip() for part in text.split(",")]
    if parts[-1] == "" and len(parts) > 1:
        parts.pop()
    made = tuple(_parse_part(part, text) for part in parts)
    if sum(part is ... for part in made) > 1:
        raise _bad(text)
    return made


def _parse_part(part: str, text: str) -> Part:
    if part == "...":
        return ...
    pieces = [piece.strip() for piece in part.split(":")]
    if len(pieces) > 3 or not all(_NUMBER.match(p) or (not p and len(pieces) > 1) for p in pieces):
        raise _bad(text)
    numbers = [int(p) if p else None for p in pieces]
    if len(numbers) == 1:
        assert numbers[0] is not None
        return numbers[0]
    if len(numbers) == 3 and numbers[2] == 0:
        raise _bad(text)
    return slice(*numbers)


def _bad(text: str) -> UsageError:
    return UsageError(
        "not a slice",
        reason="slice",
        found=f"[{text}]",
        do="write it as NumPy does: [0:8,3], [..., -1], [::2]",
    )
