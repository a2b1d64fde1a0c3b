"""Tensors in groups: the next one is read while one is bound, and its errors come in their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ckptfmt import CorruptError
from ckptfmt.engine.source import GROUP_NBYTES, CheckpointSource, GroupedArrays

WAIT_S = 30.0


class Fake(CheckpointSource):
    """A checkpoint with a tensor of half a group in each row, but where `sizes` says else."""

    def __init__(self, sizes: dict[int, int] | None = None) -> None:
        self.sizes = sizes or {}
        self.damaged: set[int] = set()
        self.reads: list[list[int]] = []
        self.began = {row: threading.Event() for row in range(20)}

    def nbytes(self, tensors: Sequence[int]) -> int:
        return sum(self.sizes.get(row, GROUP_NBYTES // 2) for row in tensors)

    def tensors(self, rows: Sequence[int], **how: Any) -> dict[int, Any]:
        self.reads.append(list(rows))
        self.began[rows[0]].set()
        if self.damaged & set(rows):
            raise CorruptError("damaged", reason="chunk-digest")
        return {row: np.array(row) for row in rows}


def grouped(source: Fake, rows: int) -> GroupedArrays:
    return GroupedArrays(source, range(rows), verify=True, progress=False)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_the_next_group_is_read_before_it_is_asked_for_and_only_once() -> None:
    source = Fake()
    with grouped(source, 6) as arrays:
        assert source.reads == []
        for row in range(6):
            assert arrays[row] == row
            assert row > 3 or source.began[row // 2 * 2 + 2].wait(WAIT_S)
    assert source.reads == [[0, 1], [2, 3], [4, 5]]


def test_what_is_damaged_is_told_when_it_is_asked_for() -> None:
    source = Fake()
    source.damaged = {2}
    with grouped(source, 6) as arrays:
        assert arrays[0] == 0
        assert source.began[2].wait(WAIT_S)
        assert arrays[1] == 1
        with pytest.raises(CorruptError):
            arrays[2]
        with pytest.raises(CorruptError):
            arrays[3]
        assert arrays[4] == 4


def test_leaving_waits_for_what_nobody_asks_for_any_more() -> None:
    source = Fake()
    source.damaged = {2}
    with grouped(source, 4) as arrays:
        assert arrays[0] == 0  # and then the binding fails
    assert source.began[2].is_set()


def test_groups_in_another_order_are_read_when_they_are_asked_for() -> None:
    source = Fake()
    with grouped(source, 8) as arrays:
        for row in (6, 2, 0, 4):
            assert arrays[row] == row
    assert source.reads == [[6, 7], [2, 3], [0, 1], [4, 5]]


def test_a_tensor_larger_than_a_group_is_alone_in_memory() -> None:
    source = Fake({2: 3 * GROUP_NBYTES})
    with grouped(source, 7) as arrays:
        assert [arrays[0], arrays[2]] == [0, 2]
        assert source.reads == [[0, 1], [2]]
        assert arrays[3] == 3
        assert source.began[5].wait(WAIT_S)
    assert source.reads == [[0, 1], [2], [3, 4], [5, 6]]
