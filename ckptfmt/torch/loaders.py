"""`torchdata`'s StatefulDataLoader: its position, without a draw after the restore.

The loader makes its iterator when it is asked for one, and the iterator draws seeds from torch's
generator. Left to the training loop, that comes after the generators were set, and the resumed run
differs from the first dropout on. So the iterator is made while the loader is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt.engine import ORDER_USER_CODE, Captured, Comparison, Staged, StoredLeaf
from ckptfmt.torch.trees import mark, to_torch


def is_loader(obj: object) -> bool:
    return any(
        cls.__name__ == "StatefulDataLoader" and cls.__module__.startswith("torchdata.")
        for cls in type(obj).__mro__
    )


def capture(loader: Any) -> Captured:
    attributes: dict[str, dict[str, object]] = {}
    return Captured(mark(loader.state_dict(), attributes), attributes)


class LoaderTarget:
    """A loader that goes on where the saved one was; undone by reference, its workers live on."""

    order = ORDER_USER_CODE

    def __init__(self, loader: Any, name: str) -> None:
        self.name = name
        self._loader = loader
        self._stored: Mapping[str, StoredLeaf] = {}
        self._old: dict[str, Any] | None = None

    def compare(self, comparison: Comparison) -> None:
        self._stored = comparison.stored(self.name)
        comparison.subtree(self.name)

    def bind(self, staged: Staged) -> None:
        if self.name not in staged:
            return
        state = to_torch(staged.subtree(self.name), self.name, self._stored)
        self._old = dict(vars(self._loader))
        self._loader.load_state_dict(state)
        self._loader.state_dict()  # makes the iterator

    def undo(self) -> None:
        if self._old is not None:
            vars(self._loader).clear()
            vars(self._loader).update(self._old)
            self._old = None
