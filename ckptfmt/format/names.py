"""Names of leaves, checkpoints and tags: every key has one text, and every text at most one key.

A leaf's name is the path of its keys, escaped and joined by `/`. Spec: 03-names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn

from ckptfmt.errors import CorruptError, UsageError
from ckptfmt.format.limits import INT63_MAX

STEP_MAX = (1 << 53) - 1
"""JSON readers in other languages hold integers up to here exactly."""
TUPLE_DEPTH_MAX = 8
"""Tuples in tuples as a key: each level doubles the backslashes of the level below."""
INT_DIGITS_MAX = 4000
"""CPython itself refuses to print or read more than 4300 digits."""

_CHECKPOINT = re.compile(r"[a-z0-9][a-z0-9._-]{0,119}\Z")
_STEP = re.compile(r"step-([0-9]{16})\Z")
_INDEX_KEY = re.compile(
    r"(?:(?:checkpoints|quarantine)/)?([a-z0-9][a-z0-9._-]{0,119})~(0|[1-9][0-9]{0,18})\.index\Z"
)
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))]
)
_KEY_CURE = "use str, int, bool, float, bytes, None or a tuple of these as keys"


def _bad_key(what: str, key: object) -> NoReturn:
    text = f"{type(key).__name__} {ascii(key)[:80]}"
    raise UsageError(what, reason="key", found=text, do=_KEY_CURE)


def _bad_part(part: str) -> NoReturn:
    raise CorruptError(
        "part of a name is not a key in its one legal spelling",
        reason="name",
        where=ascii(part)[:200],
        do='restore another step or run "ckptfmt verify"',
    )


def _escape_text(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def escape_key(key: object) -> str:
    """The part of a name for a dict key. A list position is its plain decimal: `str(position)`.

    Raises:
        UsageError: The key's type cannot come back as it is (NumPy scalars, enums, subclasses).
    Spec: 03-names §3.2.
    """
    if type(key) is str:
        if key.isascii():
            if "~" not in key and "/" not in key:
                return key or "~2"
        else:
            try:
                key.encode()
            except UnicodeEncodeError:
                _bad_key("a key is not valid Unicode (lone surrogate)", key)
        return _escape_text(key)
    return "~3" + _escape_text(_key_text(key, 0))


def _key_text(key: object, depth: int) -> str:
    """Letter and text of a key that is not a string."""
    kind = type(key)
    if key is None:
        return "n"
    if kind is bool:
        return "b1" if key else "b0"
    if kind is int:
        try:
            text = str(key)
        except ValueError:
            text = ""
        if not 0 < len(text) <= INT_DIGITS_MAX:
            raise UsageError(
                "an int key is too long", reason="key", expected=f"at most {INT_DIGITS_MAX} digits"
            )
        return "i" + text
    if kind is float:
        return "f" + repr(key)
    if isinstance(key, bytes) and kind is bytes:
        return "x" + key.hex()
    if isinstance(key, tuple) and kind is tuple:
        if depth == TUPLE_DEPTH_MAX:
            _bad_key(f"a tuple key is nested deeper than {TUPLE_DEPTH_MAX}", key)
        items = [
            escape_key(item)
            if type(item) is str
            else "~3" + _escape_text(_key_text(item, depth + 1))
            for item in key
        ]
        return "t" + json.dumps(items, ensure_ascii=False, separators=(",", ":"))
    _bad_key("a dict key of this type cannot be saved", key)


def parse_key(part: str) -> object:
    """The dict key whose part this is (a list position comes back as its text).

    Raises:
        CorruptError: No key has this part.
    Spec: 03-names §3.2.
    """
    if not part or "/" in part:
        _bad_part(part)
    if "~" not in part:
        return part
    if part.startswith("~3"):
        try:
            key = _parse_text(_unescape(part[2:]), 0)
            if escape_key(key) == part:
                return key
        except (ValueError, RecursionError):  # UsageError is a ValueError: a lone surrogate
            pass
        _bad_part(part)
    return "" if part == "~2" else _unescape(part)


def _unescape(part: str) -> str:
    if part.count("~") != part.count("~0") + part.count("~1"):
        _bad_part(part)
    return part.replace("~1", "/").replace("~0", "~")


def _parse_text(text: str, depth: int) -> object:
    letter, rest = text[:1], text[1:]
    if letter == "n":
        return None
    if letter == "b":
        return rest == "1"
    if letter == "t" and depth < TUPLE_DEPTH_MAX:
        items = json.loads(rest)
        if not isinstance(items, list) or not all(type(item) is str for item in items):
            _bad_part(text)
        return tuple(
            _parse_text(_unescape(item[2:]), depth + 1)
            if item.startswith("~3")
            else parse_key(item)
            for item in items
        )
    parse = _SCALARS.get(letter)
    if parse is None or (letter == "i" and len(rest) > INT_DIGITS_MAX + 1):
        _bad_part(text)
    return parse(rest)


_SCALARS: dict[str, Callable[[str], object]] = {"i": int, "f": float, "x": bytes.fromhex}


def join_name(parent: str, part: str) -> str:
    """The name of a child; the root's name is empty."""
    return f"{parent}/{part}" if parent else part


def split_name(name: str) -> list[str]:
    """The parts of a name; none for the root.

    Raises:
        CorruptError: A part is empty.
    """
    if not name:
        return []
    parts = name.split("/")
    if "" in parts:
        _bad_part(name)
    return parts


def _offer(name: str) -> str:
    """A legal spelling near to `name`."""
    text = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:100].rstrip("-._")
    if text.startswith("step-"):
        text = text.replace("step-", "at-", 1)
    if text.split(".")[0] in _DEVICES or text == "latest" or text.isdigit():
        text = f"run-{text}"
    return text if _CHECKPOINT.match(text) else "main"


def _check(name: str, what: str, *, steps: bool) -> None:
    if not isinstance(name, str):
        raise UsageError(
            f"{what} is not a str", reason="name", found=type(name).__name__, do="pass a str"
        )
    problem = ""
    if not _CHECKPOINT.match(name):
        problem = "1 to 120 of a-z 0-9 . _ -, the first a letter or digit"
    elif name.endswith("."):
        problem = "no dot at the end"
    elif name.split(".")[0] in _DEVICES:
        problem = "no device name of Windows"
    elif name == "latest" or name.isdigit():
        problem = "no selector (digits are a step, `latest` the latest)"
    elif name.startswith("step-") and (not steps or step_of(name) is None):
        problem = "no `step-`: a step's checkpoint is named by step="
    elif name == "main" and what == "tag":
        problem = "not main, the name of a save without a step"
    if problem:
        offer = _offer(name)
        if offer == "main" and what == "tag":
            offer = "best"
        raise UsageError(
            f"{what} is not legal",
            reason="name",
            where=ascii(name)[:200],
            expected=problem,
            do=f"for example {offer!r}",
        )


def check_checkpoint_name(name: str, *, chosen: bool = False) -> None:
    """Refuse a name that no checkpoint may have.

    Args:
        name: `main`, `best.v2`, `step-0000000000000007`.
        chosen: The user chose it (`name=`): names of steps are refused too.
    Raises:
        UsageError: It offers a legal spelling.
    Spec: 02-store §2.2.
    """
    _check(name, "checkpoint name", steps=not chosen)


def check_tag(tag: str) -> None:
    """Refuse a tag that is not legal: a checkpoint's name, but neither a step's nor `main`."""
    _check(tag, "tag", steps=False)


def step_name(step: int) -> str:
    """The name of a step's checkpoint: `step-0000000000000007`."""
    if type(step) is not int or not 0 <= step <= STEP_MAX:
        raise UsageError(
            "step is not a whole number of finished steps",
            reason="step",
            expected=f"an int from 0 to {STEP_MAX}",
            found=f"{type(step).__name__} {ascii(step)[:40]}",
            do="count the steps that are finished, from 0"
            if type(step) is int
            else "pass int(step)",
        )
    return f"step-{step:016d}"


def step_of(name: str) -> int | None:
    """The step of a name that `step_name` makes, else None."""
    match = _STEP.match(name)
    step = int(match[1]) if match else -1
    return step if 0 <= step <= STEP_MAX else None


def index_key(name: str, generation: int) -> str:
    """Key of the index of a generation: `checkpoints/main~0.index`."""
    return f"checkpoints/{name}~{generation}.index"


def parse_index_key(key: str) -> tuple[str, int] | None:
    """(name, generation) of a key under `checkpoints/` or `quarantine/`, or of a key's last part.

    None for everything that is not of our own pattern: it is ignored and never deleted.
    """
    match = _INDEX_KEY.match(key)
    if match is None or int(match[2]) > INT63_MAX:
        return None
    try:
        check_checkpoint_name(match[1])
    except UsageError:
        return None
    return match[1], int(match[2])
