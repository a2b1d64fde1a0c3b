"""An S3 server on loopback, and drivers that promise less than they should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ckptfmt.testing import S3Server, serve_s3


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serve_s3() as server:
        yield server


@pytest.fixture(scope="session")
def foil() -> str:
    """Scheme of a driver that takes `mode="create"` and overwrites all the same."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class FoilFileSystem(MemoryFileSystem):
        protocol = "foil"
        store: dict[str, Any] = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            path = path.removeprefix("foil://").strip("/")
            return f"/{path}" if path else ""

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
            super().pipe_file(path, value, mode="overwrite")

    fsspec.register_implementation("foil", FoilFileSystem, clobber=True)
    return "foil"


@pytest.fixture(scope="session")
def looker() -> str:
    """Scheme of a driver with fsspec's default `mode="create"`: look, then write."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.spec import AbstractFileSystem

    class LookerFileSystem(MemoryFileSystem):
        protocol = "looker"
        store: dict[str, Any] = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012
        pipe_file = AbstractFileSystem.pipe_file

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            path = path.removeprefix("looker://").strip("/")
            return f"/{path}" if path else ""

    fsspec.register_implementation("looker", LookerFileSystem, clobber=True)
    return "looker"
