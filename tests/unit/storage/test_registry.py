"""Which backend serves a URL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptfmt.errors import UsageError
from ckptfmt.storage import BACKENDS, open_backend, registry
from ckptfmt.storage.local import LocalBackend
from ckptfmt.storage.memory import MemoryBackend
from ckptfmt.storage.registry import scheme_of


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("runs/a", ""),
        ("/runs/a", ""),
        ("C://x", ""),
        ("a:b", ""),
        ("file:///x", "file"),
        ("FILE:///x", "file"),
        ("memory://x", "memory"),
        ("s3://b/x", "s3"),
        ("S3://b/x", "s3"),
        ("fsspec+memory://x", "fsspec+memory"),
        ("simplecache::s3://b/x", "*"),
        (Path("s3://b/x"), ""),
    ],
)
def test_a_scheme_is_what_stands_before_two_slashes(url: str | Path, scheme: str) -> None:
    assert scheme_of(url) == scheme


def test_a_backend_is_opened_as_it_is() -> None:
    backend = MemoryBackend()
    assert open_backend(backend) is backend


def test_an_installed_package_adds_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"mine": ("ckptfmt.storage.memory:MemoryBackend", "")}
    monkeypatch.setattr(registry, "_entry_points", lambda: rows)
    assert isinstance(open_backend("mine://x"), MemoryBackend)


def test_a_row_that_is_no_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "mine", ("unittest.mock:Mock", ""))
    with pytest.raises(UsageError):
        open_backend("mine://x")


def test_every_row_names_a_class_that_exists() -> None:
    import importlib

    for target, _ in BACKENDS.values():
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name)


def test_a_local_store_loads_no_driver() -> None:
    program = (
        "import sys; from ckptfmt.storage import open_backend; open_backend('x');"
        "print([m for m in ('fsspec', 's3fs', 'numpy', 'ctypes', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    assert isinstance(open_backend("x"), LocalBackend)
