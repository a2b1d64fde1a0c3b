"""A tensor of the caller's tree as a target: compared by name, then filled in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt.engine import ORDER_TENSOR, Comparison, Memory, Staged
from ckptfmt.torch.memory import memory_of
from ckptfmt.torch.tensors import Overwrite, ask, identity_of, staged_tensor


class TensorTarget:
    """A tensor of the caller's tree, filled in place."""

    order = ORDER_TENSOR

    def __init__(self, tensor: Any, name: str) -> None:
        self.name = name
        self.identities = {name: identity_of(tensor)}
        self._overwrite = Overwrite(tensor)
        self._attributes: Mapping[str, object] = {}

    def compare(self, comparison: Comparison) -> None:
        stored = comparison.stored(self.name)
        if self.name in stored:
            self._attributes = stored[self.name].attributes
        ask(comparison, self.name, self._overwrite.tensor, stored)

    def memory(self) -> list[Memory]:
        tensor = self._overwrite.tensor
        return memory_of(self.name, tensor, self.identities[self.name], self._attributes)

    def bind(self, staged: Staged) -> None:
        if self.name in staged:
            value = staged_tensor(staged, self.name, self._attributes, self._overwrite.tensor)
            self._overwrite.apply(value, keep=staged.undoable)

    def undo(self) -> None:
        self._overwrite.undo()
