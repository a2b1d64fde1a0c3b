"""A tensor in slices is one tensor: rows in order, no gap, no contradiction."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

import ckptfmt
from ckptfmt import CorruptError
from ckptfmt.foreign import read_foreign, streaming
from ckptfmt.foreign.bundle.index import parse_index
from ckptfmt.foreign.bundle.slices import slice_key
from ckptfmt.foreign.bundle.types import Slice

WHOLE = np.arange(10, dtype=np.float32).reshape(5, 2)


def save_slices(prefix: Path, *pieces: tuple[str, Any], name: str = "v") -> str:
    """The raw op, with one `shape-and-slice` for each piece."""
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=[name] * len(pieces),
        shape_and_slices=[spec for spec, _ in pieces],
        tensors=[tf.constant(values) for _, values in pieces],
    )
    return str(prefix)


def test_rows_are_in_order_whatever_the_order_of_the_slices(tmp_path: Path) -> None:
    prefix = save_slices(
        tmp_path / "x",
        ("5 2 3,1:0,2", WHOLE[3:4]),
        ("5 2 4,1:0,2", WHOLE[4:]),
        ("5 2 0,3:0,2", WHOLE[:3]),
    )
    with ckptfmt.open_foreign(prefix) as foreign:
        assert list(foreign) == ["v"]
        assert foreign["v"].shape == (5, 2)
        assert foreign["v"].nbytes == WHOLE.nbytes
        assert np.array_equal(foreign["v"].read(), WHOLE)
        assert np.array_equal(foreign["v"].read(np.s_[2:4]), WHOLE[2:4])
    assert np.array_equal(tf.train.load_checkpoint(prefix).get_tensor("v"), WHOLE)
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    assert np.array_equal(ckptfmt.load(tmp_path / "s")["v"], WHOLE)


def test_slices_along_two_axes(tmp_path: Path) -> None:
    whole = np.arange(300 * 400, dtype=np.int64).reshape(300, 400)
    pieces = [
        (f"300 400 {r},150:{c},200", whole[r : r + 150, c : c + 200])
        for r in (150, 0)
        for c in (0, 200)
    ]
    prefix = save_slices(tmp_path / "x", *pieces)
    assert np.array_equal(read_foreign(prefix).tensors["v"].fetch(), whole)
    with pytest.raises(CorruptError, match=r"\[150:300, 200:400\]"):
        ckptfmt.open_foreign(save_slices(tmp_path / "gap", pieces[0], *pieces[2:]))


def test_a_gap_is_an_error_with_its_range(tmp_path: Path) -> None:
    first, last = ("5 2 0,2:0,2", WHOLE[:2]), ("5 2 4,1:0,2", WHOLE[4:])
    for pieces, gap in (([first, last], "2:4"), ([first], "2:5"), ([last], "0:4")):
        prefix = save_slices(tmp_path / f"x{gap[0]}{len(pieces)}", *pieces)
        with pytest.raises(CorruptError) as caught:
            ckptfmt.open_foreign(prefix)
        assert caught.value.kind == "corrupt-tensorbundle-gap"
        assert f"tensor 'v'[{gap}, 0:2]" in str(caught.value)


def test_slices_that_overlap_must_agree(tmp_path: Path) -> None:
    nan = WHOLE.copy()
    nan[2] = np.nan
    agree = save_slices(tmp_path / "agree", ("5 2 0,3:0,2", nan[:3]), ("5 2 2,3:0,2", nan[2:]))
    assert np.array_equal(read_foreign(agree).tensors["v"].fetch(), nan, equal_nan=True)
    differ = save_slices(
        tmp_path / "differ", ("5 2 0,3:0,2", WHOLE[:3]), ("5 2 2,3:0,2", WHOLE[2:] + 1)
    )
    with pytest.raises(CorruptError, match="overlap hold different values"):
        ckptfmt.open_foreign(differ)["v"].read()
    with pytest.raises(CorruptError, match="overlap hold different values"):
        ckptfmt.convert(differ, tmp_path / "s", durable=False)
    assert ckptfmt.Store(tmp_path / "s").names() == []


def test_slices_of_strings(tmp_path: Path) -> None:
    values = np.array([b"a", b"", b"ccc", b"dd"], object)
    prefix = save_slices(tmp_path / "x", ("4 0,3", values[:3]), ("4 3,1", values[3:]))
    assert read_foreign(prefix).tensors["v"].fetch().tolist() == values.tolist()


def test_slice_keys_are_those_of_tensorflow(tmp_path: Path) -> None:
    """Long starts and lengths, and names with the bytes that the code escapes."""
    pieces = []
    start = 0
    for length in (1, 63, 64, 8191, 8192, 200_000, 1 << 20):
        spec = f"{(1 << 20) + 216511} {start},{length}"
        pieces.append((spec, np.full(length, start, np.int32)))
        start += length
    prefix = save_slices(tmp_path / "x", *pieces, name="a\0b\u00ff/c")
    (tensor,) = read_foreign(prefix).tensors.values()
    values = tensor.fetch()
    assert [int(values[int(spec.split()[1].split(",")[0])]) for spec, _ in pieces] == [
        int(part[0]) for _, part in pieces
    ]
    index = parse_index(Path(f"{prefix}.index").read_bytes(), "x")
    assert slice_key("a\0b\u00ff/c", Slice((0,), (1,))) in index.slices


def test_slices_stream_to_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 1000)
    monkeypatch.setattr("ckptfmt.foreign.bundle.tensors.join", lambda *_: pytest.fail("whole"))
    whole = np.arange(30 * 40 * 3, dtype=np.int64).reshape(30, 40, 3)
    pieces = [
        (f"30 40 3 {r},15:{c},20:0,3", whole[r : r + 15, c : c + 20])
        for r in (15, 0)
        for c in (0, 20)
    ]
    prefix = save_slices(tmp_path / "x", *pieces)
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    assert np.array_equal(ckptfmt.load(tmp_path / "s")["v"], whole)
