"""The reference reader as a fixture: a second pair of eyes on everything that tests write."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """`spec/reference_reader.py` as a module."""
    path = Path(__file__).with_name("reference_watch.py")
    spec = importlib.util.spec_from_file_location("reference_watch", path)
    assert spec is not None
    assert spec.loader is not None
    watch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(watch)
    made: ModuleType = watch.load_reference()
    return made


@pytest.fixture
def assert_reference_reads(reference: ModuleType) -> Callable[[Any], dict[str, dict[str, Any]]]:
    """Every checkpoint of a store, every byte checked, by the reference reader."""
    check: Callable[[Any], dict[str, dict[str, Any]]] = reference.assert_reference_reads
    return check
