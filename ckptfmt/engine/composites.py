"""Stored containers that are one tensor of a framework: sparse, quantized, nested. Spec: 07-index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptfmt.engine.adapter import Adapter
from ckptfmt.engine.dispatch import adapter_of_tag

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_below(name: str, container: str) -> bool:
    """Whether a name is a container's, or lies in it."""
    return not container or name == container or name.startswith(f"{container}/")


def holder_of(name: str, containers: Mapping[str, Any]) -> str | None:
    """The outermost of these containers that a name lies in."""
    found = None
    while containers:
        if name in containers:
            found = name
        if not name:
            break
        name = name.rpartition("/")[0]
    return found


class Composites:
    """The composites among some stored containers, and how their frameworks put them together.

    Args:
        containers: Name -> attributes; the attribute `<framework>.tensor` says that it is one.
    """

    def __init__(self, containers: Mapping[str, Mapping[str, object]]) -> None:
        self.makers: dict[str, Callable[[Any], Any]] = {}
        self._adapters: dict[str, Adapter] = {}
        for name, attributes in containers.items():
            tag = next((key for key in attributes if key.partition(".")[2] == "tensor"), "")
            adapter = adapter_of_tag(tag)
            compose = getattr(adapter, "compose", None)
            maker = None if compose is None else compose(attributes, name)
            if adapter is not None and maker is not None:
                self.makers[name], self._adapters[name] = maker, adapter

    def adapter_of(self, name: str) -> Adapter | None:
        """The adapter of the composite that a leaf of this name is a part of."""
        holder = holder_of(name, self._adapters)
        return None if holder is None else self._adapters[holder]

    def part(self, name: str, array: NDArray[Any], attributes: Mapping[str, object]) -> Any:
        """An array as its composite's framework takes it; as it is where it is no part of one."""
        adapter = self.adapter_of(name)
        return array if adapter is None else adapter.tensor(array, attributes)
