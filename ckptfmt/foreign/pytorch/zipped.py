"""`torch.save` since 1.6: a ZIP archive with `data.pkl`, and an entry for each storage.

Entries are stored, so that tensors are views of the mapped file. `byteorder` says how their bytes
stand; without it they are little-endian.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfmt.foreign.base import ForeignTree
from ckptfmt.foreign.inflating import Inflater
from ckptfmt.foreign.pickle_machine import PICKLE_NBYTES_MAX, PickleMachine, illegal
from ckptfmt.foreign.pytorch.dtypes import TorchDtype
from ckptfmt.foreign.pytorch.reading import REASON, StorageTable, corrupt, finish, machine_for
from ckptfmt.foreign.pytorch.storages import Raw, Storage, mapped
from ckptfmt.foreign.tree_record import RECORD_KEY, RECORD_NBYTES_MAX, with_record
from ckptfmt.foreign.zip_archive import ZipArchive, ZipEntry

if TYPE_CHECKING:
    pass

PICKLE = "data.pkl"
_WORD_NBYTES_MAX = 64


class TorchArchive:
    """A ZIP archive of torch, whose entries all stand below one folder."""

    def __init__(self, archive: ZipArchive) -> None:
        self.zip, where = archive, archive.where
        self.where = where
        folder = folder_of(self.zip.entries)
        if folder is None:
            raise corrupt("no data.pkl, or several", "archive", where)
        self.folder = folder
        order = self.word("byteorder") or b"little"
        if order not in (b"little", b"big"):
            raise corrupt("an unknown byte order", "byteorder", where, ascii(order)[:80])
        self.is_swapped = order == b"big"

    def entry(self, name: str) -> ZipEntry | None:
        return self.zip.entries.get(self.folder + name)

    def word(self, name: str) -> bytes | None:
        """The bytes of a short record."""
        entry = self.entry(name)
        return None if entry is None else self.zip.read(entry, _WORD_NBYTES_MAX).strip()

    def pickle(self, name: str) -> bytes | None:
        """The bytes of a pickle."""
        entry = self.entry(name)
        return None if entry is None else self.zip.read(entry, PICKLE_NBYTES_MAX)

    def record(self) -> str | None:
        """What an export of ours has to say beside."""
        entry = self.entry(RECORD_KEY)
        if entry is None:
            return None
        return self.zip.read(entry, RECORD_NBYTES_MAX).decode("utf-8", "replace")

    def storages(self, below: str) -> StorageTable:
        """The storages in a folder of the archive: `data/0`, ..."""
        return StorageTable(partial(self._storage, below))

    def _storage(
        self, below: str, key: str, dtype: TorchDtype, nbytes: int, is_untyped: bool
    ) -> Storage:
        entry = self.entry(f"{below}/{key}")
        if entry is None:
            raise illegal(f"no entry for storage {key[:80]}")
        if entry.nbytes != nbytes:
            raise illegal(f"storage {key[:80]} has {entry.nbytes} bytes, not {nbytes}")
        raw: Raw
        is_stored = self.zip.is_stored(entry)
        if is_stored:
            raw = mapped(self.zip.data, self.zip.start_of(entry))
        else:
            raw = Inflater(self.zip, entry).read
        where = f"{self.where}, entry {ascii(entry.name)[1:201].rstrip(chr(39))}"
        return Storage(
            (self.where, entry.name),
            dtype,
            nbytes,
            where,
            raw=raw,
            swapped=self.is_swapped,
            is_untyped=is_untyped,
            is_inflated=not is_stored,
        )


def folder_of(entries: dict[str, ZipEntry]) -> str | None:
    """The one folder that holds `data.pkl`, with its slash; None if there is none, or several."""
    found = [name.removesuffix(PICKLE) for name in entries if name.endswith("/" + PICKLE)]
    top = [folder for folder in found if folder.count("/") == 1]
    return top[0] if len(top) == 1 else None


def read_zip(path: str, where: str) -> ForeignTree:
    """The tree of one file of `torch.save`, or of `torch.jit.save`."""
    archive = TorchArchive(ZipArchive(path, where, REASON))
    if archive.entry("constants.pkl") is not None:
        from ckptfmt.foreign.pytorch.script import read_script

        return read_script(archive)
    machine, obj, nbytes = read_object(archive)
    tree = finish(machine, obj, where, nbytes=nbytes, metadata={})
    return with_record(tree, where, archive.record())


def read_object(archive: TorchArchive) -> tuple[PickleMachine, Any, int]:
    """The machine that read an archive's pickle, what it made, and the pickle's bytes."""
    data = archive.pickle(PICKLE)
    assert data is not None
    machine = machine_for(
        data,
        (0, len(data)),
        f"{archive.where}, {PICKLE}",
        file_nbytes=archive.zip.nbytes,
        storages=archive.storages("data"),
    )
    return machine, machine.load(), len(data)
