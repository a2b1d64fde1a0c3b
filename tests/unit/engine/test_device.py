"""Tensors on a device: pinned once, copied beside the host, waited for before a byte is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import arena, background, encode, fingerprint, stage
from ckptfmt.engine.adapter import TensorSource
from ckptfmt.errors import InternalError
from ckptfmt.format import digest
from ckptfmt.testing import difference

MIB = 1 << 20


class FakeDevice:
    """Copies that are issued happen at the wait, as late as the contract allows."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: dict[int, int] = {}
        self.pending: list[Callable[[], None]] = []
        self.outs: list[int] = []
        self.fails: Exception | None = None

    def register(self, ptr: int, nbytes: int) -> None:
        self.log.append("register")
        self.pinned[ptr] = nbytes

    def unregister(self, ptr: int) -> None:
        self.log.append("unregister")
        del self.pinned[ptr]

    def wait(self) -> None:
        self.log.append("wait")
        pending, self.pending = self.pending, []
        for copy in pending:
            copy()
        if self.fails is not None:
            raise self.fails

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return any(ptr <= address and address + nbytes <= ptr + n for ptr, n in self.pinned.items())


class Far:
    """A tensor on it. `memory` is the device's: the host cannot fetch it."""

    def __init__(self, device: FakeDevice, memory: Any) -> None:
        self.device, self.memory = device, memory

    def source(self) -> TensorSource:
        memory = self.memory
        return TensorSource(
            memory.dtype.name,
            memory.shape,
            self.fetch,
            identity=id(memory),
            keep=self,
            device=self.device,
            copy_async=self.copy_async,
        )

    def fetch(self) -> Any:
        raise AssertionError("fetched instead of copied")

    def copy_async(self, out: Any, start: int = 0, stride: int = 0) -> None:
        self.device.log.append("copy")
        self.device.outs.append(out.nbytes)
        assert self.device.is_pinned(out.ctypes.data, out.nbytes), "copied into memory not pinned"
        flat = self.memory.reshape(-1).view(np.uint8)

        def copy() -> None:
            for row, target in enumerate(out):
                begin = start + row * stride
                target[:] = flat[begin : begin + len(target)]

        out[...] = 0xEE  # what a look before the wait would see
        self.device.pending.append(copy)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice()
    monkeypatch.setattr(background, "_arena", arena.Arena())
    monkeypatch.setattr(stage, "_bounce", arena.Arena())
    yield made
    background._arena.trim()
    stage._bounce.trim()
    assert not made.pinned


def _arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sizes = [9 * MIB + 12, 8, 40, 70_000, MIB, 3 * MIB + 4, 64]
    return {f"{i}": rng.integers(0, 255, n, np.uint8) for i, n in enumerate(sizes)}


def _far(device: FakeDevice, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: Far(device, array).source() for name, array in arrays.items()}


def test_a_background_save_holds_what_the_device_had_at_the_call(
    tmp_path: Path, device: FakeDevice
) -> None:
    arrays, host = _arrays(), np.arange(300_000.0)
    saved = {name: array.copy() for name, array in arrays.items()}
    future = ckptfmt.save_async({**_far(device, arrays), "host": host}, tmp_path, step=1)
    assert not device.pending
    for array in arrays.values():
        array += 1
    future.result(60)
    assert not difference(ckptfmt.load(tmp_path), {**saved, "host": host})
    assert ckptfmt.Store(tmp_path).verify().ok


def test_it_is_pinned_before_the_first_copy_and_waited_for_once_after_the_last(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_digest, real_fingerprint = digest, fingerprint.Fingerprint

    def looks(data: Any, algorithm: str) -> bytes:
        device.log.append("digest")
        return real_digest(data, algorithm)

    def taken(*args: Any) -> Any:
        device.log.append("fingerprint")
        return real_fingerprint(*args)

    monkeypatch.setattr(stage, "digest", looks)
    monkeypatch.setattr(stage, "Fingerprint", taken)
    future = ckptfmt.save_async(_far(device, _arrays()), tmp_path, step=1)
    log = list(device.log)
    future.result(60)
    assert log[0] == "register"
    assert log[-3:] == ["wait", "digest", "fingerprint"]
    assert set(log[1:-3]) == {"copy"}


def test_an_arena_is_registered_once_and_again_only_when_it_is_replaced(
    tmp_path: Path, device: FakeDevice
) -> None:
    arrays = _arrays()
    for step in range(3):
        ckptfmt.save_async(_far(device, arrays), tmp_path, step=step).result(60)
    assert device.log.count("register") == 1
    arrays["more"] = np.zeros(40 * MIB, np.uint8)
    ckptfmt.save_async(_far(device, arrays), tmp_path, step=3).result(60)
    assert [word for word in device.log if word.endswith("register")] == [
        "register",
        "unregister",
        "register",
    ]
    assert len(device.pinned) == 1
    background._arena.trim()
    assert not device.pinned


@pytest.mark.parametrize("where", ["copy", "wait", "register"])
def test_an_error_of_the_device_fails_the_save_and_frees_the_arena(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    error = InternalError("the device fell off the bus", reason="test")
    tree = _far(device, _arrays())

    def raises(*args: Any, **more: Any) -> None:
        raise error

    if where == "copy":
        tree["3"].copy_async = raises
    elif where == "wait":
        device.fails = error
    with monkeypatch.context() as patch:
        if where == "register":
            patch.setattr(device, "register", raises)
        with pytest.raises(InternalError, match="off the bus"):
            ckptfmt.save_async(tree, tmp_path, step=1)
    assert not device.pending, "copies were still on their way to memory that is free"
    device.fails = None
    assert ckptfmt.Store(tmp_path).steps() == []
    ckptfmt.save_async({"x": np.ones(3)}, tmp_path, step=2).result(60)  # the arena is free


def test_a_stale_copy_of_a_device_tensor_fails_the_save(tmp_path: Path, device: FakeDevice) -> None:
    """The samples come from the device, not from the arena: a copy that did not happen is seen."""
    arrays = _arrays()
    ckptfmt.save_async(_far(device, arrays), tmp_path, step=1).result(60)
    tree = _far(device, arrays)
    arrays["0"] += 1
    copy = tree["0"].copy_async

    def forgets(out: Any, start: int = 0, stride: int = 0) -> None:
        if out.nbytes < arrays["0"].nbytes:
            copy(out, start, stride)

    tree["0"].copy_async = forgets
    with pytest.raises(InternalError, match="staged bytes are not those"):
        ckptfmt.save_async(tree, tmp_path, step=2).result(60)
    assert ckptfmt.Store(tmp_path).steps() == [1]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_save_that_is_waited_for_takes_device_tensors_through_bounded_memory(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    for module in (stage, encode):
        monkeypatch.setattr(module, "BOUNCE_NBYTES", 8 * MIB)
    arrays = _arrays()
    arrays["big"] = np.random.default_rng(1).integers(0, 9, 21 * MIB + 5, np.uint8)
    ckptfmt.save(_far(device, arrays), tmp_path, step=1, codec=codec)
    assert device.log.count("register") == 1
    assert max(device.outs) <= 8 * MIB
    assert device.pinned == dict.fromkeys(device.pinned, 16 * MIB)
    assert not difference(ckptfmt.load(tmp_path), arrays)
    device.outs.clear()
    arrays["big"][5 * MIB] += 1
    info = ckptfmt.save(_far(device, arrays), tmp_path, step=2, codec=codec)
    # Once to be hashed, and once more only the chunk that is new.
    assert sum(device.outs) <= sum(a.nbytes for a in arrays.values()) + 4 * MIB
    assert info.written_nbytes < 5 * MIB
    assert not difference(ckptfmt.load(tmp_path), arrays)


def test_a_device_tensor_that_changes_while_it_is_saved_fails_the_save(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stage, encode):
        monkeypatch.setattr(module, "BOUNCE_NBYTES", 8 * MIB)
    array = np.zeros(21 * MIB, np.uint8)
    far = Far(device, array)
    tree = {"w": far.source()}
    copies: list[int] = []

    def moving(out: Any, start: int = 0, stride: int = 0) -> None:
        copies.append(start)
        array[:] = len(copies)
        far.copy_async(out, start, stride)

    tree["w"].copy_async = moving
    with pytest.raises(ckptfmt.ConflictError, match="changed while it was saved"):
        ckptfmt.save(tree, tmp_path, step=1)
    assert ckptfmt.Store(tmp_path).steps() == []
