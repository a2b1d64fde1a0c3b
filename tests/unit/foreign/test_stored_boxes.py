"""A large tensor of a store is read once, however its boxes lie."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engine import StoredTensor
from ckptfmt.errors import CorruptError
from ckptfmt.foreign import stored_boxes, streaming
from ckptfmt.foreign.stored_boxes import lies_across


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1 << 16)
    monkeypatch.setattr(stored_boxes, "STREAMED_NBYTES_MIN", 1 << 16)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 1 << 13)


@pytest.mark.parametrize(("codec", "reads"), [("raw", 0), ("zstd", 1)])
def test_a_transposed_tensor_is_read_once(
    tmp_path: Path, codec: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = np.arange(300 * 500, dtype=np.int32).reshape(300, 500)
    v = np.arange(200 * 500, dtype=np.int32).reshape(200, 500)
    ckptfmt.save({"w": w, "v": v}, tmp_path / "s", codec=codec, chunk_nbytes=1 << 14, durable=False)
    read, elements = StoredTensor.read, []

    def counted(self: StoredTensor, region: Any = ..., **options: Any) -> Any:
        made = read(self, region, **options)
        elements.append(made.size)
        return made

    monkeypatch.setattr(StoredTensor, "read", counted)
    rules: list[dict[str, Any]] = [
        {"transpose": "."}, {"concat": ["w", "v"], "to": "both", "axis": 1}
    ]  # fmt: skip
    ckptfmt.convert(tmp_path / "s", tmp_path / "t", rules=rules, durable=False)
    assert sum(elements) == reads * (w.size + v.size)
    monkeypatch.undo()
    made = ckptfmt.load(tmp_path / "t")["both"]
    assert made.tobytes() == np.ascontiguousarray(np.concatenate([w, v]).T).tobytes()


def test_damage_is_found_although_the_values_come_from_a_map(tmp_path: Path) -> None:
    w = np.arange(300 * 500, dtype=np.int32).reshape(300, 500)
    ckptfmt.save({"w": w}, tmp_path / "s", durable=False)
    (file,) = (tmp_path / "s/data").iterdir()
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="tensor 'w'"):
        ckptfmt.convert(tmp_path / "s", tmp_path / "t", rules=[{"transpose": "."}], durable=False)
    assert ckptfmt.Store(tmp_path / "t").names() == []


def test_a_run_of_elements_does_not_lie_across() -> None:
    shape = (3, 4, 2)
    for ends in itertools.product(*(itertools.combinations(range(n + 1), 2) for n in shape)):
        sides = [slice(*pair) for pair in ends]
        chosen = np.arange(24).reshape(shape)[tuple(sides)].ravel()
        is_run = bool((np.diff(chosen) == 1).all())
        assert lies_across(shape, sides) != is_run, sides
