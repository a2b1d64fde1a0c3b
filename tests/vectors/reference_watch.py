"""A pytest plugin: whatever a test saves on local disk is read back by the reference reader at once.

So the whole suite tests that the specification says what the package does. Wired by
`pytest_plugins = ["reference_watch"]` in `tests/conftest.py` and this folder in `pythonpath`.
Large saves are left out: the reference reader favours clearness over speed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
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


def read_back(reference: ModuleType, root: str, info: Any) -> None:
    """The generation just committed: every leaf, every byte, and the tree's digest."""
    path = Path(root, "checkpoints", f"{info.name}~{info.generation}.index")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return  # another writer of the same test has replaced it already
    try:
        checkpoint = reference.Checkpoint(reference.Store(root), info.name, info.generation, data)
        checkpoint.tree()
    except (reference.Refused, FileNotFoundError):
        if path.exists():
            raise
        return
    assert checkpoint.index.about["tree_digest"].hex() == info.digest


@pytest.fixture(scope="session", autouse=True)
def every_save_is_read_by_the_reference_reader() -> Iterator[None]:
    api: Any = importlib.import_module("ckptfmt.engine.api")
    reference, original = load_reference(), api.save_tree

    def save_tree(tree: object, backend: Any, request: Any) -> Any:
        info = original(tree, backend, request)
        root = getattr(backend, "_root", None)  # of a local store; others are left out
        if root and info.nbytes <= NBYTES_MAX and info.tensors <= TENSORS_MAX:
            read_back(reference, root, info)
        return info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "save_tree", save_tree)
        yield
