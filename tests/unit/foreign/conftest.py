"""What the tests of all importers ask: is it read bit for bit, and are damaged files refused."""

from __future__ import annotations

import json
import lzma
import random
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CheckpointError
from ckptfmt.foreign import ForeignCheckpoint, ForeignTree, read_foreign

MEMORY_NBYTES_MAX = 200 << 20
Same = Callable[[Path, Path], ForeignTree]
Hostile = Callable[[str, str, Iterable[bytes]], int]


def _plain(value: Any) -> Any:
    """A value as JSON has it: NumPy scalars as their dtype and number, bytes as hex."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.generic):
        return {value.dtype.name: value.tobytes().hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


@pytest.fixture
def same_as_expected(tmp_path: Path) -> Same:
    """same(file, expected.json) -> the tree. Every leaf is as the format's library read it (dtype,
    shape, bytes in memory), lazily, and once more from a checkpoint that `convert` made."""

    def same(path: Path, expected: Path) -> ForeignTree:
        wanted = json.loads(expected.read_text())
        tree = read_foreign(path)
        foreign = ForeignCheckpoint(str(path), tree)
        assert set(foreign) == {*wanted["tensors"], *wanted.get("values", {})}
        ckptfmt.convert(path, tmp_path / "same", durable=False, allow_partial=bool(tree.skipped))
        assert dict(tree.skipped).keys() == set(wanted.get("skipped", []))
        with ckptfmt.open(tmp_path / "same") as checkpoint:
            for name, want in wanted["tensors"].items():
                tensor = tree.tensors[name]
                assert tensor.dtype == want["dtype"], name
                assert list(tensor.shape) == want["shape"], name
                for array in (tensor.fetch(), foreign[name].read(), checkpoint[name].read()):
                    assert list(array.shape) == want["shape"], name
                    if "texts" in want:
                        assert [text.hex() for text in array.reshape(-1)] == want["texts"], name
                    else:
                        assert array.tobytes().hex() == want["hex"], name
            for name, want in wanted.get("values", {}).items():
                assert _plain(foreign[name]) == want, name
                assert _plain(checkpoint[name]) == want, name
        return tree

    return same


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[Path], Path]:
    """unpacked(file.xz) -> the file."""

    def unpack(path: Path) -> Path:
        made = tmp_path / path.stem
        made.write_bytes(lzma.decompress(path.read_bytes()))
        return made

    return unpack


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    """hostile(format, suffix, contents) -> how many were refused with a typed error. Any other
    exception fails, and so does much memory."""

    def refused(source_format: str, suffix: str, files: Iterable[bytes]) -> int:
        errors = 0
        path = tmp_path / f"hostile{suffix}"
        tracemalloc.start()
        try:
            for data in files:
                path.write_bytes(data)
                try:
                    tree = read_foreign(path, source_format=source_format)
                    ForeignCheckpoint(str(path), tree).load()
                except CheckpointError:
                    errors += 1
            assert tracemalloc.get_traced_memory()[1] < MEMORY_NBYTES_MAX
        finally:
            tracemalloc.stop()
        return errors

    return refused


@pytest.fixture
def mutations() -> Callable[[bytes, int, int], list[bytes]]:
    """mutations(good, seed, count): bytes flipped, cut, repeated, zeroed, set and swapped."""

    def mutated(good: bytes, seed: int, count: int) -> list[bytes]:
        rng = random.Random(seed)
        made = []
        for number in range(count):
            spoiled = bytearray(good)
            at = rng.randrange(len(spoiled))
            kind = number % 6
            if kind == 0:
                spoiled[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del spoiled[at:]
            elif kind == 2:
                spoiled[at : at + 8] = rng.randbytes(8)
            elif kind == 3:
                spoiled[at:at] = spoiled[max(0, at - 20) : at]
            elif kind == 4:
                spoiled[at : at + 16] = bytes(len(spoiled[at : at + 16]))
            else:
                spoiled[at : at + 4] = b"\xff" * len(spoiled[at : at + 4])
            made.append(bytes(spoiled))
        return made

    return mutated
