"""CUDA tensors to the host and back, through pinned memory, beside the work of the device.

To the host: on a side stream that first waits for what was issued before, so that the values are
those of the call; one event is waited for at the end (`Device` in `engine/adapter`). To the device:
in pieces through a ring, so that the copy into pinned memory overlaps the transfer of the piece
before. Tensors of other devices take the plain way, `.cpu()` and `copy_`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ckptfmt.errors import warn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_NBYTES = 8 << 20
PIECES = 4
_PORTABLE = 1
"""Pinned for every device of the process (`cudaHostRegisterPortable`)."""


class Cuda:
    """All CUDA devices of this process. `api` is `torch.cuda`, or what a test puts in its place."""

    def __init__(self, api: Any = torch.cuda) -> None:
        self._api = api
        self._streams: dict[int, Any] = {}
        self._pinned: set[int] = set()
        self._mine = threading.local()

    def register(self, ptr: int, nbytes: int) -> None:
        """Pin host memory; a CkptWarning where the system refuses: copies are slower then."""
        code = int(self._api.cudart().cudaHostRegister(ptr, nbytes, _PORTABLE))
        if code == 0:
            self._pinned.add(ptr)
            return
        if self._api.is_available():
            # CUDA hands the error to whoever launches next: take it here.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        warn(
            f"{nbytes >> 20} MiB of host memory cannot be pinned (CUDA error {code}): copies from "
            "the device are slower"
        )

    def unregister(self, ptr: int) -> None:
        """Before the memory is given up."""
        if ptr in self._pinned:
            self._pinned.remove(ptr)
            self._api.cudart().cudaHostUnregister(ptr)

    def copy_async(
        self,
        device: int,
        flat: Callable[[], Any],
        out: NDArray[np.uint8],
        start: int = 0,
        stride: int = 0,
    ) -> None:
        """`CopyAsync` of `engine/adapter`.

        Args:
            device: Its number.
            flat: Gives the tensor's bytes as a contiguous uint8 tensor on the device; called on the
                side stream, which any copy that it makes belongs to.
        """
        with self._api.stream(self._side(device)):
            data = flat()
            rows = data.as_strided(out.shape, (stride, 1), data.storage_offset() + start)
            # Only what is contiguous on both sides is one transfer.
            torch.from_numpy(out).copy_(rows.contiguous(), non_blocking=True)

    def _side(self, device: int) -> Any:
        """The device's side stream, behind what this thread has issued before its first copy."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._api.Stream(device=device)
        used = self._used()
        if device not in used:
            used[device] = stream
            stream.wait_stream(self._api.current_stream(device))
        return stream

    def _used(self) -> dict[int, Any]:
        made: dict[int, Any] | None = getattr(self._mine, "streams", None)
        if made is None:
            made = self._mine.streams = {}
        return made

    def wait(self) -> None:
        """Until every copy that this thread has issued is over."""
        used = self._used()
        self._mine.streams = {}
        for stream in used.values():
            event = self._api.Event()
            event.record(stream)
            event.synchronize()


class PinnedRing:
    """Bytes to a device in pieces, each copied into pinned memory while others are on their way."""

    def __init__(self, api: Any = torch.cuda, *, pin: bool = True) -> None:
        self._api, self._pin = api, pin
        self._pieces: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()

    def copy(self, target: Any, value: Any) -> None:
        """Fill a contiguous uint8 tensor of a device from one of the host; it is there on return."""
        with self._lock, self._api.device(target.device):
            if not self._pieces:
                self._pieces = [(self._buffer(), self._api.Event()) for _ in range(PIECES)]
            for number, start in enumerate(range(0, len(value), PIECE_NBYTES)):
                buffer, event = self._pieces[number % PIECES]
                if number >= PIECES:
                    event.synchronize()
                source = value[start : start + PIECE_NBYTES]
                piece = buffer[: len(source)]
                piece.copy_(source)
                target[start : start + len(source)].copy_(piece, non_blocking=True)
                event.record()
            for _, event in self._pieces[: -(-len(value) // PIECE_NBYTES)]:
                event.synchronize()

    def _buffer(self) -> Any:
        return torch.empty(PIECE_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=self._pin)


CUDA = Cuda()
_ring = PinnedRing()


def is_far(tensor: Any) -> bool:
    """Whether it is on a device that this module serves."""
    return bool(tensor.device.type == "cuda")


def fill(target: Any, value: Any) -> None:
    """`target.copy_(value)` of one shape and dtype; large host values go to CUDA by the ring."""
    large = target.numel() * target.element_size() >= PIECE_NBYTES
    if not (large and is_far(target) and value.device.type == "cpu"):
        target.copy_(value)
        return
    if target.is_contiguous() and value.is_contiguous() and target.dtype == value.dtype:
        _ring.copy(target.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    else:
        target.copy_(value)


def to_device(tensor: Any, device: Any) -> Any:
    """`tensor.to(device)`, by the ring where that is faster."""
    device = torch.device(device)
    if device.type != "cuda" or not tensor.is_contiguous():
        return tensor.to(device)
    made = torch.empty_like(tensor, device=device)
    fill(made, tensor)
    return made
