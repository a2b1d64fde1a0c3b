"""Digests: xxh3-128 (canonical big-endian, seed 0) and sha256. Spec: 06-digests-and-codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import xxhash

from ckptfmt.errors import UnsupportedError, UsageError
from ckptfmt.types import Digest

ALGORITHM_CODES = {"xxh3-128": 1, "sha256": 2}
ALGORITHM_NAMES = {code: name for name, code in ALGORITHM_CODES.items()}
DIGEST_NBYTES = {"xxh3-128": 16, "sha256": 32}


class Hasher(Protocol):
    """What takes bytes and gives their digest at the end."""

    def update(self, data: Any, /) -> object: ...
    def digest(self) -> bytes: ...


def _sha256_hasher(buffer: bytes | bytearray | memoryview = b"") -> Hasher:
    # Imported here: OpenSSL takes milliseconds to load, and most stores do without.
    import hashlib

    return hashlib.sha256(buffer)


def _sha256(buffer: bytes | bytearray | memoryview) -> bytes:
    return _sha256_hasher(buffer).digest()


_FUNCTIONS: dict[str, Callable[[bytes | bytearray | memoryview], bytes]] = {
    "xxh3-128": xxhash.xxh3_128_digest,
    "sha256": _sha256,
}


def digest(buffer: bytes | bytearray | memoryview, algorithm: str) -> Digest:
    """Digest of a C-contiguous buffer; releases the GIL while it works.

    Raises:
        UsageError: The algorithm is unknown.
    """
    return Digest(digest_function(algorithm)(buffer))


def digest_function(algorithm: str) -> Callable[[bytes | bytearray | memoryview], bytes]:
    """The function behind `digest`, for loops over many small buffers."""
    function = _FUNCTIONS.get(algorithm)
    if function is None:
        raise UsageError(
            "unknown digest algorithm",
            reason="digest",
            expected=" or ".join(_FUNCTIONS),
            found=repr(algorithm),
            do="choose one of these",
        )
    return function


def hasher(algorithm: str) -> Hasher:
    """A digest that is given its bytes piece by piece."""
    digest_function(algorithm)  # which refuses an unknown one
    return xxhash.xxh3_128() if algorithm == "xxh3-128" else _sha256_hasher()


def algorithm_name(code: int, where: str) -> str:
    """The algorithm's name for its code in a header.

    Raises:
        UnsupportedError: kind `unsupported-digest`.
    """
    name = ALGORITHM_NAMES.get(code)
    if name is None:
        raise UnsupportedError(
            "unknown digest algorithm",
            reason="digest",
            where=where,
            expected="1 (xxh3-128) or 2 (sha256)",
            found=code,
            do="upgrade ckptfmt",
        )
    return name
