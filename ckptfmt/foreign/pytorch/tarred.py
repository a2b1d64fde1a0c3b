"""`torch.save` before 0.1.10: a tar archive of `sys_info`, `pickle`, `tensors` and `storages`.

`storages` and `tensors` are pickles with raw bytes between them; `pickle` is the object, which
refers to tensors and storages by number.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

from ckptfmt.errors import CheckpointError
from ckptfmt.foreign.base import ForeignTree
from ckptfmt.foreign.mapping import map_file
from ckptfmt.foreign.pickle_builders import need, typed
from ckptfmt.foreign.pickle_machine import Global, PickleMachine, illegal
from ckptfmt.foreign.pytorch.builders import Rebuild
from ckptfmt.foreign.pytorch.dtypes import storage_dtype
from ckptfmt.foreign.pytorch.reading import REASON, corrupt, finish
from ckptfmt.foreign.pytorch.storages import Storage, mapped
from ckptfmt.foreign.pytorch.tensors import NDIM_MAX, Strided

BLOCK = 512
MEMBERS = ("sys_info", "pickle", "tensors", "storages")
_ENTRIES_MAX = 1000


def is_tar(head: bytes) -> bool:
    """Whether a file's first block is that of such an archive."""
    name = head[:100].rstrip(b"\0").removeprefix(b"./").decode("latin-1")
    return len(head) >= BLOCK and name in MEMBERS and head[257:262] == b"ustar"


def read_tar(path: str, where: str) -> ForeignTree:
    """The tree of one file."""
    data, nbytes = map_file(path, where, REASON)
    spans = _members(data, nbytes, where)
    missing = [name for name in MEMBERS[1:] if name not in spans]
    if missing:
        raise corrupt("an archive without its parts", "archive", where, ", ".join(missing))
    rebuild = Rebuild(nbytes)
    builders = rebuild.builders()
    objects: dict[int, Any] = {}

    def persistent(key: Any) -> Any:
        if type(key) is tuple:
            return typed(key[0], Global)
        return objects[int(typed(key, int, str))]

    def machine(name: str) -> PickleMachine:
        return PickleMachine(
            data,
            *spans[name],
            where=f"{where}, {name}",
            reason=REASON,
            builders=builders,
            persistent=persistent,
        )

    try:
        _read_storages(machine("storages"), objects)
        _read_tensors(machine("tensors"), objects, rebuild)
    except CheckpointError as error:
        if error.where:
            raise
        raise corrupt("malformed tensors or storages", "archive", where, error.what) from error
    except (ValueError, TypeError, KeyError, OverflowError, struct.error) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise corrupt("malformed tensors or storages", "archive", where, found) from error
    main = machine("pickle")
    obj = main.load()
    start, stop = spans["pickle"]
    return finish(main, obj, where, nbytes=stop - start, metadata={})


def _members(data: mmap.mmap, nbytes: int, where: str) -> dict[str, tuple[int, int]]:
    """Name -> the bytes of each plain file."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for _ in range(_ENTRIES_MAX):
        head = data[at : at + BLOCK]
        if len(head) < BLOCK or not head.strip(b"\0"):
            return found
        size = head[124:136].strip(b" \0")
        total = sum(head[:148]) + 8 * 32 + sum(head[156:])
        check = head[148:156].strip(b" \0")
        good = all(0x30 <= c <= 0x37 for c in size + check) and size and check
        if not good or int(check, 8) != total or at + BLOCK + int(size, 8) > nbytes:
            raise corrupt("a header of the archive is malformed", "archive", f"{where}, byte {at}")
        start, length = at + BLOCK, int(size, 8)
        name = head[:100].rstrip(b"\0").removeprefix(b"./").decode("latin-1")
        if name in MEMBERS and head[156:157] in (b"0", b"\0"):
            if name in found:
                raise corrupt("a name stands twice", "duplicate-name", where, name)
            found[name] = start, start + length
        at = start + -(-length // BLOCK) * BLOCK
    raise corrupt("too many entries", "limit", where)


def _read_storages(machine: PickleMachine, objects: dict[int, Any]) -> None:
    for _ in range(typed(machine.load(), int)):
        key, _location, kind = typed(machine.load(), tuple)
        found = storage_dtype(typed(kind, Global).name)
        if found is None:
            raise illegal(f"the storage {kind.name[:80]}")
        dtype, at = found[0], machine.position
        numel = int.from_bytes(machine.take(8), "little", signed=True)
        need(numel >= 0, "a negative length")
        machine.skip(numel * dtype.itemsize)
        nbytes = numel * dtype.itemsize
        where = f"{machine.where}, storage {typed(key, int)}"
        raw = mapped(machine.data, at + 8)
        objects[key] = Storage((machine.where, key), dtype, nbytes, where, raw=raw)
    for view in typed(machine.load(), list, tuple):
        target, root, offset, numel = (typed(n, int) for n in view)
        whole = typed(objects[root], Storage)
        start, nbytes = offset * whole.dtype.itemsize, numel * whole.dtype.itemsize
        need(offset >= 0 and numel >= 0 and start + nbytes <= whole.nbytes, "a view of a storage")
        objects[target] = whole.part(start, nbytes)


def _read_tensors(machine: PickleMachine, objects: dict[int, Any], rebuild: Rebuild) -> None:
    for _ in range(typed(machine.load(), int)):
        key, storage, _kind = typed(machine.load(), tuple)
        (ndim,) = struct.unpack("<i", machine.take(4))
        machine.skip(4)
        need(0 <= ndim <= NDIM_MAX, f"{ndim} dimensions")
        size = struct.unpack(f"<{ndim}q", machine.take(8 * ndim))
        stride = struct.unpack(f"<{ndim}q", machine.take(8 * ndim))
        (offset,) = struct.unpack("<q", machine.take(8))
        whole = typed(objects[typed(storage, int)], Storage)
        tensor = Strided(whole, whole.dtype, offset, size, stride)
        objects[typed(key, int)] = rebuild.counted(tensor)
