"""Where a tensor's values lie, for the engine to see which targets share bytes (`Memory`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckptfmt.engine import Memory
from ckptfmt.torch.dtypes import ATTRIBUTE
from ckptfmt.torch.tensors import bits, from_array

if TYPE_CHECKING:
    from numpy.typing import NDArray


def memory_of(
    name: str, tensor: Any, identity: Hashable | None, attributes: Mapping[str, object]
) -> list[Memory]:
    """The memory that an in-place restore of a strided tensor writes to, if it writes in place.

    Args:
        attributes: Those of the stored leaf.
    """
    if tensor.is_meta or tensor.numel() == 0 or torch._debug_has_internal_overlap(tensor) == 1:
        return []  # it gets a storage of its own
    width = tensor.element_size()
    own = {key: value for key, value in attributes.items() if key == ATTRIBUTE}
    conjugated, negated = tensor.is_conj(), tensor.is_neg()

    def encode(array: NDArray[Any]) -> NDArray[Any]:
        value = from_array(array, own, name)
        if conjugated:
            value = value.conj_physical()
        if negated:
            value = -value
        lying: NDArray[Any] = bits(value).numpy()
        return lying

    return [
        Memory(
            name,
            str(tensor.device),
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(stride * width for stride in tensor.stride()),
            width,
            encode,
            identity,
        )
    ]
