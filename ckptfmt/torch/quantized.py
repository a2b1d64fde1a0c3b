"""Quantized tensors: their integers, which every reader can open, and the scale beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptfmt.engine import TensorSource
from ckptfmt.format import dtype_named, pack_array, parse_array
from ckptfmt.torch.compressed import refusal
from ckptfmt.torch.tensors import bits, from_array, memory_format_named, memory_format_of, to_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WHOLE = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
_PACKED = {"quint4x2": "uint4", "quint2x4": "uint2"}
"""torch packs these as the format does: element after element, the first in the lowest bits."""
STORED = {name: str(dtype).removeprefix("torch.") for name, dtype in _WHOLE.items()} | _PACKED


def dtype_text(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def facts_of(tensor: Any) -> dict[str, Any]:
    scheme = str(tensor.qscheme()).removeprefix("torch.")
    return {"dtype": dtype_text(tensor), "scheme": scheme}


def items_of(tensor: Any) -> dict[str, Any]:
    items: dict[str, Any] = {"int_repr": _integers(tensor)}
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return items | {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return items | {
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
        "axis": tensor.q_per_channel_axis(),
    }


def raw(tensor: Any) -> Any:
    """The memory of a quantized tensor as plain integers; of a packed one as its bytes."""
    whole = _WHOLE.get(dtype_text(tensor))
    empty = torch.empty(0, dtype=whole or torch.uint8, device=tensor.device)
    if whole is None:
        storage = tensor.untyped_storage()
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))
    return empty.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _integers(tensor: Any) -> Any:
    stored = _PACKED.get(dtype_text(tensor))
    if stored is None:
        return raw(tensor)
    if not tensor.is_contiguous() or tensor.storage_offset():
        raise refusal("a view of packed integers", "quantize the view itself")
    shape = tuple(map(int, tensor.shape))
    nbytes = _packed_nbytes(stored, shape)
    dtype: Any = dtype_named(stored)

    def fetch() -> NDArray[Any]:
        data = raw(tensor).cpu().numpy()[:nbytes].copy()
        # What lies behind the last element is not part of the value.
        spare = 8 * nbytes - math.prod(shape) * dtype.bits
        if spare and nbytes:
            data[-1] &= 0xFF >> spare
        return parse_array(data, dtype, shape)

    identity = ("torch.packed", str(tensor.device), tensor.data_ptr(), shape, stored)
    return TensorSource(stored, shape, fetch, identity if math.prod(shape) else None, {}, tensor)


def _packed_nbytes(stored: str, shape: tuple[int, ...]) -> int:
    dtype: Any = dtype_named(stored)
    return -(-math.prod(shape) * int(dtype.bits) // 8)


def check(facts: Mapping[str, Any], items: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: The parts make no quantized tensor.
    """
    integers, name = items.get("int_repr"), facts.get("dtype")
    if isinstance(integers, TensorSource):
        found, shape = integers.dtype, tuple(integers.shape)
    elif isinstance(integers, torch.Tensor):
        found, shape = str(integers.dtype).removeprefix("torch."), tuple(integers.shape)
    else:
        raise refusal("no tensor 'int_repr'")
    if not isinstance(name, str) or STORED.get(name) != found:
        raise refusal(f"integers of {found} for {name}")
    if "scale" in items:
        if type(items["scale"]) is not float or type(items.get("zero_point")) is not int:
            raise refusal("scale or zero_point is no number")
        return
    scales, zeros, axis = (items.get(key) for key in ("scales", "zero_points", "axis"))
    if not isinstance(scales, torch.Tensor) or not isinstance(zeros, torch.Tensor):
        raise refusal("no tensors 'scales' and 'zero_points'")
    if type(axis) is not int or not 0 <= axis < len(shape):
        raise refusal(f"axis {axis!r} of {len(shape)}")
    if tuple(scales.shape) != (shape[axis],) or tuple(zeros.shape) != (shape[axis],):
        raise refusal(f"{scales.numel()} scales, {zeros.numel()} zero points for {shape[axis]}")


def join(facts: Mapping[str, Any], items: Mapping[str, Any]) -> Any:
    integers, dtype = items["int_repr"], getattr(torch, facts["dtype"])
    options = {"dtype": dtype, "device": "cpu"}
    memory_format = memory_format_named(memory_format_of(integers))
    if memory_format is not None:
        options["memory_format"] = memory_format
    if "scale" in items:
        made = torch._empty_affine_quantized(
            integers.shape, scale=items["scale"], zero_point=items["zero_point"], **options
        )
    else:
        made = torch._empty_per_channel_affine_quantized(
            integers.shape,
            scales=items["scales"],
            zero_points=items["zero_points"],
            axis=items["axis"],
            **options,
        )
    found = facts_of(made)["scheme"]
    if found != facts.get("scheme"):
        raise refusal(f"scheme {found}")
    if facts["dtype"] in _PACKED:
        packed = np.frombuffer(bytes(pack_array(to_array(integers))), np.uint8)
        raw(made)[: len(packed)].copy_(torch.from_numpy(packed.copy()))
    else:
        bits(raw(made)).copy_(bits(integers))
    return made


def assign(tensor: Any, value: Any) -> bool:
    """Give a quantized tensor another's values in its own storage; False where torch cannot."""
    if dtype_text(tensor) in _PACKED:
        if not same_scale(tensor, value):
            return False
        raw(tensor).copy_(raw(value))
        return True
    tensor.copy_(value)  # the integers as they are, and the scale with them
    return True


def same_scale(a: Any, b: Any) -> bool:
    one, other = items_of(a), items_of(b)
    return all(
        torch.equal(one[key], other[key])
        if isinstance(one[key], torch.Tensor)
        else one[key] == other[key]
        for key in one.keys() - {"int_repr"}
    )


def copied(tensor: Any) -> Any:
    """The same tensor in memory of its own, as `join` takes parts."""
    items = items_of(tensor)
    integers = items["int_repr"]
    if isinstance(integers, TensorSource):
        integers = from_array(integers.fetch())
    items = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in items.items()}
    return join(facts_of(tensor), {**items, "int_repr": integers.cpu()}).to(tensor.device)
