"""Boxes of stored tensors into torch tensors: in place on the host, in waves to a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptfmt.engine import Checkpoint, Fill, StoredTensor, fill_boxes
from ckptfmt.errors import MismatchError, UsageError
from ckptfmt.torch.dtypes import ATTRIBUTE, CARRIED, X2, Carried
from ckptfmt.torch.tensors import bits, from_array, lacks_memory, writing

if TYPE_CHECKING:
    from numpy.typing import NDArray

WAVE_NBYTES = 256 << 20
"""Host memory that a load to a device takes at a time."""
_LINES_MAX = 40


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A box of a stored tensor, in elements as torch counts them, and the tensor that takes it."""

    stored: Any
    origin: tuple[int, ...]
    extent: tuple[int, ...]
    target: Any


def torch_shape(stored: StoredTensor) -> tuple[int, ...]:
    """The shape as torch has it: 4-bit floats come in pairs."""
    shape = stored.shape
    if stored.dtype_name == "float4_e2m1fn" and shape:
        return (*shape[:-1], shape[-1] // 2)
    return shape


def refuse_misfits(copies: Sequence[BoxCopy]) -> None:
    """MismatchError names every target whose shape or dtype is not that of what is stored."""
    lines: dict[str, None] = {}
    for box in copies:
        expected, found = _dtype_text(box.stored), str(box.target.dtype).removeprefix("torch.")
        if tuple(box.target.shape) != box.extent:
            expected, found = str(list(box.extent)), str(list(box.target.shape))
        if not box.target.is_meta and lacks_memory(box.target):
            found = "a tensor whose storage was freed or is too small for it"
        if expected != found:
            lines[f"  {box.stored.name}: stored {expected}, target {found}"] = None
    if lines:
        shown = list(lines)[:_LINES_MAX]
        if len(lines) > len(shown):
            shown.append(f"  … and {len(lines) - len(shown)} more")
        raise MismatchError(
            "targets do not fit what is stored:\n" + "\n".join(shown) + "\n",
            reason="tree",
            do="nothing was changed; give the state dict tensors of the stored dtypes, or convert "
            "after the load",
        )


def _dtype_text(stored: StoredTensor) -> str:
    """The stored dtype by torch's name."""
    own = stored.attributes.get(ATTRIBUTE)
    if isinstance(own, str):
        return own
    return X2 if stored.dtype_name == "float4_e2m1fn" else stored.dtype_name


def copy_boxes(checkpoint: Checkpoint, copies: Sequence[BoxCopy]) -> None:
    """Read every box into its tensor.

    Raises:
        CorruptError: Bytes are damaged; what was read before has been copied.
    """
    fills, rest = [], []
    for box in copies:
        array = _host_view(box.target)
        if array is not None:
            fills.append(Fill(box.stored.row, box.origin, array))
        elif math.prod(box.extent):
            rest.append(box)
    fill_boxes(checkpoint, fills)
    wave: list[BoxCopy] = []
    for box in rest:
        wave.append(box)
        if sum(b.target.nbytes for b in wave) >= WAVE_NBYTES:
            _through_the_host(checkpoint, wave)
            wave = []
    _through_the_host(checkpoint, wave)


def _host_view(target: Any) -> NDArray[Any] | None:
    """The target's memory as an array of its elements' width, where bytes can be put as they are."""
    carried: Carried = CARRIED[target.dtype]
    plain = target.device.type == "cpu" and not (target.is_conj() or target.is_neg())
    if not plain or _is_packed(carried) or torch._debug_has_internal_overlap(target) == 1:
        return None
    view: NDArray[Any] = bits(target).numpy()
    return view


def _is_packed(carried: Carried) -> bool:
    return carried.narrow or carried.name == X2


def _through_the_host(checkpoint: Checkpoint, wave: Sequence[BoxCopy]) -> None:
    """Targets on a device, of types that torch holds otherwise than the file, or odd in memory."""
    staged = [
        None if _is_packed(CARRIED[b.target.dtype]) else torch.empty(b.extent, dtype=b.target.dtype)
        for b in wave
    ]
    pairs = [(b, s) for b, s in zip(wave, staged) if s is not None]
    fill_boxes(
        checkpoint, [Fill(b.stored.row, b.origin, np.asarray(bits(s).numpy())) for b, s in pairs]
    )
    for box, made in zip(wave, staged):
        value = _unpacked(box) if made is None else made
        try:
            put(box.target, value)
        except RuntimeError as error:
            raise UsageError(
                "the target cannot be written in place",
                reason="dcp-target",
                where=box.stored.name,
                found=str(error).partition("\n")[0],
                do="give the state dict a tensor of its own",
            ) from error


def put(target: Any, value: Any) -> None:
    """Overwrite a tensor in place by another of its dtype and shape, bit for bit."""
    with writing(target):
        if target.is_conj() or target.is_neg():
            target.detach().copy_(value)
        else:
            bits(target).copy_(bits(value))


def _unpacked(box: BoxCopy) -> Any:
    """Of a type under 8 bits: read as an array, a byte an element, and made a tensor."""
    twice = 2 if CARRIED[box.target.dtype].name == X2 else 1
    ranges = [slice(a, a + n) for a, n in zip(box.origin, box.extent)]
    if ranges:
        last = ranges[-1]
        ranges[-1] = slice(last.start * twice, last.stop * twice)
    return from_array(box.stored.read(tuple(ranges)), box.stored.attributes, box.stored.name)
