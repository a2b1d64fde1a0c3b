"""Which backend serves a URL: the one place to touch for a new one.

A row is scheme -> ("module:Class", what to install). The class is called with the URL and the
keywords `storage_options` and `read_only`. Packages add rows by entry points of the group
`ckptfmt.backends` (name = scheme, value = "module:Class"). Spec: 02-store.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Mapping
from typing import Any

from ckptfmt.errors import MissingExtraError, UsageError
from ckptfmt.storage.base import Backend
from ckptfmt.types import StrPath

_FSSPEC = "ckptfmt.storage.via_fsspec:FsspecBackend"

BACKENDS: dict[str, tuple[str, str]] = {
    "": ("ckptfmt.storage.local:LocalBackend", ""),
    "file": ("ckptfmt.storage.local:LocalBackend", ""),
    "memory": ("ckptfmt.storage.memory:MemoryBackend", ""),
    "s3": (_FSSPEC, 'pip install "ckptfmt[s3]"'),
    "s3a": (_FSSPEC, 'pip install "ckptfmt[s3]"'),
    "gs": (_FSSPEC, 'pip install "ckptfmt[gcs]"'),
    "gcs": (_FSSPEC, 'pip install "ckptfmt[gcs]"'),
    "az": (_FSSPEC, 'pip install "ckptfmt[azure]"'),
    "abfs": (_FSSPEC, 'pip install "ckptfmt[azure]"'),
    "abfss": (_FSSPEC, 'pip install "ckptfmt[azure]"'),
    "adl": (_FSSPEC, 'pip install "ckptfmt[azure]"'),
    # Any other scheme, and `fsspec+<scheme>` for one that has a row of its own (tests).
    "*": (_FSSPEC, ""),
}

# Two characters at least: `C:` is a drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.+-]+)://")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9.+-]*::")


def scheme_of(url: StrPath) -> str:
    """The scheme of a URL in lower case; '' for a path. A path object is always a path."""
    if not isinstance(url, str):
        return ""
    if _CHAIN.match(url):
        return "*"
    match = _SCHEME.match(url)
    if match:
        return match.group(1).lower()
    return "file" if url.startswith("file:/") else ""


def open_backend(
    url: StrPath | Backend,
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = False,
) -> Backend:
    """The backend that serves `url`. Touches neither disk nor network.

    Args:
        url: A path, `file://…`, `memory://NAME`, any URL that fsspec knows, or a backend, which is
            returned as it is (a faulty or wrapped one in tests).
        storage_options: For the backend: credentials, endpoint.
        read_only: Refuse writes, probe nothing.
    Raises:
        UsageError: kind `usage-url`: no backend has this scheme.
        MissingExtraError: The driver of this scheme is not installed.
    """
    if isinstance(url, Backend):
        return url
    if not isinstance(url, str | os.PathLike):
        raise UsageError(
            "not a path or a URL",
            reason="url",
            found=type(url).__name__,
            do="pass where the store is",
        )
    scheme = scheme_of(url)
    row = BACKENDS.get(scheme) or _entry_points().get(scheme) or BACKENDS["*"]
    target, hint = row
    module, _, name = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise missing_driver(scheme, hint, error) from error
    backend = factory(os.fspath(url), storage_options=storage_options or {}, read_only=read_only)
    if not isinstance(backend, Backend):
        raise UsageError(
            "not a backend",
            reason="backend",
            where=target,
            found=type(backend).__name__,
            do="a row of ckptfmt.backends names a subclass of ckptfmt.storage.Backend",
        )
    return backend


def missing_driver(scheme: str, hint: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(
        f"the driver for {scheme}:// is not installed",
        reason="driver",
        found=str(error),
        do=hint or f"install the fsspec driver of {scheme}",
    )


@functools.cache
def _entry_points() -> Mapping[str, tuple[str, str]]:
    # Imported here: it brings the email package along, and a local path needs no plugin.
    from importlib.metadata import entry_points

    found = entry_points(group="ckptfmt.backends")
    return {point.name.lower(): (point.value, "") for point in found}
