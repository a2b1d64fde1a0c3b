"""Which of torch's formats a file or folder is."""

from __future__ import annotations

import os

from ckptfmt.errors import CheckpointError
from ckptfmt.foreign.base import ForeignTree, Importer, open_regular
from ckptfmt.foreign.pytorch.folder import INDEX_SUFFIX, is_folder, read_directory, read_folder
from ckptfmt.foreign.pytorch.legacy import is_legacy, read_legacy
from ckptfmt.foreign.pytorch.reading import REASON, corrupt
from ckptfmt.foreign.pytorch.tarred import BLOCK, is_tar, read_tar
from ckptfmt.foreign.pytorch.zipped import folder_of, read_zip
from ckptfmt.foreign.zip_archive import MAGIC as ZIP_MAGIC
from ckptfmt.foreign.zip_archive import ZipArchive


class PytorchImporter(Importer):
    """Row `pytorch` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        if os.path.isdir(path):
            return is_folder(_listed(path))
        if path.endswith(INDEX_SUFFIX):
            return True
        if not os.path.isfile(path):
            return False  # a FIFO would wait for a writer
        try:
            head = _head(os.path.realpath(path), path)
            if head.startswith(ZIP_MAGIC):
                archive = ZipArchive(os.path.realpath(path), path, REASON)
                return folder_of(archive.entries) is not None
        except (CheckpointError, OSError):
            return False
        return is_legacy(head) or is_tar(head)

    def read(self, path: str) -> ForeignTree:
        if path.endswith(INDEX_SUFFIX):
            return read_folder(os.path.dirname(path) or ".", os.path.basename(path))
        if os.path.isdir(path):
            return read_directory(path)
        return read_file(os.path.realpath(path), os.path.basename(path))


def read_file(path: str, where: str) -> ForeignTree:
    """The tree of one file, without links left in its path."""
    head = _head(path, where)
    if head.startswith(ZIP_MAGIC):
        return read_zip(path, where)
    if is_legacy(head):
        return read_legacy(path, where)
    if is_tar(head):
        return read_tar(path, where)
    raise corrupt("no file of torch.save", "magic", where, ascii(head[:16]))


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _head(path: str, where: str) -> bytes:
    descriptor, _ = open_regular(path, where)
    try:
        return os.read(descriptor, BLOCK)
    finally:
        os.close(descriptor)
