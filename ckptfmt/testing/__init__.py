"""Tools to test what is built on ckptfmt: a suite for backends, a backend that fails on purpose.

BackendSuite     the contract of a backend as a pytest class: subclass it, give it a fixture
FaultyBackend    wraps a backend; fails, kills, delays, reorders or forgets at operation k
Operation        one counted operation: its number, kind and key
difference       where two trees first differ, bit for bit; "" where they do not
serve_s3         an S3 server on loopback
S3Server         where that server is
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "BackendSuite": "ckptfmt.testing.backend_suite",
    "FaultyBackend": "ckptfmt.testing.faulty_backend",
    "difference": "ckptfmt.testing.comparison",
    "Operation": "ckptfmt.testing.faulty_backend",
    "S3Server": "ckptfmt.testing.s3_server",
    "serve_s3": "ckptfmt.testing.s3_server",
}

__all__ = ["BackendSuite", "FaultyBackend", "Operation", "S3Server", "difference", "serve_s3"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ckptfmt.testing' has no attribute {name!r}")
    if name == "BackendSuite":
        import pytest

        # Else a failing assert in the suite shows no values.
        pytest.register_assert_rewrite(_PUBLIC[name])
    return getattr(importlib.import_module(_PUBLIC[name]), name)


if TYPE_CHECKING:
    from ckptfmt.testing.backend_suite import BackendSuite
    from ckptfmt.testing.comparison import difference
    from ckptfmt.testing.faulty_backend import FaultyBackend, Operation
    from ckptfmt.testing.s3_server import S3Server, serve_s3
