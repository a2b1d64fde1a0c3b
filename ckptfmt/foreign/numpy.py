"""NumPy's `.npy` and `.npz`: arrays are views of the mapped file; deflated ones are inflated as a
stream. Nothing is unpickled.
"""

from __future__ import annotations

import mmap
import os
import zlib
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptfmt.errors import CheckpointError, UnsupportedError
from ckptfmt.foreign.base import ForeignTensor, ForeignTree, Importer, tree_of
from ckptfmt.foreign.file_map import view
from ckptfmt.foreign.inflating import Inflater
from ckptfmt.foreign.mapping import map_file
from ckptfmt.foreign.npy import HEAD_NBYTES_MAX, MAGIC, REASON, npy_tensor, parse_npy
from ckptfmt.foreign.tree_record import RECORD_KEY, RECORD_NBYTES_MAX, with_record
from ckptfmt.foreign.zip_archive import MAGIC as ZIP_MAGIC
from ckptfmt.foreign.zip_archive import StoredEntry, ZipArchive, ZipEntry

FORMAT = "numpy"
SUFFIX = ".npy"
RECORD_MAGIC = RECORD_KEY.encode() + b"\0"
_FORTRAN_NBYTES_MAX = 256 << 20


class NumpyImporter(Importer):
    """Row `numpy` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        if not os.path.isfile(path):  # a FIFO would wait for a writer
            return False
        try:
            with open(path, "rb") as file:
                head = file.read(len(MAGIC))
            if not head.startswith(ZIP_MAGIC):
                return head == MAGIC
            entries = ZipArchive(os.path.realpath(path), path, REASON).entries
        except (CheckpointError, OSError):
            return False
        return bool(entries) and all(name.endswith(SUFFIX) for name in entries)

    def read(self, path: str) -> ForeignTree:
        where = os.path.basename(path)
        data, nbytes = map_file(os.path.realpath(path), where, REASON)
        if data[: len(ZIP_MAGIC)] == ZIP_MAGIC or data[:4] == b"PK\5\6":
            return _read_npz(ZipArchive(os.path.realpath(path), where, REASON))
        header = parse_npy(data[:HEAD_NBYTES_MAX], nbytes, where)
        read = partial(_view, data, 0)
        return tree_of(
            npy_tensor(header, read, f"{where}[{header.start}:{nbytes})", is_mapped=True), FORMAT
        )


def _view(data: mmap.mmap, base: int, start: int, nbytes: int) -> NDArray[np.uint8]:
    return view(data, base + start, nbytes)


def _read_npz(archive: ZipArchive) -> ForeignTree:
    """The arrays by their names, as `numpy.load` has them."""
    root: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    text = _record(archive)
    for entry in archive.entries.values():
        if entry.name == RECORD_KEY + SUFFIX and text is not None:
            continue
        if not entry.name.endswith(SUFFIX):
            skipped[entry.name] = "an entry that is no array"
            continue
        try:
            root[entry.name.removesuffix(SUFFIX)] = _entry_tensor(archive, entry)
        except UnsupportedError as error:
            skipped[entry.name.removesuffix(SUFFIX)] = f"{error.what}: {error.found}"
    return with_record(
        tree_of(root, FORMAT, nbytes=archive.nbytes, skipped=skipped), archive.where, text
    )


def _record(archive: ZipArchive) -> str | None:
    """What an export of ours has to say beside, in the archive's comment or in an entry."""
    data = archive.comment
    entry = archive.entries.get(RECORD_KEY + SUFFIX)
    if entry is not None and archive.is_stored(entry):
        data = archive.read(entry, RECORD_NBYTES_MAX)
        data = data[max(0, data.find(RECORD_MAGIC)) :]
    if not data.startswith(RECORD_MAGIC):
        return None
    inflater = zlib.decompressobj()
    try:
        made = inflater.decompress(data[len(RECORD_MAGIC) :], RECORD_NBYTES_MAX)
        if inflater.eof:
            return made.decode()
    except (zlib.error, UnicodeDecodeError):
        pass
    raise archive.corrupt("the record of the tree is damaged, or too long", "record")


def _entry_tensor(archive: ZipArchive, entry: ZipEntry) -> ForeignTensor:
    where = f"{archive.where}, entry {ascii(entry.name)[:200]}"
    if archive.is_stored(entry):
        stored = StoredEntry(archive, entry)
        head = archive.data[stored.start : stored.start + min(entry.nbytes, HEAD_NBYTES_MAX)]
        header = parse_npy(head, entry.nbytes, where)
        return npy_tensor(header, stored.read, where, is_mapped=True)
    head = Inflater(archive, entry).read(0, min(entry.nbytes, HEAD_NBYTES_MAX)).tobytes()
    header = parse_npy(head, entry.nbytes, where)
    if header.is_fortran and entry.nbytes > _FORTRAN_NBYTES_MAX:
        raise UnsupportedError(
            "a deflated array in Fortran order, of over 256 MiB",
            reason=f"{REASON}-order",
            where=where,
            found=f"{entry.nbytes} bytes",
        )
    return npy_tensor(header, Inflater(archive, entry).read, where, is_mapped=False)
