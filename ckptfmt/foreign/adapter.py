"""How a save and a restore see what importers give: lazy tensors, dicts with attributes, values of
frameworks that need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptfmt.engine import Captured, ObjectKind, Target, TensorSource
from ckptfmt.errors import UsageError
from ckptfmt.foreign.base import ForeignContainer, ForeignTensor, ForeignValue
from ckptfmt.foreign.opening import ForeignStored
from ckptfmt.foreign.streaming import HOST, PackedStream, is_streamed


class ForeignAdapter:
    """Row `ckptfmt.foreign` of ADAPTERS. These objects are sources only; nothing is ever one again."""

    def kind(self, obj: object) -> ObjectKind:
        if isinstance(obj, ForeignTensor | ForeignStored):
            return "tensor"
        if isinstance(obj, ForeignContainer):
            return "composite"
        return "value" if isinstance(obj, ForeignValue) else "unknown"

    def source(self, obj: Any, name: str) -> TensorSource:
        tensor: ForeignTensor = obj.foreign if isinstance(obj, ForeignStored) else obj
        identity = None if not tensor.nbytes else tensor.identity or ("id", id(obj))
        streamed = is_streamed(tensor)
        return TensorSource(
            tensor.dtype,
            tensor.shape,
            tensor.fetch,
            identity,
            tensor.attributes,
            keep=tensor,
            device=HOST if streamed else None,
            copy_async=PackedStream.of(tensor) if streamed else None,
        )

    def capture(self, obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Captured:
        return Captured(obj.tree, {"": obj.attributes} if obj.attributes and obj.tree else {})

    def pack_value(self, obj: Any) -> tuple[str, object]:
        return obj.tag, obj.payload

    def target(self, obj: Any, name: str, peers: Sequence[tuple[str, object]]) -> Target | None:
        raise _not_a_target(name)

    def unpack_value(self, tag: str, payload: Any) -> object:
        return NotImplemented

    def tensor(self, array: Any, attributes: Mapping[str, object]) -> object:
        return array

    def compose(self, attributes: Mapping[str, object], name: str) -> Callable[[Any], Any] | None:
        return None

    def copy(self, obj: Any) -> object:
        return obj

    def make(self, like: Any, array: Any) -> object:
        raise _not_a_target("like")


def _not_a_target(name: str) -> UsageError:
    return UsageError(
        "what a foreign file holds cannot be restored into",
        reason="foreign-target",
        where=name,
        do="give it as the source, and a tree of arrays as the target",
    )


ADAPTER = ForeignAdapter()
