"""Bytes under keys, wherever they are: the local disk, memory, any fsspec URL.

    backend    moves bytes under keys and knows nothing else: no index, no dtype, no codec
    key        a name inside a store, parts joined by `/`: `data/3f9a…`
    object     the bytes under one key; visible whole or not at all
    writer     an object being written: invisible until it is finished

Every backend passes `ckptfmt.testing.BackendSuite`. Spec: 02-store.
"""

from __future__ import annotations

from ckptfmt.storage.base import Backend, Buffer, Capabilities, Entry, Writer
from ckptfmt.storage.failures import from_write_error
from ckptfmt.storage.keys import check_key
from ckptfmt.storage.process import Process, is_abandoned_temporary, temporary_name
from ckptfmt.storage.registry import BACKENDS, open_backend
from ckptfmt.storage.syscalls import exchange_names, sync_directory

__all__ = [
    "BACKENDS",
    "Backend",
    "Buffer",
    "Capabilities",
    "Entry",
    "Process",
    "Writer",
    "check_key",
    "exchange_names",
    "from_write_error",
    "is_abandoned_temporary",
    "open_backend",
    "sync_directory",
    "temporary_name",
]
