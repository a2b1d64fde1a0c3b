"""ZIP archives from strangers, mapped in place: stored entries are views, deflated ones bounded.

The central directory decides what there is; each local header must agree with it. Refused: names
that lead out or stand twice, entries that overlap or leave the file, encryption, other methods, and
sizes that no deflate stream can have.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptfmt.errors import CorruptError, UnsupportedError
from ckptfmt.foreign.file_map import is_locating, open_map, view

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENTRIES_MAX = 4 << 20
INFLATED_NBYTES_MAX = 1 << 30
MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")
_END64_AT = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_RATIO_MAX = 1032
"""Deflate makes no more than this of a byte."""
_STORED, _DEFLATED = 0, 8
_CHECK_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One entry: `header` is where its local header stands; sizes are in bytes."""

    name: str
    method: int
    flags: int
    crc: int
    stored: int
    nbytes: int
    header: int


class ZipArchive:
    """An archive, its directory checked.

    Args:
        path: Without links at its last step, unless the caller resolved them.
        where: The file's name, for messages.
        reason: Prefix of the errors' reasons.
    Raises:
        CorruptError: It is no ZIP archive, or a damaged or hostile one.
    """

    def __init__(self, path: str, where: str, reason: str) -> None:
        self.where, self.reason, self._base = where, reason, 0
        self.comment = b""
        data, self.nbytes = open_map(path, where)
        if data is None or self.nbytes < _END.size:
            raise self.corrupt("too short for a ZIP archive", "zip")
        self.data: mmap.mmap = data
        self.entries = self._read_directory()
        self._check_overlap()

    @classmethod
    def within(cls, data: mmap.mmap, span: tuple[int, int], where: str, reason: str) -> ZipArchive:
        """An archive that lies in data[start:stop), as one of several in a file."""
        made = cls.__new__(cls)
        made.where, made.reason, made.data = where, reason, data
        made._base, made.nbytes = span[0], span[1] - span[0]
        if made.nbytes < _END.size:
            raise made.corrupt("too short for a ZIP archive", "zip")
        made.entries = made._read_directory()
        made._check_overlap()
        return made

    def corrupt(self, what: str, reason: str, name: str = "", found: object = None) -> CorruptError:
        where = f"{self.where}, entry {ascii(name)[:200]}" if name else self.where
        return CorruptError(
            what,
            reason=f"{self.reason}-{reason}",
            where=where,
            found=found,
            do="get the file again",
        )

    # -- the directory

    def _end(self) -> tuple[int, int, int]:
        """(entries, where the directory starts, its bytes)."""
        base = self._base
        begin = base + max(0, self.nbytes - _END.size - 65535)
        at = self.data.rfind(b"PK\5\6", begin, base + self.nbytes) - base
        if at < 0 or at + _END.size > self.nbytes:
            raise self.corrupt("no end of a ZIP directory: cut off?", "zip-truncated")
        _, disk, first, here, count, nbytes, start, comment = _END.unpack_from(self.data, base + at)
        if at + _END.size + comment != self.nbytes or disk or first or here != count:
            raise self.corrupt("the end of the ZIP directory is malformed", "zip")
        self.comment = self._bytes(at + _END.size, comment)
        if at >= _END64_AT.size:
            mark, disk, at64, disks = _END64_AT.unpack_from(self.data, base + at - _END64_AT.size)
            if mark == b"PK\6\7":
                if disk or disks != 1 or at64 + _END64.size > at:
                    raise self.corrupt("the end of the ZIP directory is malformed", "zip")
                mark, _, _, _, disk, first, here, count, nbytes, start = _END64.unpack_from(
                    self.data, base + at64
                )
                if mark != b"PK\6\6" or disk or first or here != count:
                    raise self.corrupt("the end of the ZIP directory is malformed", "zip")
        if start + nbytes > at:
            raise self.corrupt("the ZIP directory leaves the file", "zip-truncated")
        if count > ENTRIES_MAX or count * _CENTRAL.size > nbytes:
            raise self.corrupt("the ZIP directory claims too many entries", "limit", found=count)
        return count, start, nbytes

    def _read_directory(self) -> dict[str, ZipEntry]:
        count, at, nbytes = self._end()
        stop, found = at + nbytes, {}
        for _ in range(count):
            entry, at = self._central(at, stop)
            if entry.name in found:
                raise self.corrupt("a name stands twice", "duplicate-name", entry.name)
            found[entry.name] = entry
        return found

    def _central(self, at: int, stop: int) -> tuple[ZipEntry, int]:
        if at + _CENTRAL.size > stop:
            raise self.corrupt("the ZIP directory is cut off", "zip-truncated")
        row = _CENTRAL.unpack_from(self.data, self._base + at)
        mark, flags, method, crc, stored, nbytes = row[0], row[3], row[4], *row[7:10]
        name_nbytes, extra_nbytes, comment_nbytes, header = *row[10:13], row[16]
        at += _CENTRAL.size
        end = at + name_nbytes + extra_nbytes + comment_nbytes
        if mark != b"PK\1\2" or end > stop:
            raise self.corrupt("the ZIP directory is malformed", "zip")
        try:
            name = self._bytes(at, name_nbytes).decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt("a name is not UTF-8", "zip-name") from None
        self._check_name(name)
        extra = self._bytes(at + name_nbytes, extra_nbytes)
        nbytes, stored, header = self._wide(extra, nbytes, stored, header)
        if flags & 0x2041 or method not in (_STORED, _DEFLATED):
            raise UnsupportedError(
                "an entry is encrypted or compressed by another method than deflate",
                reason=f"{self.reason}-zip",
                where=f"{self.where}, entry {ascii(name)[:200]}",
                found=f"flags {flags:#x}, method {method}",
                do="pack it again without",
            )
        if method == _STORED and stored != nbytes:
            raise self.corrupt("a stored entry has two sizes", "zip", name)
        if method == _DEFLATED and nbytes > _RATIO_MAX * stored + 64:
            raise self.corrupt("a deflated entry claims an impossible size", "zip-bomb", name)
        if header + _LOCAL.size + stored > self.nbytes:
            raise self.corrupt("an entry leaves the file", "zip-truncated", name)
        return ZipEntry(name, method, flags, crc, stored, nbytes, header), end

    def _wide(self, extra: bytes, nbytes: int, stored: int, header: int) -> tuple[int, int, int]:
        """Sizes and offset, from the ZIP64 field where they are too large for 32 bits."""
        values = [nbytes, stored, header]
        wide = [at for at, value in enumerate(values) if value == 0xFFFFFFFF]
        at = 0
        while wide and at + 4 <= len(extra):
            kind, size = struct.unpack_from("<HH", extra, at)
            if kind == 1 and size >= 8 * len(wide) and at + 4 + size <= len(extra):
                for place, value in enumerate(struct.unpack_from(f"<{len(wide)}Q", extra, at + 4)):
                    values[wide[place]] = value
                break
            at += 4 + size
        return values[0], values[1], values[2]

    def _check_name(self, name: str) -> None:
        parts = name.split("/")
        drive = len(parts[0]) > 1 and parts[0][1] == ":"
        if not name or "\0" in name or "\\" in name or name[0] == "/" or drive or ".." in parts:
            raise self.corrupt("a name that leads out of the archive", "zip-name", name or "''")

    def _check_overlap(self) -> None:
        end, before = 0, ""
        for entry in sorted(self.entries.values(), key=lambda e: e.header):
            if entry.header < end:
                found = f"with {ascii(before)[:200]}"
                raise self.corrupt("two entries overlap", "zip-overlap", entry.name, found)
            end = entry.header + _LOCAL.size + len(entry.name.encode()) + entry.stored
            before = entry.name

    # -- entries

    def start_of(self, entry: ZipEntry) -> int:
        """Where an entry's stored bytes begin in `data`; its local header agrees with the directory."""
        row = _LOCAL.unpack_from(self.data, self._base + entry.header)
        mark, flags, method, stored, nbytes = row[0], row[2], row[3], *row[7:9]
        name_nbytes, extra_nbytes = row[9:11]
        at = entry.header + _LOCAL.size
        name = self._bytes(at, name_nbytes)
        start = int(at + name_nbytes + extra_nbytes)
        agrees = (
            mark == MAGIC
            and name == entry.name.encode()
            and method == entry.method
            and flags & 0x2041 == 0
            # With bit 3 the sizes stand behind the data; 32 ones mean the ZIP64 field.
            and (flags & 8 or stored in (entry.stored, 0xFFFFFFFF))
            and (flags & 8 or nbytes in (entry.nbytes, 0xFFFFFFFF))
        )
        if not agrees or start + entry.stored > self.nbytes:
            raise self.corrupt("a local header differs from the directory", "zip", entry.name)
        return self._base + start

    def _bytes(self, at: int, nbytes: int) -> bytes:
        return self.data[self._base + at : self._base + at + nbytes]

    def read(self, entry: ZipEntry, nbytes_max: int = INFLATED_NBYTES_MAX) -> bytes:
        """All bytes of an entry, which is no longer than `nbytes_max`."""
        if entry.nbytes > nbytes_max:
            raise self.corrupt("an entry is too long", "limit", entry.name, f"{entry.nbytes} bytes")
        start = self.start_of(entry)
        if entry.method == _STORED:
            return self.data[start : start + entry.stored]
        raw = memoryview(self.data)[start : start + entry.stored]
        inflater = zlib.decompressobj(-15)
        try:
            made = inflater.decompress(raw, entry.nbytes + 1)
        except zlib.error as error:
            raise self.corrupt(
                "a deflated entry is damaged", "zip-deflate", entry.name, str(error)
            ) from error
        if len(made) != entry.nbytes or not inflater.eof or zlib.crc32(made) != entry.crc:
            raise self.corrupt(
                "a deflated entry is not what its header says", "zip-deflate", entry.name
            )
        return made

    def is_stored(self, entry: ZipEntry) -> bool:
        return entry.method == _STORED


class StoredEntry:
    """The bytes of a stored entry, in place. Its CRC-32 is compared before the first are given."""

    def __init__(self, archive: ZipArchive, entry: ZipEntry) -> None:
        self._zip, self._entry = archive, entry
        self.start = archive.start_of(entry)
        self._is_checked = is_locating()

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes [start, start + nbytes), which lie in the entry.

        Raises:
            CorruptError: The entry is not what its checksum says.
        """
        self.check()
        return view(self._zip.data, self.start + start, nbytes)

    def check(self) -> None:
        """Read all of it once, if nobody has."""
        if self._is_checked:
            return
        entry, crc = self._entry, 0
        for at in range(0, entry.nbytes, _CHECK_NBYTES):
            nbytes = min(_CHECK_NBYTES, entry.nbytes - at)
            crc = zlib.crc32(view(self._zip.data, self.start + at, nbytes).data, crc)
        if crc != entry.crc:
            found = f"CRC-32 {crc:08x}, not {entry.crc:08x}"
            raise self._zip.corrupt("an entry is damaged", "zip-crc", entry.name, found)
        self._is_checked = True
