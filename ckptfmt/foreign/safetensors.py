"""`.safetensors`: one file, or a folder whose `*.index.json` names its shards. Our own reader.

Values stay in the mapped file until they are used. Each tensor's name is one dict key, verbatim.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import CorruptError, UnsupportedError, UsageError
from ckptfmt.foreign.base import ForeignTensor, ForeignTree, Importer
from ckptfmt.foreign.file_map import open_map, view
from ckptfmt.foreign.safetensors_header import (
    DTYPES,
    HEADER_NBYTES_MAX,
    LENGTH_NBYTES,
    REASON,
    Entry,
    FileHeader,
    parse_header,
)
from ckptfmt.foreign.tree_record import RECORD_KEY, with_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader

FORMAT = "safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


class SafetensorsImporter(Importer):
    """Row `safetensors` of IMPORTERS."""

    def detect(self, path: str) -> bool:
        try:
            if os.path.isdir(path):
                return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in os.listdir(path))
            if path.endswith(INDEX_SUFFIX):
                return True
            if not os.path.isfile(path):
                # A FIFO would wait for a writer.
                return False
            with open(path, "rb") as file:
                head = file.read(LENGTH_NBYTES + 1)
        except OSError:
            return False
        length = int.from_bytes(head[:LENGTH_NBYTES], "little")
        return head[LENGTH_NBYTES:] == b"{" and 2 <= length <= HEADER_NBYTES_MAX

    def read(self, path: str) -> ForeignTree:
        flat = self._read(path)
        text = flat.metadata.get(RECORD_KEY)
        if not isinstance(text, str):
            return flat
        metadata = {key: value for key, value in flat.metadata.items() if key != RECORD_KEY}
        return with_record(replace(flat, metadata=metadata), os.path.basename(path), text)

    def _read(self, path: str) -> ForeignTree:
        # Imported here: the folder reader needs this module's single files.
        from ckptfmt.foreign.safetensors_folder import read_folder

        if path.endswith(INDEX_SUFFIX):
            return read_folder(os.path.dirname(path) or ".", os.path.basename(path))
        if os.path.isdir(path):
            return self._read_directory(path)
        header, data = read_file(os.path.realpath(path), os.path.basename(path))
        tensors = {t.name: t for t in tensors_of(header.entries, data, os.path.basename(path))}
        return ForeignTree(FORMAT, tensors, metadata=header.metadata, keys=_keys(tensors))

    def _read_directory(self, path: str) -> ForeignTree:
        from ckptfmt.foreign.safetensors_folder import read_folder
        from ckptfmt.foreign.shards import check_inside

        names = sorted(os.listdir(path))
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        if len(indexes) == 1:
            return read_folder(path, indexes[0])
        files = [name for name in names if name.endswith(SUFFIX)]
        if not indexes and len(files) == 1:
            return self._read(check_inside(path, files[0], where=path))
        raise UsageError(
            "the folder does not say what to read",
            reason=f"{REASON}-folder",
            where=path,
            expected=f"one *{INDEX_SUFFIX}, or one *{SUFFIX}",
            found=", ".join(indexes or files)[:500] or "neither",
            do="give the file itself",
        )


def _keys(tensors: dict[str, ForeignTensor]) -> dict[str, tuple[str, ...]]:
    return {name: (tensor.foreign_name,) for name, tensor in tensors.items()}


def read_file(path: str, where: str) -> tuple[FileHeader, mmap.mmap]:
    """The checked header of one file, and the file mapped. `path` has no links left."""
    data, nbytes = open_map(path, where)
    # An empty file cannot be mapped; the length's own check says what is wrong.
    header = parse_header(b"" if data is None else data, nbytes, where)
    assert data is not None
    return header, data


def tensors_of(entries: list[Entry], data: mmap.mmap, where: str) -> list[ForeignTensor]:
    """Lazy tensors of one mapped file."""
    from ckptfmt.format import escape_key

    made = []
    for entry in entries:
        dtype, bits = DTYPES[entry.dtype]
        at = f"{where}[{entry.start}:{entry.stop})"
        fetch: Callable[[], NDArray[Any]] = partial(_fetch, data, entry, at)
        made.append(
            ForeignTensor(
                name=escape_key(entry.name),
                foreign_name=entry.name,
                dtype=dtype,
                shape=entry.shape,
                nbytes=entry.stop - entry.start,
                where=at,
                fetch=fetch,
                must_check=dtype == "bool" or bits == 6,
                box=_box(data, entry) if bits == 4 and entry.stop > entry.start else None,
            )
        )
    return made


def _halves(raw: NDArray[Any]) -> NDArray[Any]:
    """Two elements a byte, the first in the low bits, as torch.float4_e2m1fn_x2 has them."""
    import numpy as np

    return np.stack([raw & 0xF, raw >> 4], axis=-1).reshape(-1)


def _box(data: mmap.mmap, entry: Entry) -> BoxReader:
    """Reads a box of elements of half a byte, of which `fetch` makes bytes."""
    import ml_dtypes

    from ckptfmt.foreign.flat import box_of_runs

    dtype = getattr(ml_dtypes, DTYPES[entry.dtype][0])

    def run(first: int, last: int) -> NDArray[Any]:
        begin = first // 2
        raw = view(data, entry.start + begin, -(-last // 2) - begin)
        return _halves(raw)[first - 2 * begin : last - 2 * begin].view(dtype)

    return box_of_runs(entry.shape, run)


def _fetch(data: mmap.mmap, entry: Entry, where: str) -> NDArray[Any]:
    import ml_dtypes
    import numpy as np

    name, bits = DTYPES[entry.dtype]
    if bits == 6:
        # Nothing says in which order four 6-bit elements share three bytes: to guess would be to
        # return wrong numbers quietly.
        raise UnsupportedError(
            "the format does not define how 6-bit elements are packed",
            reason=f"{REASON}-dtype",
            where=f"{where}, tensor {ascii(entry.name)[:200]}",
            found=entry.dtype,
            do="convert the tensor to another dtype first",
        )
    raw = view(data, entry.start, entry.stop - entry.start)
    if bits == 4:
        raw = _halves(raw)
    elif name == "bool" and raw.size and raw.max() > 1:
        at = int(np.argmax(raw > 1))
        raise CorruptError(
            "a bool is neither 0 nor 1",
            reason=f"{REASON}-bool",
            where=f"{where}, tensor {ascii(entry.name)[:200]}, element {at}",
            found=int(raw[at]),
            do="get the file again",
        )
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    return raw.view(dtype.newbyteorder("<")).reshape(entry.shape)
