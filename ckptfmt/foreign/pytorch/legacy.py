"""`torch.save` before 1.6: five pickles, then the storages one after another.

Magic number, protocol version, system information, the object, the keys of the storages in their
order; then of each the number of elements (8 bytes, little-endian) and its bytes, which are always
little-endian.
"""

from __future__ import annotations

from typing import Any

from ckptfmt.foreign.base import ForeignTree
from ckptfmt.foreign.mapping import map_file
from ckptfmt.foreign.pickle_machine import illegal
from ckptfmt.foreign.pytorch.dtypes import TorchDtype
from ckptfmt.foreign.pytorch.reading import REASON, StorageTable, corrupt, finish, machine_for
from ckptfmt.foreign.pytorch.storages import Storage, mapped

MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = MAGIC.to_bytes(10, "little")
PROTOCOL = 1001
HEAD_NBYTES = 64
"""Within so many bytes the magic number stands, whatever the pickle's protocol."""


def is_legacy(head: bytes) -> bool:
    """Whether a file's first bytes are those of the format."""
    return head[:1] == b"\x80" and MAGIC_BYTES in head[:HEAD_NBYTES]


def read_legacy(path: str, where: str) -> ForeignTree:
    """The tree of one file."""
    data, nbytes = map_file(path, where, REASON)

    def make(key: str, dtype: TorchDtype, size: int, is_untyped: bool) -> Storage:
        if size > nbytes:
            raise illegal(f"storage {key[:80]} of {size} bytes in a file of {nbytes}")
        return Storage((where, key), dtype, size, f"{where}, storage {key[:80]}")

    storages = StorageTable(make)
    machine = machine_for(data, (0, nbytes), where, file_nbytes=nbytes, storages=storages)
    if machine.load() != MAGIC:
        raise corrupt("another magic number", "magic", where)
    version = machine.load()
    if version != PROTOCOL:
        raise corrupt("an unknown version of the format", "version", where, repr(version)[:80])
    machine.load()  # how long a C int was; nothing here depends on it
    begin = machine.position
    obj = machine.load()
    pickled = machine.position - begin
    keys = machine.load()
    _place(storages, keys, (data, machine.position, nbytes), where)
    return finish(machine, obj, where, nbytes=pickled, metadata={})


def _place(storages: StorageTable, keys: Any, rest: tuple[Any, int, int], where: str) -> None:
    """Say where each storage's bytes are, in the order of the file."""
    data, at, stop = rest
    if type(keys) is not list or any(type(key) not in (str, int) for key in keys):
        raise corrupt("the list of storages is no list of keys", "storages", where)
    names = [str(key) for key in keys]
    if len(set(names)) != len(names) or set(names) != set(storages.found):
        raise corrupt("the list of storages is not that of the object", "storages", where)
    for name in names:
        storage = storages.found[name]
        if at + 8 > stop:
            raise corrupt("the file is cut off", "truncated", storage.where)
        numel = int.from_bytes(data[at : at + 8], "little", signed=True)
        at += 8
        if numel * storage.dtype.itemsize != storage.nbytes:
            raise corrupt("a storage has another length", "storages", storage.where, numel)
        if at + storage.nbytes > stop:
            raise corrupt("the file is cut off", "truncated", storage.where)
        storage.raw = mapped(data, at)
        storage.where = f"{storage.where} [{at}:{at + storage.nbytes})"
        at += storage.nbytes
