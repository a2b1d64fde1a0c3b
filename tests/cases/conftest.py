"""How much lies on disk, and what a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def size_of() -> Callable[[Path], int]:
    """Bytes of all files below a folder."""
    return lambda path: sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
