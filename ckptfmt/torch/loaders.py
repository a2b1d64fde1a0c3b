"""`torchdata`'s StatefulDataLoader: its position, without a draw after the restore.

The loader makes its iterator when it is asked for one, and the iterator draws seeds from torch's
generator. Left to the training loop, that comes after the generators were set, and the resumed run
differs from the first dropout on. So the iterator is made while the loader is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ckptfmt.engine import (
    ORDER_USER_CODE,
    Captured,
    Comparison,
    Staged,
    StoredLeaf,
    copy_state,
)
from ckptfmt.torch.trees import mark, to_torch

_PARTS = ("dataset", "sampler", "batch_sampler", "generator")


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
        self._parts: list[Callable[[], object]] = []

    def compare(self, comparison: Comparison) -> None:
        self._stored = comparison.stored(self.name)
        comparison.subtree(self.name)

    def bind(self, staged: Staged) -> None:
        if self.name not in staged:
            return
        state = to_torch(staged.subtree(self.name), self.name, self._stored)
        self._old = dict(vars(self._loader))
        self._keep_parts()
        self._loader.load_state_dict(state)
        self._loader.state_dict()  # makes the iterator

    def _keep_parts(self) -> None:
        """The iterator that is made takes its state into the dataset and the sampler themselves,
        and draws from the loader's generator."""
        loader = self._loader
        # Workers have datasets of their own.
        names = [n for n in _PARTS if n != "dataset" or not loader.num_workers]
        parts = [getattr(loader, name, None) for name in names]
        parts += [getattr(part, "generator", None) for part in parts]
        for part in {id(part): part for part in parts if part is not None}.values():
            if isinstance(part, torch.Generator):
                self._parts.append(partial(part.set_state, part.get_state()))
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self._parts.append(partial(part.load_state_dict, copy_state(part.state_dict())))

    def undo(self) -> None:
        while self._parts:
            self._parts[-1]()
            self._parts.pop()
        if self._old is not None:
            vars(self._loader).clear()
            vars(self._loader).update(self._old)
            self._old = None
