"""GGUF: every type as llama.cpp's library reads it, blocks as they are, and nothing believed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, NotFoundError, UnsupportedError
from ckptfmt.foreign import detect_format, read_foreign

FILES = Path(__file__).parents[2] / "compat/import/gguf"


def test_every_type_is_read_as_the_library_reads_it(same_as_expected: Any) -> None:
    path = FILES / "every-type.gguf"
    assert detect_format(str(path)) == "gguf"
    tree = same_as_expected(path, FILES / "expected-every-type.json")
    quantized = tree.tensors["tensors/t.Q4_K"]
    assert quantized.attributes == {"gguf.shape": [2, 256]}
    assert not quantized.fetch().flags.owndata


def test_blocks_come_back_as_opaque_bytes_that_say_what_they_are(tmp_path: Path) -> None:
    ckptfmt.convert(FILES / "every-type.gguf", tmp_path / "s", durable=False)
    with ckptfmt.open(tmp_path / "s") as checkpoint:
        array = checkpoint["tensors/t.Q6_K"].read()
        assert array.dtype == np.dtype("V210")
        assert (array.dtype.metadata or {})["ckptfmt.dtype"] == "gguf.Q6_K"
        assert checkpoint["metadata/v.u16"] == np.uint16(65535)


def test_a_big_endian_file_is_read() -> None:
    with ckptfmt.open_foreign(FILES / "big-endian.gguf") as foreign:
        for name, dtype in (("a", "float32"), ("b", "int16"), ("c", "float64")):
            found = foreign[f"tensors/t.{name}"].read()
            assert found.dtype == dtype
            assert found.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert foreign["metadata/v.i32"] == -3
        assert foreign["metadata/v.numbers"].read().tolist() == [1, 2, -3]


def test_the_parts_of_a_split_model_are_one(tmp_path: Path) -> None:
    with ckptfmt.open_foreign(FILES / "split-00001-of-00003.gguf") as foreign:
        for number in range(5):
            assert foreign[f"tensors/t.{number}"].read().tolist() == [number] * 3
    with pytest.raises(UnsupportedError, match="give the first part"):
        ckptfmt.open_foreign(FILES / "split-00002-of-00003.gguf")
    copy(FILES / "split-00001-of-00003.gguf", tmp_path)
    with pytest.raises(NotFoundError, match=r"2 of 3 parts.*split-00003-of-00003"):
        ckptfmt.open_foreign(tmp_path / "split-00001-of-00003.gguf")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def info(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    made = text(name) + struct.pack("<I", len(dims))
    return made + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def file(
    *infos: bytes,
    values: tuple[bytes, ...] = (),
    data: bytes = b"",
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> bytes:
    tensors, keys = counts if counts is not None else (len(infos), len(values))
    made = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(values + infos)
    return made + bytes(-len(made) % 32) + data


def value(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


BIG = 1 << 61
DATA = np.arange(8, dtype="<f4").tobytes()
NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(50)) + struct.pack("<IQ", 0, 0)


def test_a_file_of_our_own_hand_is_read(tmp_path: Path) -> None:
    values = (value("raw", 8, struct.pack("<Q", 1) + b"\xff"), value("n", 9, NESTED[-24:]))
    (tmp_path / "a.gguf").write_bytes(
        file(info("x", 4, 2), info("y", 0, 7, offset=32), values=values, data=DATA)
    )
    loaded = ckptfmt.open_foreign(tmp_path / "a.gguf").load()
    assert loaded["tensors"]["x"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loaded["tensors"]["y"].shape == (7, 0)
    assert loaded["metadata"]["raw"] == b"\xff"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (file(info("x", 8), data=DATA[:-1]), "truncated"),
        (file(info("x", 8, offset=32), data=DATA), "truncated"),
        (file(info("x", 8, offset=1 << 62), data=DATA), "without end"),
        (file(info("x", BIG, 4), data=DATA), "without end"),
        (file(info("x", BIG, 0), data=DATA), "without end"),
        (file(info("x", *[1] * 65), data=DATA), "too many dimensions"),
        (file(info("x", 31, kind=2), data=DATA), "no whole blocks"),
        (file(info("x", kind=2), data=DATA), "no whole blocks"),
        (file(info("x", 4), info("x", 4, offset=16), data=DATA), "stands twice"),
        (file(info("x", 4), info("y", 4), data=DATA), "overlap"),
        (file(counts=(1 << 40, 0)), "more tensors or values"),
        (file(counts=(0, 1 << 63)), "more tensors or values"),
        (file(data=DATA, counts=(1, 0)), "without end"),
        (file(version=9), "unknown version"),
        (file(values=(value("a", 0, b"\1"), value("a", 0, b"\1"))), "stands twice"),
        (file(values=(value("a", 13, b"\1"),)), "unknown type"),
        (file(values=(value("a", 7, b"\2"),)), "neither 0 nor 1"),
        (file(values=(value("a", 9, struct.pack("<IQ", 0, 1 << 60)),)), "truncated"),
        (file(values=(value("a", 9, struct.pack("<IQ", 8, 1 << 60)),)), "too many items"),
        (file(values=(value("a", 9, NESTED),)), "nested too deep"),
        (file(values=(value("general.alignment", 4, struct.pack("<I", 0)),)), "power of two"),
        (file(values=(value("general.alignment", 4, struct.pack("<I", 3)),)), "power of two"),
        (file(values=(value("general.alignment", 8, text("x")),)), "power of two"),
        (file(values=(struct.pack("<Q", 1 << 62),), data=b"\0" * 64), "truncated"),
        (b"GGUF\3\0", "truncated"),
    ],
)
def test_what_does_not_hold_is_refused(data: bytes, found: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises((CorruptError, UnsupportedError), match=found):
        ckptfmt.open_foreign(tmp_path / "x.gguf")


def test_more_keys_or_lists_than_a_model_has_are_refused(tmp_path: Path) -> None:
    many = (1 << 16) + 1
    lists = struct.pack("<IQ", 9, many) + struct.pack("<IQ", 0, 0) * many
    cases = {
        "too many keys": file(counts=(0, many), data=bytes(many * 16)),
        "too many lists": file(values=(value("a", 9, lists),)),
    }
    for found, data in cases.items():
        (tmp_path / "x.gguf").write_bytes(data)
        with pytest.raises(CorruptError, match=found):
            read_foreign(str(tmp_path / "x.gguf"))


def test_a_type_that_nobody_knows_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(file(info("new", 8, kind=99), info("x", 8), data=DATA))
    tree = read_foreign(tmp_path / "x.gguf")
    assert tree.skipped == {"new": "the unknown type 99"}
    assert list(tree.tensors) == ["tensors/x"]


def test_mutated_files_give_values_or_a_typed_error(
    hostile: Any, mutations: Callable[[bytes, int, int], list[bytes]], seed: int
) -> None:
    values = (value("a", 9, struct.pack("<IQ", 8, 2) + text("p") + text("q")),)
    good = file(info("x", 4), info("q", 32, kind=2, offset=32), values=values, data=DATA * 2)
    assert hostile("gguf", ".gguf", mutations(good, seed, 220)) > 60
