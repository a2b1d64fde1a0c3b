"""Hostile headers: each is refused quickly, in little memory, and the message names the cause."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfmt.errors import CorruptError, FormatError, UnsupportedError
from ckptfmt.foreign.safetensors import SafetensorsImporter

PAIR = {
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
}


def with_a(**changes: Any) -> dict[str, Any]:
    return {**PAIR, "a": {**PAIR["a"], **changes}}


def file_of(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


TWICE = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
ESCAPED_TWICE = TWICE.replace(b',"a"', b',"\\u0061"')
FIELD_TWICE = b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
SURROGATE = b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'

HOSTILE: dict[str, tuple[bytes, str, str]] = {
    "empty file": (b"", "corrupt-safetensors-length", "too short"),
    "seven bytes": (b"\2" + bytes(6), "corrupt-safetensors-length", "too short"),
    "length 2^63": (struct.pack("<Q", 1 << 63), "corrupt-safetensors-length", "too long"),
    "length 2^64-1": (b"\xff" * 8 + b"{}", "corrupt-safetensors-length", "too long"),
    "length over the limit": (
        struct.pack("<Q", 100_000_001) + b"{}",
        "corrupt-safetensors-length",
        "at most 100000000, found 100000001",
    ),
    "length beyond the file": (
        struct.pack("<Q", 1000) + b"{}",
        "corrupt-safetensors-length",
        "ends behind the file",
    ),
    "length zero": (bytes(8), "corrupt-safetensors-length", "header is too short"),
    "no object": (file_of(b"[]", b""), "corrupt-safetensors-json", "malformed"),
    "cut off": (file_of(b'{"a":', b""), "corrupt-safetensors-entry", "not an object"),
    "bytes after": (file_of(b"{} x", b""), "corrupt-safetensors-trailing", "after the JSON"),
    "duplicate name": (
        file_of(TWICE, b""),
        "corrupt-safetensors-duplicate-name",
        "duplicate name 'a'",
    ),
    "duplicate name, one escaped": (
        file_of(ESCAPED_TWICE, b""),
        "corrupt-safetensors-duplicate-name",
        "duplicate name 'a'",
    ),
    "duplicate field": (
        file_of(FIELD_TWICE, b""),
        "corrupt-safetensors-duplicate-name",
        "duplicate key 'dtype'",
    ),
    "duplicate metadata": (
        file_of(b'{"__metadata__":{"k":"1","k":"2"}}', b""),
        "corrupt-safetensors-duplicate-name",
        "duplicate key in __metadata__ 'k'",
    ),
    "metadata is no text": (
        file_of(b'{"__metadata__":{"k":1}}', b""),
        "corrupt-safetensors-json",
        "a value in __metadata__ as a string",
    ),
    "overlap": (
        file_of({**PAIR, "b": {**PAIR["b"], "data_offsets": [2, 6]}}, bytes(6)),
        "corrupt-safetensors-overlap",
        "overlaps tensor 'a'",
    ),
    "the same range twice": (
        file_of({**PAIR, "b": PAIR["a"]}, bytes(4)),
        "corrupt-safetensors-overlap",
        "overlaps tensor 'a'",
    ),
    "gap": (
        file_of({**PAIR, "b": {**PAIR["b"], "data_offsets": [5, 9]}}, bytes(9)),
        "corrupt-safetensors-gap",
        "gap before the tensor",
    ),
    "gap at the start": (
        file_of({"b": PAIR["b"]}),
        "corrupt-safetensors-gap",
        "gap before the tensor",
    ),
    "bytes behind": (
        file_of(PAIR, bytes(9)),
        "corrupt-safetensors-trailing",
        "behind the last tensor",
    ),
    "truncated": (file_of(PAIR, bytes(7)), "corrupt-safetensors-truncated", "truncated"),
    "reversed": (
        file_of(with_a(data_offsets=[4, 0])),
        "corrupt-safetensors-offsets",
        "reversed offsets",
    ),
    "negative": (
        file_of(with_a(data_offsets=[-4, 0])),
        "corrupt-safetensors-offsets",
        "negative offset",
    ),
    "offsets are floats": (
        file_of(with_a(data_offsets=[0.0, 4.0])),
        "corrupt-safetensors-offsets",
        "no pair of ints",
    ),
    "offsets are bools": (
        file_of(with_a(data_offsets=[False, 4])),
        "corrupt-safetensors-offsets",
        "no pair of ints",
    ),
    "bytes are not shape x itemsize": (
        file_of(with_a(shape=[5])),
        "corrupt-safetensors-size",
        "expected 5 for [5] of U8, found 4",
    ),
    "half a byte": (
        file_of(with_a(dtype="F4", shape=[7])),
        "corrupt-safetensors-size",
        "28 bits, no whole bytes",
    ),
    "shape overflow": (
        file_of(with_a(shape=[1 << 32, 1 << 32, 1 << 32])),
        "corrupt-safetensors-shape-overflow",
        "product of the shape overflows",
    ),
    "shape overflow beside a zero": (
        file_of(with_a(shape=[0, 1 << 62, 4], data_offsets=[0, 0])),
        "corrupt-safetensors-shape-overflow",
        "product of the shape overflows",
    ),
    "wraps to the right size": (
        file_of(with_a(shape=[(1 << 64) + 4])),
        "corrupt-safetensors-shape-overflow",
        "product of the shape overflows",
    ),
    "negative dim": (file_of(with_a(shape=[-4])), "corrupt-safetensors-shape", "no list of counts"),
    "shape is no list": (
        file_of(with_a(shape=4)),
        "corrupt-safetensors-shape",
        "no list of counts",
    ),
    "dim is a bool": (
        file_of(with_a(shape=[True])),
        "corrupt-safetensors-shape",
        "no list of counts",
    ),
    "65 dims": (
        file_of(with_a(shape=[1] * 64 + [4])),
        "unsupported-safetensors-ndim",
        "at most 64, found 65",
    ),
    "unknown dtype": (
        file_of(with_a(dtype="F128")),
        "unsupported-safetensors-dtype",
        "found 'F128'",
    ),
    "dtype is no text": (
        file_of(with_a(dtype=7)),
        "unsupported-safetensors-dtype",
        "unknown dtype",
    ),
    "a field is missing": (
        file_of({"a": {"dtype": "U8", "shape": [0]}}, b""),
        "corrupt-safetensors-entry",
        "wrong fields",
    ),
    "a field too many": (file_of(with_a(x=1)), "corrupt-safetensors-entry", "wrong fields"),
    "an entry is a list": (file_of(b'{"a":[]}', b""), "corrupt-safetensors-entry", "not an object"),
    "deep lists": (
        file_of(b'{"a":{"shape":' + b"[" * 3000 + b"]" * 3000 + b"}}", b""),
        "corrupt-safetensors-nesting",
        "nested",
    ),
    "deeper lists than an entry may be long": (
        file_of(b'{"a":{"shape":' + b"[" * 10_000_000 + b"}}", b""),
        "corrupt-safetensors-nesting",
        "nested, unclosed or longer",
    ),
    "deep objects": (
        file_of(b'{"a":' * 1_000_000, b""),
        "corrupt-safetensors-nesting",
        "nested",
    ),
    "a name without end": (
        file_of(b'{"' + b"a" * 20_000_000, b""),
        "corrupt-safetensors-limit",
        "name is too long",
    ),
    "backslashes without end": (
        file_of(b'{"' + b"\\\\" * 10_000_000, b""),
        "corrupt-safetensors-limit",
        "name is too long",
    ),
    "twenty megabytes of blanks": (
        file_of(b"{" + b" " * 20_000_000, b""),
        "corrupt-safetensors-json",
        "malformed",
    ),
    "a lone surrogate": (file_of(SURROGATE, b""), "corrupt-safetensors-text", "not valid text"),
    "no UTF-8": (file_of(b'{"\xff\xfe":{}}', b""), "corrupt-safetensors-text", "not valid text"),
    "NaN": (
        file_of(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}', b""),
        "corrupt-safetensors-json",
        "not JSON",
    ),
    "a number of 4000 digits": (
        file_of(b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,0]}}', b""),
        "corrupt-safetensors-shape-overflow",
        "overflows",
    ),
}


@pytest.mark.parametrize("label", HOSTILE)
def test_a_hostile_header_is_refused_quickly_in_little_memory_by_its_real_cause(
    label: str, tmp_path: Path
) -> None:
    data, kind, words = HOSTILE[label]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(FormatError) as caught:
            SafetensorsImporter().read(str(path))
        seconds = time.process_time() - begin
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert "x.safetensors" in str(caught.value)
    assert seconds < 1.0
    assert peak < 64 << 20


def test_a_header_at_the_limit_of_the_format_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 100_000_000) + b"{")
        file.truncate(8 + 100_000_000)
    tracemalloc.start()
    with pytest.raises(CorruptError, match="malformed"):
        SafetensorsImporter().read(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_special_file_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    os.mkfifo(path)
    with pytest.raises(CorruptError, match="not a regular file"):
        SafetensorsImporter().read(str(path))


def test_a_legal_header_may_be_padded_and_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(b" \n{ }    ", b""))
    tree = SafetensorsImporter().read(str(path))
    assert tree.tensors == {}
    assert tree.metadata == {}


def test_six_bit_elements_are_listed_and_refused_by_name_when_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    path.write_bytes(file_of(header, bytes(3)))
    tensor = SafetensorsImporter().read(str(path)).tensors["w"]
    assert (tensor.dtype, tensor.shape) == ("float6_e2m3fn", (4,))
    with pytest.raises(UnsupportedError, match="tensor 'w'"):
        tensor.fetch()


def test_a_bool_that_is_neither_0_nor_1_is_refused_by_name_and_element(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {"flag": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}
    path.write_bytes(file_of(header, b"\0\1\2"))
    tensor = SafetensorsImporter().read(str(path)).tensors["flag"]
    with pytest.raises(CorruptError, match="tensor 'flag', element 2: found 2"):
        tensor.fetch()


GOOD = file_of(
    {
        "__metadata__": {"format": "pt"},
        **PAIR,
        "c": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    },
    bytes(16),
)


@given(st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_give_a_tree_or_a_format_error(tmp_path: Path, data: st.DataObject) -> None:
    good = bytearray(GOOD)
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(good) - 1))
        good[position] = data.draw(st.integers(0, 255))
    tail = data.draw(st.binary(max_size=40))
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(good[: data.draw(st.integers(0, len(good)))]) + tail)
    try:
        tree = SafetensorsImporter().read(str(path))
        for tensor in tree.tensors.values():
            assert tensor.fetch().shape == tensor.shape
    except FormatError:
        pass


def test_more_keys_of_metadata_than_anybody_writes_are_refused(tmp_path: Path) -> None:
    keys = ",".join(f'"{number}":""' for number in range((1 << 17) + 1))
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(f'{{"__metadata__":{{{keys}}}}}'.encode(), b""))
    with pytest.raises(FormatError, match="__metadata__ has too many keys"):
        SafetensorsImporter().read(str(path))


def test_an_index_of_more_files_than_a_folder_has_is_refused(tmp_path: Path) -> None:
    names = {f"w{number}": f"{number}.safetensors" for number in range((1 << 14) + 1)}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CorruptError, match="the index names too many files"):
        SafetensorsImporter().read(str(path))
