"""Which strings are keys. Nothing that passes here can leave the store. Spec: 02-store."""

from __future__ import annotations

from ckptfmt.errors import UsageError
from ckptfmt.types import Key


def check_key(key: str) -> Key:
    """Return `key` if it is one: non-empty parts joined by `/`, none of them `.` or `..`.

    Raises:
        UsageError: kind `usage-key`: empty, absolute, with an empty part, `.`, `..`, a backslash,
            NUL, or a lone surrogate.
    """
    flaw = _flaw(key)
    if flaw:
        raise _refusal("key", key, flaw)
    return Key(key)


def check_prefix(prefix: str) -> str:
    """Return `prefix` if some key may begin with it; the last part may be cut short or empty.

    Raises:
        UsageError: kind `usage-key`, as for `check_key`.
    """
    folder, _, tail = prefix.rpartition("/")
    flaw = ""
    if prefix.startswith("/"):
        flaw = "it is absolute"
    elif folder:
        flaw = _flaw(folder)
    if not flaw and tail and tail not in (".", ".."):
        flaw = _flaw(tail)
    if flaw:
        raise _refusal("prefix of keys", prefix, flaw)
    return prefix


def is_key(key: str) -> bool:
    """True if `key` is one. Listings leave out what is not: it is none of ours."""
    return not _flaw(key)


def _flaw(key: str) -> str:
    if not key:
        return "it is empty"
    if "\\" in key:
        return "it has a backslash"
    if "\0" in key:
        return "it has a NUL"
    parts = key.split("/")
    if "" in parts:
        return "it is absolute" if key.startswith("/") else "it has an empty part"
    if "." in parts or ".." in parts:
        return "it has a part '.' or '..'"
    if not key.isascii():
        try:
            key.encode("utf-8")
        except UnicodeEncodeError:
            return "it is not valid Unicode"
    return ""


def _refusal(what: str, key: str, flaw: str) -> UsageError:
    return UsageError(
        f"not a {what}",
        reason="key",
        where=ascii(key),
        found=flaw,
        do="a key is relative to the store, its parts joined by '/'",
    )
