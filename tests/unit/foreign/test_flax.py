"""Flax's msgpack: every dtype as Flax reads it, chunks joined, and nothing believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.foreign import detect_format, read_foreign, streaming

FILES = Path(__file__).parents[2] / "compat/import/flax"
PATH = FILES / "every-dtype.msgpack"


def test_every_dtype_is_read_as_flax_reads_it(same_as_expected: Any) -> None:
    assert detect_format(str(PATH)) == "flax"
    tree = same_as_expected(PATH, FILES / "expected.json")
    assert not tree.tensors["every/float32"].fetch().flags.owndata
    assert tree.tensors["chunked"].box is not None


def test_chunks_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = ckptfmt.open_foreign(PATH)["chunked"].read()
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 100)
    ckptfmt.convert(PATH, tmp_path / "s", durable=False)
    assert np.array_equal(ckptfmt.load(tmp_path / "s")["chunked"], want)


def array(shape: Any = (2,), name: Any = "float32", data: Any = b"\0" * 8) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb((shape, name, data)))


def chunked(shape: Any, *chunks: Any) -> dict[str, Any]:
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(n): d for n, d in enumerate(shape)},
        "chunks": {str(n): c for n, c in enumerate(chunks)},
    }


def fetch_all(path: Path) -> None:
    for tensor in read_foreign(path, source_format="flax").tensors.values():
        tensor.fetch()


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"x": array((3,))}, "do not fit the shape"),
        ({"x": array((1 << 62, 1 << 62))}, "do not fit the shape"),
        ({"x": array((1 << 60, 0, 1 << 60), data=b"")}, "other lengths overflow"),
        ({"x": array((-2,))}, "not a shape"),
        ({"x": array((True, 2))}, "not a shape"),
        ({"x": array([1] * 65)}, "not a shape"),
        ({"x": array("ab")}, "not an array"),
        ({"x": array(data="text")}, "without bytes"),
        ({"x": array(name="object")}, "no checkpoint has"),
        ({"x": array(name="string")}, "no checkpoint has"),
        ({"x": array(name=7)}, "no checkpoint has"),
        ({"x": msgpack.ExtType(1, b"\xc1")}, "begins no value"),
        ({"x": msgpack.ExtType(1, b"\x93\x91\x02")}, "truncated|too many"),
        (
            {"x": msgpack.ExtType(1, msgpack.packb(([2], "int8", b"12")) + b"\0")},
            "behind the value",
        ),
        ({"x": msgpack.ExtType(1, msgpack.packb(msgpack.ExtType(1, b"")))}, "in an extension"),
        ({"x": msgpack.ExtType(2, msgpack.packb([1.0, 2]))}, "not a complex"),
        ({"x": msgpack.ExtType(3, msgpack.packb(([2], "float32", b"\0" * 8)))}, "not a scalar"),
        ({"x": array((2,), "bool", b"\1\2")}, "neither 0 nor 1"),
        ({"x": chunked((4,), array())}, "chunks do not fit"),
        ({"x": chunked((4,), array(), array((1, 2)))}, "not the chunks"),
        ({"x": chunked((4,), array(), array((4,), "int16"))}, "not the chunks"),
        ({"x": chunked((4,), array(), 7)}, "not the chunks"),
        ({"x": chunked((0,))}, "not the chunks"),
        ({"x": chunked((-4,), array())}, "not a shape"),
        ({"x": {"__msgpack_chunked_array__": True}}, "without shape"),
        ({"x": {**chunked((2,), array()), "shape": {"a": 2}}}, "without shape"),
    ],
)
def test_what_does_not_hold_is_refused(tree: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.msgpack").write_bytes(msgpack.packb(tree))
    with pytest.raises((CorruptError, UnsupportedError), match=text):
        fetch_all(tmp_path / "x.msgpack")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xdf\xff\xff\xff\xff", "too many items"),
        (b"\xdd\xff\xff\xff\xff" + b"\0" * 100, "too many items"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (b"\x91" * 200, "nested deeper"),
        (b"\x82\xa1a\1\xa1a\2", "stands twice"),
        (b"\x81\x90\1", "no text or number"),
        (b"\x81\xa1\xff\1", "UTF-8"),
        (b"\x81\xa1a\1\0", "behind the value"),
        (b"\xdd" + (3 << 20).to_bytes(4, "big") + b"\x90" * (3 << 20), "too many items"),
    ],
)
def test_a_stream_that_does_not_hold_is_refused(data: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.msgpack").write_bytes(data)
    with pytest.raises(CorruptError, match=text):
        read_foreign(tmp_path / "x.msgpack", source_format="flax")


def test_an_extension_that_flax_does_not_write_is_named(tmp_path: Path) -> None:
    tree = {"x": msgpack.ExtType(9, b"?"), "y": array()}
    (tmp_path / "x.msgpack").write_bytes(msgpack.packb(tree))
    assert read_foreign(tmp_path / "x.msgpack").skipped == {"x": "the unknown msgpack extension 9"}


def test_msgpack_without_arrays_is_not_taken(tmp_path: Path) -> None:
    for number, tree in enumerate(({"a": 1}, [array()], {})):
        (tmp_path / f"{number}.msgpack").write_bytes(msgpack.packb(tree))
        assert detect_format(str(tmp_path / f"{number}.msgpack")) is None


def test_mutated_files_give_values_or_a_typed_error(
    hostile: Any, mutations: Callable[[bytes, int, int], list[bytes]], seed: int
) -> None:
    good = msgpack.packb({"x": array(), "c": chunked((4,), array(), array()), "v": [1, "a", 2.5]})
    assert hostile("flax", ".msgpack", mutations(good, seed, 220)) > 60


def test_numbers_of_one_width_are_the_same_numbers_taken_at_once(tmp_path: Path) -> None:
    lists: dict[str, list[Any]] = {
        "small": [n % 128 for n in range(500)],
        "mixed": [n % 300 - 40 for n in range(500)],
        "floats": [n / 7 for n in range(500)],
        "negative": [-n % 30 - 33 for n in range(500)],
        "wide": [n << 40 for n in range(1, 500)],
        "others": [None, True, "a", 1.5] * 100,
    }
    data = msgpack.packb({"w": array(), **lists})
    (tmp_path / "x.msgpack").write_bytes(data)
    found = ckptfmt.open_foreign(tmp_path / "x.msgpack").load()
    assert repr({name: found[name] for name in lists}) == repr(lists)
    for cut in (len(data) - 1, len(data) // 2, len(data) - 1700):
        (tmp_path / "x.msgpack").write_bytes(data[:cut])
        with pytest.raises(CorruptError):
            read_foreign(tmp_path / "x.msgpack", source_format="flax")


def test_a_long_key_above_many_short_ones_is_refused(tmp_path: Path) -> None:
    tree = {"w": array(), "k" * 500_000: {str(n): None for n in range(20_000)}}
    (tmp_path / "x.msgpack").write_bytes(msgpack.packb(tree))
    with pytest.raises(UnsupportedError, match="names of all leaves would take too much room"):
        read_foreign(tmp_path / "x.msgpack", source_format="flax")
