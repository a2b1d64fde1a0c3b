"""A stored ZIP archive written from begin to end, its entries' bytes aligned, as torch writes it.

Checksums are known only behind the bytes: they follow them in a data descriptor. Sizes of 4 GiB and
more stand in ZIP64 fields.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ckptfmt.foreign.exporters.stream import ExportStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGN_NBYTES = 64
COMMENT_NBYTES_MAX = 0xFFFF
_U32 = 0xFFFFFFFF
_U16 = 0xFFFF
_FLAGS = 1 << 11 | 1 << 3
"""Names are UTF-8; the checksum follows."""
_DATE = 0x21
"""1 January 1980: the same tree makes the same file."""
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_AT = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")


class ZipWriter:
    """Entries one after another to a stream, from where it is; `finish` writes the directory."""

    def __init__(self, stream: ExportStream) -> None:
        self._stream, self._base = stream, stream.position
        self._central: list[bytes] = []

    def add(self, name: str, nbytes: int, pieces: Iterable[NDArray[Any] | bytes]) -> None:
        """An entry of exactly so many bytes."""
        stream, text = self._stream, name.encode()
        header = stream.position - self._base
        large = nbytes >= _U32
        extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if large else b""
        begin = header + _LOCAL.size + len(text) + len(extra) + 4
        padding = -begin % ALIGN_NBYTES
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        size = _U32 if large else 0
        stream.put(
            _LOCAL.pack(
                b"PK\3\4", 45 if large else 20, _FLAGS, 0, 0, _DATE, 0, size, size, len(text),
                len(extra),
            )
        )  # fmt: skip
        stream.put(text + extra)
        crc, start = 0, stream.position
        for piece in pieces:
            if isinstance(piece, bytes):
                stream.put(piece)
                crc = zlib.crc32(piece, crc)
            else:
                crc = stream.put_values(piece, zlib.crc32, crc)
        assert stream.position - start == nbytes
        stream.put(struct.pack("<4sL2Q" if large else "<4s3L", b"PK\7\10", crc, nbytes, nbytes))
        self._central.append(_central(text, crc, nbytes, header))

    def finish(self, comment: bytes = b"") -> None:
        """The central directory and its end, with a comment of at most 65,535 bytes."""
        stream, start = self._stream, self._stream.position - self._base
        stream.put(b"".join(self._central))
        count, nbytes = len(self._central), stream.position - self._base - start
        if count >= _U16 or start >= _U32 or nbytes >= _U32:
            at = stream.position - self._base
            stream.put(
                _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, start)
                + _END64_AT.pack(b"PK\6\7", 0, at, 1)
            )
        few = min(count, _U16)
        end = (few, few, min(nbytes, _U32), min(start, _U32), len(comment))
        stream.put(_END.pack(b"PK\5\6", 0, 0, *end) + comment)


def _central(text: bytes, crc: int, nbytes: int, header: int) -> bytes:
    wide = [n for n in (nbytes, nbytes, header) if n >= _U32]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, version = min(nbytes, _U32), 45 if wide else 20
    row = _CENTRAL.pack(
        b"PK\1\2", version, version, _FLAGS, 0, 0, _DATE, crc, size, size, len(text),
        len(extra), 0, 0, 0, 0, min(header, _U32),
    )  # fmt: skip
    return row + text + extra
