"""The reference reader as a fixture: a second pair of eyes on everything that tests write."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load_reference() -> ModuleType:
    """`spec/reference_reader.py` as a module; it imports nothing of the package."""
    name = "ckptfmt_reference_reader"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "spec" / "reference_reader.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    return load_reference()


@pytest.fixture
def assert_reference_reads(reference: ModuleType) -> Callable[[Any], dict[str, dict[str, Any]]]:
    """Every checkpoint of a store, every byte checked, by the reference reader."""
    check: Callable[[Any], dict[str, dict[str, Any]]] = reference.assert_reference_reads
    return check
