"""Copies of a state dict that a save in the background may read: in memory that is kept for the next.

The memory belongs to the process, not to a writer: one is made per step, and its first copy would
pay for fresh pages each time. A copy that is made while the last one is still read has memory of
its own.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptfmt.engine import aligned_buffer, copy_arrays
from ckptfmt.torch.tensors import bits, identity_of, refuse_freed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALIGN_NBYTES = 64


class Lease:
    """Memory that a staged copy lies in, until it is given back or its last tensor is gone."""

    def __init__(self, memory: NDArray[np.uint8], back: Callable[[], None]) -> None:
        # torch keeps this very array as long as a tensor lies in it.
        self.release = weakref.finalize(memory, back)
        """Say that nobody reads the copy any more. A second call does nothing."""
        self.release.atexit = False
        self.flat = torch.from_numpy(memory)


class Pool:
    """One block of memory, for one staged copy at a time."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] | None = None
        self._is_out = False
        self._lock = threading.RLock()  # a finalizer may run while its thread holds it

    def take(self, nbytes: int) -> Lease:
        with self._lock:
            if self._is_out:
                return Lease(aligned_buffer(nbytes), lambda: None)
            if self._memory is None or len(self._memory) < nbytes:
                self._memory = None  # the old block goes before the new one comes
                self._memory = aligned_buffer(nbytes)
            self._is_out = True
            return Lease(self._memory[:nbytes], self._back)

    def _back(self) -> None:
        with self._lock:
            self._is_out = False

    def trim(self) -> None:
        """Give the memory back to the system, unless a copy lies in it."""
        with self._lock:
            if not self._is_out:
                self._memory = None


_pool = Pool()


def _forget_in_child() -> None:
    global _pool
    _pool = Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def stage(state_dict: Any) -> tuple[Any, Lease]:
    """A copy on the host of all that may change: tensors, containers, objects."""
    found: dict[Any, tuple[Any, int]] = {}
    total = _collect(state_dict, found, 0)
    lease = _pool.take(total)
    pairs: list[tuple[Any, Any]] = []
    made = {
        key: _copied(tensor, lease.flat, offset, pairs) for key, (tensor, offset) in found.items()
    }
    copy_arrays(pairs)
    return _rebuilt(state_dict, made), lease


def _collect(obj: Any, found: dict[Any, tuple[Any, int]], total: int) -> int:
    """Every tensor's place; those that are one tensor have one."""
    if isinstance(obj, torch.Tensor):
        if is_traceable_wrapper_subclass(obj):
            for name in obj.__tensor_flatten__()[0]:
                total = _collect(getattr(obj, name), found, total)
        elif _is_plain(obj):
            refuse_freed(obj, "the state dict")
            if _key(obj) not in found:
                found[_key(obj)] = obj, total
                total += -(-obj.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
    elif isinstance(obj, Mapping):
        for item in obj.values():
            total = _collect(item, found, total)
    elif isinstance(obj, list | tuple):
        for item in obj:
            total = _collect(item, found, total)
    return total


def _is_plain(tensor: Any) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _key(tensor: Any) -> Any:
    return identity_of(tensor) or id(tensor)


def _copied(tensor: Any, flat: Any, offset: int, pairs: list[tuple[Any, Any]]) -> Any:
    """A tensor's place in the memory: filled, or put on the list of what is copied by threads."""
    piece = flat[offset : offset + tensor.nbytes]
    place = piece.view(tensor.dtype).view(tensor.shape)
    if tensor.is_conj() or tensor.is_neg():
        return place.copy_(tensor.detach().resolve_conj().resolve_neg())
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        pairs.append((piece.numpy(), bits(tensor).reshape(-1).view(torch.uint8).numpy()))
    else:
        bits(place).copy_(bits(tensor))
    return place


def _rebuilt(obj: Any, made: Mapping[Any, Any]) -> Any:
    if isinstance(obj, torch.Tensor):
        if is_traceable_wrapper_subclass(obj):
            names, context = obj.__tensor_flatten__()
            inner = {name: _rebuilt(getattr(obj, name), made) for name in names}
            return type(obj).__tensor_unflatten__(inner, context, obj.shape, obj.stride())
        return made[_key(obj)] if _is_plain(obj) else copy.deepcopy(obj)
    if isinstance(obj, dict):
        new = copy.copy(obj)
        for key, item in obj.items():
            new[key] = _rebuilt(item, made)
        return new
    if isinstance(obj, Mapping):
        return {key: _rebuilt(item, made) for key, item in obj.items()}
    if isinstance(obj, list | tuple):
        items = [_rebuilt(item, made) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    return copy.deepcopy(obj)
