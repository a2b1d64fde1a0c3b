"""A pytest plugin: whatever a test saves on local disk is read back by the reference reader at once.

So the whole suite tests that the specification says what the package does. Wired by
`pytest_plugins = ["reference_watch"]` in `tests/conftest.py` and this folder in `pythonpath`.
A test that saves onto damage is marked `damaged_store`. Large saves are left out: the reference reader favours clearness over speed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NBYTES_MAX, TENSORS_MAX = 2 << 20, 500
READER = Path(__file__).parents[2] / "spec" / "reference_reader.py"


def load_reference() -> ModuleType:
    """`spec/reference_reader.py` as a module; it imports nothing of the package."""
    name = "ckptfmt_reference_reader"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, READER)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def read_back(reference: ModuleType, root: str, name: str, tree_digest: bytes) -> None:
    """The checkpoint just committed: every leaf, every byte, and the tree's digest."""
    store = reference.Store(root)
    for generation in store.generations().get(name, []):
        path = Path(root, "checkpoints", f"{name}~{generation}.index")
        try:
            data = path.read_bytes()
            about = reference.parse_about(*about_of(reference, data))
            if about["tree_digest"] != tree_digest:
                continue  # another writer of the same test, or a test's own damage
            checkpoint = reference.Checkpoint(store, name, generation, data)
            raw = sum(chunk.raw for chunk in reference.all_chunks(checkpoint.index))
            if raw <= NBYTES_MAX and len(checkpoint.index.tensors) <= TENSORS_MAX:
                checkpoint.tree()
        except (reference.Refused, FileNotFoundError):
            if path.exists() and path.read_bytes() == data:
                raise


def about_of(reference: ModuleType, data: bytes) -> tuple[bytes, str, int]:
    algorithm, size, _, rows = reference.parse_header(data)
    return data[288 : 288 + rows[0][1]], algorithm, size


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "damaged_store: saves onto damage, so it is not read back")


@pytest.fixture(autouse=True)
def every_save_is_read_by_the_reference_reader(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("damaged_store"):
        return
    save: Any = importlib.import_module("ckptfmt.engine.save")
    reference, original = load_reference(), save.remember

    # Hooked where a save ends, not around it: the save's own warnings count stack frames.
    def remember(backend: Any, name: str, tree_digest: bytes) -> None:
        original(backend, name, tree_digest)
        root = getattr(backend, "_root", None)  # of a local store; others are left out
        if root:
            read_back(reference, root, name, tree_digest)

    monkeypatch.setattr(save, "remember", remember)
