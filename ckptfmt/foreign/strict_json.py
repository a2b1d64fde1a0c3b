"""JSON from strangers: objects are walked in place, an entry at a time, every entry bounded.

`json.loads` makes Python objects of a whole hostile document, twenty times its size, before anyone
can look at it; and of two equal keys it silently keeps the last. Here the outer object is walked
over the mapped bytes with possessive patterns (no backtracking, no recursion), and only one small
entry at a time becomes objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from ckptfmt.errors import CorruptError

if TYPE_CHECKING:
    import mmap

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"', re.DOTALL)
_FLAT_OBJECT = re.compile(rb"\{[^{}]*+\}")
_DEPTH_MAX = 32


class JsonCursor:
    """A position in a JSON document that is read strictly from left to right.

    Args:
        data: The bytes; only [start, stop) is looked at.
        where: What they are, for messages.
        reason: Prefix of the errors' reasons.
    """

    def __init__(
        self, data: bytes | mmap.mmap, start: int, stop: int, *, where: str, reason: str
    ) -> None:
        self.data, self.position, self.stop = data, start, stop
        self.where, self.reason = where, reason

    def fail(self, what: str, reason: str = "json", **details: object) -> NoReturn:
        """Raise CorruptError at the present position."""
        raise CorruptError(
            what,
            reason=f"{self.reason}-{reason}",
            where=f"{self.where}, byte {self.position}",
            expected=details.get("expected"),
            found=details.get("found"),
            do="get the file again",
        )

    def _skip_space(self) -> None:
        match = _SPACE.match(self.data, self.position, self.stop)
        assert match is not None
        self.position = match.end()

    def take(self, token: bytes) -> bool:
        """Step over one character if it comes next."""
        self._skip_space()
        if self.position < self.stop and self.data[self.position : self.position + 1] == token:
            self.position += 1
            return True
        return False

    def expect(self, token: bytes) -> None:
        """Step over one character that must come next."""
        if not self.take(token):
            found = self.data[self.position : min(self.stop, self.position + 12)]
            self.fail(
                "the JSON is malformed",
                expected=repr(token.decode()),
                found=ascii(bytes(found))[1:],
            )

    def end(self) -> None:
        """Nothing but blanks may follow."""
        self._skip_space()
        if self.position != self.stop:
            self.fail("bytes after the JSON object", "trailing")

    def string(self, nbytes_max: int, what: str) -> str:
        """A string of at most `nbytes_max` bytes as they stand."""
        self._skip_space()
        stop = min(self.stop, self.position + nbytes_max + 2)
        match = _STRING.match(self.data, self.position, stop)
        if match is None:
            if self.data[self.position : self.position + 1] == b'"' and stop < self.stop:
                self.fail(f"{what} is too long", "limit", expected=f"at most {nbytes_max} bytes")
            self.fail("the JSON is malformed", expected=f"{what} as a string")
        try:
            made = json.loads(match[0])
            made.encode()
        except ValueError as error:
            self.fail(f"{what} is not valid text", "text", found=type(error).__name__)
        self.position = match.end()
        assert isinstance(made, str)
        return made

    def keys(self, nbytes_max: int, what: str) -> Iterator[str]:
        """Keys of the object that comes next; the caller takes each value before the next key.

        Raises:
            CorruptError: A key stands twice, or this is no object.
        """
        self.expect(b"{")
        if self.take(b"}"):
            return
        seen: set[str] = set()
        while True:
            key = self.string(nbytes_max, what)
            if key in seen:
                self.fail(f"duplicate {what} {ascii(key)[:200]}", "duplicate-name")
            seen.add(key)
            self.expect(b":")
            yield key
            if self.take(b"}"):
                return
            self.expect(b",")

    def flat_object(self, nbytes_max: int, what: str) -> dict[str, Any]:
        """An object without objects in it."""
        self._skip_space()
        if self.data[self.position : self.position + 1] != b"{":
            self.fail(f"{what} is not an object", "entry")
        stop = min(self.stop, self.position + nbytes_max)
        match = _FLAT_OBJECT.match(self.data, self.position, stop)
        if match is None:
            self.fail(f"{what} is nested, unclosed or longer than {nbytes_max} bytes", "nesting")
        made = self._loads(match[0], what)
        self.position = match.end()
        assert isinstance(made, dict)
        return made

    def small_value(self, nbytes_max: int, what: str) -> Any:
        """Any value of at most `nbytes_max` bytes and moderate nesting, up to its end."""
        self._skip_space()
        text = bytes(self.data[self.position : min(self.stop, self.position + nbytes_max)])
        depth = position = 0
        while position < len(text):
            char = text[position : position + 1]
            if char == b'"':
                match = _STRING.match(text, position)
                if match is None:
                    break
                position = match.end()
            else:
                depth += (char in b"{[") - (char in b"}]")
                if depth < 0 or (depth == 0 and char == b","):
                    break
                position += 1
            if depth > _DEPTH_MAX:
                self.fail(f"{what} is nested too deep", "nesting", expected=f"at most {_DEPTH_MAX}")
        else:
            if self.position + len(text) < self.stop:
                self.fail(f"{what} is too long", "limit", expected=f"at most {nbytes_max} bytes")
        made = self._loads(text[:position], what)
        self.position += position
        return made

    def _loads(self, text: bytes, what: str) -> Any:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            made = dict(pairs)
            if len(made) != len(pairs):
                names = [key for key, _ in pairs]
                twice = next(key for key in names if names.count(key) > 1)
                self.fail(f"duplicate key {ascii(twice)[:200]} in {what}", "duplicate-name")
            return made

        def constant(text: str) -> NoReturn:
            self.fail(f"{what} is not JSON", found=text)

        try:
            return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        except RecursionError:
            self.fail(f"{what} is nested too deep", "nesting")
        except CorruptError:
            raise
        except ValueError as error:
            self.fail(f"{what} is not JSON", found=str(error)[:120])


SMALL_NBYTES_MAX = 8 << 20
"""JSON that becomes objects at once, which take up to twenty times as much."""


def parse_small_json(data: bytes, where: str, reason: str) -> Any:
    """A whole document of at most `SMALL_NBYTES_MAX` bytes, whose keys differ."""
    if len(data) > SMALL_NBYTES_MAX:
        raise _no_json("a JSON document is too long", where, reason, f"{len(data)} bytes")
    try:
        return json.loads(data, object_pairs_hook=_differing, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _no_json("not a JSON document", where, reason, str(error)[:80]) from error


def _differing(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise json.JSONDecodeError("a key stands twice", "", 0)
    return made


def _no_constant(text: str) -> float:
    # Python writes them, JSON has none.
    return float(text)


def _no_json(what: str, where: str, reason: str, found: object) -> CorruptError:
    return CorruptError(
        what, reason=f"{reason}-json", where=where, found=found, do="get the file again"
    )
