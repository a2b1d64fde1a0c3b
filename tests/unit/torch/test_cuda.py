"""CUDA tensors: the order of what is asked of the device everywhere, the real one where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
import ckptfmt.torch as ckt
from ckptfmt.engine.arena import aligned_buffer
from ckptfmt.errors import CkptWarning
from ckptfmt.format import pack_array
from ckptfmt.torch import cuda
from ckptfmt.torch.dtypes import CARRIED
from ckptfmt.torch.tensors import flat, source, to_array

MIB = 1 << 20
DTYPES = sorted((row for row in CARRIED.values() if not row.narrow), key=lambda row: row.name)


class FakeCuda:
    """What of `torch.cuda` is used; tensors are the host's, and every call is noted."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.code = 0
        self.inside: Any = None
        log = self.log

        class Stream:
            def __init__(self, device: Any = None) -> None:
                log.append(f"stream {device}")

            def wait_stream(self, other: Any) -> None:
                log.append(f"side waits for {other}")

        class Event:
            def record(self, stream: Any = None) -> None:
                log.append("record")

            def synchronize(self) -> None:
                log.append("synchronize")

        self.Stream, self.Event = Stream, Event

    def is_available(self) -> bool:
        return False

    def current_stream(self, device: Any) -> str:
        return f"current {device}"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.inside = stream
        yield
        self.inside = None

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def cudart(self) -> Any:
        def register(ptr: int, nbytes: int, flags: int) -> int:
            self.log.append(f"register {nbytes} {flags}")
            return self.code

        def unregister(ptr: int) -> int:
            self.log.append("unregister")
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


def test_copies_run_on_a_side_stream_behind_earlier_work_and_one_event_ends_them() -> None:
    fake = FakeCuda()
    device = cuda.Cuda(fake)
    tensor, out = torch.arange(100, dtype=torch.int32), np.zeros((1, 400), np.uint8)

    def bytes_of() -> Any:
        fake.log.append("copy" if fake.inside is not None else "copy on the wrong stream")
        return flat(tensor)

    for _ in range(2):
        device.copy_async(3, bytes_of, out)
        device.copy_async(3, bytes_of, out[:, :32], 368)
        device.wait()
    begun = ["side waits for current 3", "copy", "copy", "record", "synchronize"]
    assert fake.log == ["stream 3", *begun, *begun]
    device.wait()  # nothing was issued since
    assert fake.log == ["stream 3", *begun, *begun]


def test_pinned_memory_is_released_once_and_a_refusal_is_a_warning() -> None:
    fake = FakeCuda()
    device = cuda.Cuda(fake)
    device.register(4096, 8192)
    device.unregister(4096)
    device.unregister(4096)
    assert fake.log == ["register 8192 1", "unregister"]
    fake.code = 2
    with pytest.warns(CkptWarning, match="cannot be pinned"):
        device.register(4096, 8192)
    device.unregister(4096)
    assert fake.log.count("unregister") == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
def test_the_bytes_that_are_copied_are_those_of_the_format(row: Any) -> None:
    width = torch.empty(0, dtype=getattr(torch, row.name)).element_size()
    raw = torch.randint(0, 2 if row.name == "bool" else 256, (60 * width,), dtype=torch.uint8)
    whole = raw.view(getattr(torch, row.name)).reshape(5, 12)
    device = cuda.Cuda(FakeCuda())
    for tensor in (whole, whole.t(), whole[1:4, 2:10:2], whole[2]):
        packed = bytes(pack_array(to_array(tensor)))
        out = np.zeros((1, len(packed)), np.uint8)
        device.copy_async(0, partial(flat, tensor), out)
        assert out.tobytes() == packed
        rows = np.zeros((2, 4), np.uint8)
        device.copy_async(0, partial(flat, tensor), rows, 1, len(packed) - 6)
        assert rows.tobytes() == packed[1:5] + packed[-5:-1]


def test_the_ring_fills_a_piece_again_only_after_its_transfer() -> None:
    fake = FakeCuda()
    ring = cuda.PinnedRing(fake, pin=False)
    value = torch.randint(0, 256, (6 * cuda.PIECE_NBYTES + 5,), dtype=torch.uint8)
    target = torch.zeros_like(value)
    ring.copy(target, value)
    assert torch.equal(target, value)
    full = ["record"] * cuda.PIECES
    assert fake.log[:-4] == [*full, *["synchronize", "record"] * 3]
    assert fake.log[-4:] == ["synchronize"] * 4
    small = torch.zeros(10, dtype=torch.uint8)
    fake.log.clear()
    ring.copy(small, value[:10])
    assert torch.equal(small, value[:10])
    assert fake.log == ["record", "synchronize"]


def test_other_devices_take_the_plain_way() -> None:
    tensor = torch.arange(10.0)
    assert source(tensor, "t").device is None
    value = torch.randn(3 * MIB)
    target = torch.zeros(3 * MIB)
    cuda.fill(target, value)
    assert torch.equal(target, value)
    assert cuda.to_device(value, "cpu") is value


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def _state() -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    made = {
        "big": torch.randn(30 * MIB, device="cuda", generator=generator),
        "half": torch.randn(1000, 77, device="cuda").to(torch.bfloat16),
        "turned": torch.randn(300, 500, device="cuda").t(),
        "images": torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last),
        "flag": torch.tensor([True, False], device="cuda"),
        "scalar": torch.tensor(3.5, device="cuda"),
        "conj": torch.randn(10, dtype=torch.complex64, device="cuda").conj(),
        "host": torch.randn(1000),
    }
    return made | {f"small{i}": torch.full((7,), float(i), device="cuda") for i in range(50)}


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


@needs_cuda
def test_cuda_a_background_save_is_of_the_call_whatever_the_streams_do_next(tmp_path: Path) -> None:
    state = _state()
    saved = {name: tensor.cpu().clone() for name, tensor in state.items()}
    for step in range(3):
        future = ckptfmt.save_async(state, tmp_path, step=step)
        for tensor in state.values():
            if tensor.dtype != torch.bool:
                tensor.mul_(2)
        future.result(120)
        assert _same(ckt.load(tmp_path, step=step), saved)
        saved = {name: tensor.cpu().clone() for name, tensor in state.items()}
    assert ckptfmt.Store(tmp_path).verify().ok


@needs_cuda
def test_cuda_a_save_a_load_and_a_restore_bring_every_bit_back(tmp_path: Path) -> None:
    state = _state()
    ckt.save(state, tmp_path, step=1)
    loaded = ckt.load(tmp_path, device="cuda")
    assert _same(loaded, state)
    assert loaded["big"].device.type == "cuda"
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ckt.restore(target, tmp_path)
    assert _same(target, state)
    assert target["images"].is_contiguous(memory_format=torch.channels_last)


@needs_cuda
def test_cuda_a_registered_arena_is_pinned() -> None:
    memory = aligned_buffer(8 * MIB)
    cuda.CUDA.register(memory.ctypes.data, memory.nbytes)
    try:
        assert torch.from_numpy(memory).is_pinned()
    finally:
        cuda.CUDA.unregister(memory.ctypes.data)
    assert not torch.from_numpy(memory).is_pinned()
