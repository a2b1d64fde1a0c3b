"""What the tidy tests look at: the package's source, parsed once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> dict[str, Path]:
    """Dotted module name -> file, for all of the package; a package has its own name."""
    found = {}
    for path in sorted((ROOT / "ckptfmt").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.fixture(scope="session")
def modules(sources: dict[str, Path]) -> dict[str, ast.Module]:
    """Dotted module name -> its syntax tree."""
    return {name: ast.parse(path.read_text(), str(path)) for name, path in sources.items()}
