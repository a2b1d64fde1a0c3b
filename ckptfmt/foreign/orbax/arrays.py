"""Arrays of one item, opened through tensorstore, which sees nothing but the item's folder."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.errors import CheckpointError, CorruptError
from ckptfmt.foreign.base import ForeignTensor
from ckptfmt.foreign.mapping import check_bools, check_whole_chunk, numel
from ckptfmt.foreign.mapping import corrupt as damage
from ckptfmt.foreign.orbax.large_chunks import LargeChunks, parse_layout
from ckptfmt.format import Dtype, dtype_named, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.foreign.streaming import BoxReader

REASON = "orbax"
OCDBT, ZARR, ZARR3 = "manifest.ocdbt", ".zarray", "zarr.json"
_FILES_MAX = 1 << 20
_RATIO_MAX, _NBYTES_FREE = 1 << 14, 64 << 20
"""An array larger than that beside its folder is no array that anyone has written."""
_BOX_CHUNK_NBYTES_MAX = 64 << 20
_NDIM_MAX = 32
_OPENINGS_MAX = 256

corrupt = partial(damage, REASON)


@contextmanager
def guarded(where: str) -> Iterator[None]:
    """Whatever the library raises of a damaged checkpoint is one typed error."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CorruptError(
            "tensorstore refuses the array",
            reason=f"{REASON}-array",
            where=where,
            found=f"{type(error).__name__}: {error}"[:300],
            do="get the checkpoint again",
        ) from error


def check_folder(folder: str, where: str) -> int:
    """Bytes of all files of a folder; links that lead out and what is no file are refused."""
    root = os.path.realpath(folder)
    total = count = 0
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            count += 1
            if count > _FILES_MAX:
                raise corrupt("too many files", "limit", where, count)
            at = f"{where}/{os.path.relpath(path, root)}"
            if stat.S_ISLNK(status.st_mode):
                raise corrupt("a link in a checkpoint", "link", at)
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                raise corrupt("not a regular file", "file-type", at)
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


class Arrays:
    """The arrays of one item, by name.

    Args:
        folder: Without links in its path; checked.
        nbytes: Of all its files.
        is_complete: Every chunk is stored; else those that are not hold zeros.
    """

    def __init__(self, folder: str, where: str, *, nbytes: int, is_complete: bool) -> None:
        import tensorstore

        self._ts, self._folder, self.where = tensorstore, folder, where
        self._limit = _NBYTES_FREE + _RATIO_MAX * nbytes
        self._is_complete = is_complete
        self.is_ocdbt = os.path.isfile(os.path.join(folder, OCDBT))
        # Each of the library's threads keeps what it has freed, 40 MB: of a gigabyte in chunks of
        # 4 MiB a conversion had 550 MB with 2 and 32 threads, 380 to 410 with these.
        self._context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": 32 << 20},
                "data_copy_concurrency": {"limit": 1},
                "file_io_concurrency": {"limit": 2},
            }
        )

    def names(self) -> list[str]:
        """The names of all arrays, by listing."""
        with guarded(self.where):
            kvstore = self._ts.KvStore.open(self._kvstore(""), context=self._context).result()
            keys = [key.decode("utf-8") for key in kvstore.list().result()]
        ends = (f"/{ZARR}", f"/{ZARR3}")
        return sorted({key.rpartition("/")[0] for key in keys if key.endswith(ends)})

    def _kvstore(self, path: str) -> dict[str, Any]:
        base = {"driver": "file", "path": f"{self._folder}/"}
        if self.is_ocdbt:
            return {"driver": "ocdbt", "base": base, "path": path}
        return {"driver": "file", "path": f"{self._folder}/{path}"}

    def opened(self, names: Iterable[str], *, is_zarr3: bool) -> Iterator[ForeignTensor | str]:
        """`finish` of each, in order. Of many a few are begun at a time, so that the first that is
        not there ends it."""
        waiting: deque[tuple[str, Any]] = deque()
        for name in names:
            waiting.append((name, self.begin(name, is_zarr3=is_zarr3)))
            if len(waiting) == _OPENINGS_MAX:
                yield self.finish(*waiting.popleft())
        while waiting:
            yield self.finish(*waiting.popleft())

    def begin(self, name: str, *, is_zarr3: bool) -> Any:
        """Start to open an array; `finish` waits for it, so that many are opened at a time."""
        parts = name.split("/")
        if not name or "\0" in name or ".." in parts or name[0] == "/":
            raise corrupt("a name that leads elsewhere", "name", self.where, ascii(name)[:80])
        spec = {
            "driver": "zarr3" if is_zarr3 else "zarr",
            "kvstore": self._kvstore(f"{name}/"),
            "recheck_cached_data": "open",
            "recheck_cached_metadata": "open",
            "fill_missing_data_reads": not self._is_complete,
        }
        with guarded(f"{self.where}, {ascii(name)[:200]}"):
            return self._ts.open(spec, read=True, open=True, context=self._context)

    def finish(self, name: str, opening: Any) -> ForeignTensor | str:
        """The lazy tensor, or why it is not carried."""
        where = f"{self.where}, {ascii(name)[:200]}"
        with guarded(where):
            store = opening.result()
            shape: tuple[int, ...] = tuple(map(int, store.shape))
            chunk: tuple[int, ...] = tuple(map(int, store.chunk_layout.read_chunk.shape or ()))
            kind = str(store.dtype.name)
        found = dtype_named(kind)
        if found is None or found.is_variable:
            return f"the dtype {kind}, which no checkpoint has"
        if len(shape) > _NDIM_MAX or min((0, *shape)) < 0:
            raise corrupt("not a shape", "shape", where, shape[:8])
        size = found.itemsize
        if max(numel(shape), numel(chunk)) * size > self._limit:
            raise corrupt("an array of an impossible size", "size", where, shape[:8])
        read = partial(_read, store, found.name, where)
        box: BoxReader | None = read if shape and numel(shape) else None
        if numel(chunk) * size > _BOX_CHUNK_NBYTES_MAX and box is not None:
            with guarded(where):
                box = _box_of_large_chunks(store, found, where, read)
            if box is None:
                check_whole_chunk(numel(chunk) * size, REASON, where)
        return ForeignTensor(
            *("", "", found.name, shape, -(-numel(shape) * found.bits // 8), where),
            fetch=partial(read, tuple(slice(0, n) for n in shape)),
            must_check=found.name == "bool",
            box=box,
        )


def _box_of_large_chunks(store: Any, dtype: Dtype, where: str, read: BoxReader) -> BoxReader | None:
    """Reads boxes without decoding a chunk whole; None where only tensorstore can."""
    layout = parse_layout(store.spec().to_json())
    if layout is None or dtype.bits % 8:
        return None
    chunks = LargeChunks(store.kvstore, layout, dtype, where, read)

    def box(sides: tuple[slice, ...]) -> NDArray[Any]:
        with guarded(where):
            made = chunks.box(sides)
        return _checked(made, dtype.name, where)

    return box


def _read(store: Any, name: str, where: str, sides: tuple[slice, ...]) -> NDArray[Any]:
    with guarded(where):
        array = np.asarray(store[sides].read().result() if sides else store.read().result())
    found = dtype_named(name)
    assert found is not None
    made = np.ascontiguousarray(array).view(numpy_dtype(found))
    made = made.reshape(tuple(side.stop - side.start for side in sides))
    return _checked(made, name, where)


def _checked(made: NDArray[Any], name: str, where: str) -> NDArray[Any]:
    if name == "bool" and made.size:
        check_bools(np.ascontiguousarray(made).reshape(-1).view(np.uint8), REASON, where)
    return made
