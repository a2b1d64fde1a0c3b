"""Damaged and hostile bundles: a typed error, in little memory, and nothing believed unchecked."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CheckpointError, CorruptError, UnsupportedError
from ckptfmt.foreign import ForeignCheckpoint, read_foreign, streaming
from ckptfmt.foreign.bundle.slices import slice_key
from ckptfmt.foreign.bundle.types import Slice
from ckptfmt.foreign.crc32c import crc32c, masked
from ckptfmt.foreign.sstable import MAGIC

FLOAT = 1
Rows = list[tuple[bytes, bytes]]


def varint(value: int) -> bytes:
    made = b""
    while value > 127:
        made += bytes([value & 127 | 128])
        value >>= 7
    return made + bytes([value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """Fields of a protocol buffer: numbers as varints."""
    made = b""
    for number, value in fields:
        if isinstance(value, bytes):
            made += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            made += varint(number << 3) + varint(value % (1 << 64))
    return made


def shape_of(*dims: int) -> bytes:
    return message(*[(2, message((1, dim))) for dim in dims])


def entry(
    data: bytes, *dims: int, offset: int = 0, dtype: int = FLOAT, more: bytes = b"", shard: int = 0
) -> bytes:
    fields: list[tuple[int, int | bytes]] = [
        (1, dtype),
        (2, shape_of(*dims)),
        (3, shard),
        (4, offset),
        (5, len(data)),
    ]
    return message(*fields) + b"\x35" + masked(crc32c(data)).to_bytes(4, "little") + more


def block(rows: Rows) -> bytes:
    made = b""
    last = b""
    for key, value in rows:
        shared = 0
        while shared < min(len(key), len(last)) and key[shared] == last[shared]:
            shared += 1
        made += varint(shared) + varint(len(key) - shared) + varint(len(value))
        made += key[shared:] + value
        last = key
    return made + bytes(4) + (1).to_bytes(4, "little")


def sealed(raw: bytes, kind: int = 0) -> bytes:
    body = raw + bytes([kind])
    return body + masked(crc32c(body)).to_bytes(4, "little")


def table(raw: bytes, *, kind: int = 0, handle: bytes | None = None) -> bytes:
    made = sealed(raw, kind)
    first = varint(0) + varint(len(raw)) if handle is None else handle
    index = block([(b"\xff", first)])
    at = len(made)
    made += sealed(index)
    footer = varint(at) + varint(len(index)) + varint(at) + varint(len(index))
    return made + footer.ljust(40, b"\0") + MAGIC


HEADER = message((1, 1), (3, message((1, 1))))
Write = Callable[..., Path]
Mutations = Callable[[bytes, int, int], list[bytes]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(rows or the index's bytes, data) -> prefix."""

    def write(
        rows: Rows | bytes, data: bytes = b"", *, header: bytes = HEADER, shards: int = 1
    ) -> Path:
        index = rows if isinstance(rows, bytes) else table(block([(b"", header), *rows]))
        (tmp_path / "x.index").write_bytes(index)
        for shard in range(shards):
            (tmp_path / f"x.data-{shard:05d}-of-{shards:05d}").write_bytes(data)
        return tmp_path / "x"

    return write


DATA = np.arange(6, dtype="<f4").tobytes()
GOOD: Rows = [(b"a/b", entry(DATA, 2, 3)), (b"a/c", entry(DATA[:4], offset=24))]


def test_a_bundle_of_our_own_hand_is_read(write: Write) -> None:
    loaded = ckptfmt.open_foreign(write(GOOD, DATA + DATA[:4])).load()
    assert loaded["a"]["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["a"]["c"] == 0


def test_fields_in_any_order_are_read(write: Write) -> None:
    """Writers put them in order; the format does not ask for it."""
    crc = b"\x35" + masked(crc32c(DATA)).to_bytes(4, "little")
    parts = [message((5, len(DATA))), crc, message((2, shape_of(6))), message((1, FLOAT))]
    row = entry(DATA[:4], offset=len(DATA))
    rows = [(b"v", b"".join(parts)), (b"w", row), (b"x", entry(b"", 0, 3))]
    loaded = ckptfmt.open_foreign(write(rows, DATA + DATA[:4])).load()
    assert loaded["v"].tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded["w"] == 0
    assert loaded["x"].shape == (0, 3)


def test_an_empty_tensor_alone_in_a_data_file_is_read(write: Write) -> None:
    rows = [(b"v", entry(DATA, 6)), (b"w", entry(b"", 0, shard=1))]
    prefix = write(rows, DATA, header=message((1, 2)), shards=2)
    assert ckptfmt.open_foreign(prefix).load()["w"].shape == (0,)


@pytest.mark.parametrize("dtype", ["<i4", "<f8", "<c16", "<u2", "|b1", "|i1"])
def test_big_endian_values_are_read(write: Write, dtype: str) -> None:
    number = {"<i4": 3, "<f8": 2, "<c16": 18, "<u2": 17, "|b1": 10, "|i1": 6}[dtype]
    values = np.array([1, 0, 1]).astype(dtype)
    data = values.astype(values.dtype.newbyteorder(">")).tobytes()
    header = message((1, 1), (2, 1))
    prefix = write([(b"v", entry(data, 3, dtype=number))], data, header=header)
    found = ckptfmt.open_foreign(prefix)["v"].read()
    assert found.tolist() == values.tolist()
    assert found.dtype.isnative


def test_big_endian_values_stream_to_the_same_checkpoint(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 64)
    values = (np.arange(70) * (1 + 2j)).reshape(7, 10).astype(np.complex64)
    data = values.astype(">c8").tobytes()
    header = message((1, 1), (2, 1))
    prefix = write([(b"v", entry(data, 7, 10, dtype=8))], data, header=header)
    ckptfmt.convert(prefix, tmp_path / "s", durable=False)
    assert np.array_equal(ckptfmt.load(tmp_path / "s")["v"], values)


def test_big_endian_strings_and_bfloat16(write: Write) -> None:
    lengths = (2).to_bytes(4, "big") + (0).to_bytes(4, "big")
    word = masked(crc32c(lengths)).to_bytes(4, "big")
    data = b"\x02\x00" + word + b"hi"
    crc = masked(crc32c(lengths + word + b"hi")).to_bytes(4, "little")
    text = message((1, 7), (2, shape_of(2)), (5, len(data))) + b"\x35" + crc
    half = entry(b"\x3f\x80", offset=len(data), dtype=14)
    header = message((1, 1), (2, 1))
    foreign = ckptfmt.open_foreign(
        write([(b"s", text), (b"t", half)], data + b"\x3f\x80", header=header)
    )
    assert foreign["s"].read().tolist() == [b"hi", b""]
    assert float(foreign["t"].read()) == 1.0


def test_snappy_blocks_are_read(write: Write) -> None:
    raw = block([(b"", HEADER), *GOOD])
    literal = bytes([60 << 2, len(raw) - 3]) + raw[:-2]
    # The last two bytes as a copy of the two zeros before them that repeats itself.
    packed = varint(len(raw)) + literal + bytes([1 << 2 | 2]) + (1).to_bytes(2, "little")
    assert raw[-3:] == bytes(3)
    foreign = ckptfmt.open_foreign(write(table(packed, kind=1), DATA + DATA[:4]))
    assert list(foreign) == ["a/b", "a/c"]
    with pytest.raises(CorruptError, match="too long"):
        ckptfmt.open_foreign(write(table(varint(1 << 31) + literal, kind=1)))
    with pytest.raises(CorruptError, match="begins before"):
        ckptfmt.open_foreign(write(table(varint(4) + b"\x02\x01\x00", kind=1)))
    with pytest.raises(UnsupportedError, match="unknown block compression") as caught:
        ckptfmt.open_foreign(write(table(raw, kind=4)))
    assert caught.value.kind == "unsupported-tensorbundle-compression"


BIG = 1 << 62
SLICES = message((7, message((1, message((1, 0), (2, 2))))))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(b"v", entry(DATA, 7))], "bytes do not match"),
        ([(b"v", entry(DATA, 6, offset=20))], "ends behind its file"),
        ([(b"v", entry(DATA, BIG, BIG, 0))], "overflows"),
        ([(b"v", entry(DATA, -1))], "negative dimension"),
        ([(b"v", entry(DATA, 6, offset=BIG * 2))], "overflows"),
        ([(b"v", entry(DATA, 6, offset=-8))], "overflows"),
        ([(b"v", entry(DATA, 6)), (b"w", entry(DATA, 6))], "two tensors overlap"),
        ([(b"v", entry(DATA, 6, shard=1))], "no such shard"),
        ([(b"v", entry(DATA, 6, dtype=99))], "unknown dtype"),
        ([(b"v", entry(DATA, *[1] * 65, 6))], "too many dimensions"),
        ([(b"v", entry(DATA, 6)[:-2])], "ends behind its message"),
        ([(b"v", b"\x08")], "cut off"),
        ([(b"v", b"\x08" + b"\xff" * 10)], "varint"),
        ([(b"v", b"\x48\x01")], "unknown field"),
        ([(b"v", b"\x12\x05\x12\x7f\x01\x02\x03")], "ends behind its message"),
        ([(b"\xff\xfe", entry(DATA, 6))], "not UTF-8"),
        ([(b"w", entry(DATA, 6)), (b"v", entry(DATA, 6))], "out of order"),
        ([(b"v", entry(b"", 2, more=SLICES))], "not there"),
        ([(b"v", entry(b"", 2, 3, more=SLICES))], "another rank"),
        ([(b"v", entry(b"", 1, more=SLICES))], "lies outside"),
        ([(b"s", entry(b"\x01", 5, dtype=7))], "fewer bytes than strings"),
    ],
)
def test_an_entry_that_does_not_hold_is_refused(write: Write, rows: Rows, text: str) -> None:
    with pytest.raises((CorruptError, UnsupportedError), match=text) as caught:
        ckptfmt.open_foreign(write(rows, DATA))
    assert (
        "x.index" in str(caught.value)
        or "x.data" in str(caught.value)
        or "'v'" in str(caught.value)
    )


def test_a_slice_of_another_shape_is_refused(write: Write) -> None:
    key = slice_key("v", Slice((0,), (2,)))
    rows = [(key, entry(DATA[:4], 1)), (b"v", entry(b"", 2, more=SLICES))]
    with pytest.raises(CorruptError, match="another dtype or shape"):
        ckptfmt.open_foreign(write(rows, DATA))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (message((1, 0)), "number of shards"),
        (message((1, 1 << 31)), "number of shards"),
        (message((1, 1), (2, 2)), "byte order"),
        (message((1, 1), (3, message((1, 3), (2, 2)))), "newer version"),
        (message((1, b"x")), "another type"),
        (b"\x0b", "wire type 3"),
    ],
)
def test_a_header_that_does_not_hold_is_refused(write: Write, header: bytes, text: str) -> None:
    with pytest.raises((CorruptError, UnsupportedError), match=text):
        ckptfmt.open_foreign(write(GOOD, DATA * 2, header=header))


def test_a_table_without_a_header_is_no_bundle(write: Write) -> None:
    with pytest.raises(CorruptError, match="no header"):
        ckptfmt.open_foreign(write(table(block(GOOD)), DATA * 2))


def test_a_handle_that_leads_outside_is_refused(write: Write) -> None:
    for handle in (varint(1 << 60) + varint(5), varint(0) + varint(1 << 63), varint(0)):
        with pytest.raises(CorruptError):
            ckptfmt.open_foreign(write(table(block(GOOD), handle=handle)))


def test_a_flipped_bit_of_a_value_is_found_when_it_is_read(write: Write, tmp_path: Path) -> None:
    data = bytearray(DATA + DATA[:4])
    data[5] ^= 4
    foreign = ckptfmt.open_foreign(write(GOOD, bytes(data)))
    assert foreign["a/c"].read() == 0
    with pytest.raises(CorruptError, match="checksum differs") as caught:
        foreign["a/b"].read()
    assert caught.value.kind == "corrupt-tensorbundle-crc"
    assert "x.data-00000-of-00001[0:24), tensor 'a/b'" in str(caught.value)
    assert [damage.tensor for damage in foreign.verify().problems] == ["a/b"]
    with pytest.raises(CorruptError):
        ckptfmt.convert(tmp_path / "x", tmp_path / "s", durable=False)
    assert ckptfmt.Store(tmp_path / "s").names() == []


def test_keys_that_share_all_with_their_predecessor_cannot_fill_memory(write: Write) -> None:
    """A few bytes an entry, and each key is longer than the one before: gigabytes of names."""
    first = varint(0) + varint(0) + varint(len(HEADER)) + HEADER
    none = entry(b"", 0)
    size = varint(len(none))
    long = varint(0) + varint(1 << 19) + size + b"k" * (1 << 19) + none
    grow = b"".join(varint((1 << 19) + n) + b"\x01" + size + b"k" + none for n in range(20_000))
    raw = first + long + grow + bytes(4) + (1).to_bytes(4, "little")
    prefix = write(table(raw))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="too long"):
            ckptfmt.open_foreign(prefix)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def graph_bundle(write: Write, graph: bytes, *names: bytes) -> Path:
    """A bundle of scalars with this object graph."""
    lengths = len(graph).to_bytes(4, "little")
    word = masked(crc32c(lengths)).to_bytes(4, "little")
    data = varint(len(graph)) + word + graph
    crc = masked(crc32c(lengths + word + graph)).to_bytes(4, "little")
    row = message((1, 7), (5, len(data))) + b"\x35" + crc
    rows = [(b"_CHECKPOINTABLE_OBJECT_GRAPH", row)]
    for at, name in enumerate(sorted(names)):
        rows.append((name, entry(DATA[:4], offset=len(data) + 4 * at)))
    return write(rows, data + DATA[:4] * len(names))


def node(*children: tuple[str, int], key: str = "") -> bytes:
    fields = [(1, message((1, number), (2, name.encode()))) for name, number in children]
    if key:
        value = message((1, b"VARIABLE_VALUE"), (2, b"full"), (3, key.encode()))
        fields.append((2, value))
    return message((1, message(*fields)))


def test_a_cyclic_graph_ends(write: Write) -> None:
    key = "a/v/.ATTRIBUTES/VARIABLE_VALUE"
    graph = node(("a", 1), ("self", 0)) + node(("up", 0), ("v", 2), ("a", 1)) + node(key=key)
    tree = ckptfmt.open_foreign(graph_bundle(write, graph, key.encode())).foreign
    assert list(tree.tensors) == ["a/v"]
    assert tree.tensors["a/v"].attributes == {"tf.full_name": "full"}


def test_a_graph_with_more_paths_than_memory_ends(write: Write) -> None:
    """Every object has two names for the next: 2^200 paths to the variable."""
    depth = 200
    key = "/".join("a" * depth) + "/.ATTRIBUTES/VARIABLE_VALUE"
    graph = b"".join(node(("a", n + 1), ("b", n + 1)) for n in range(depth)) + node(key=key)
    tree = ckptfmt.open_foreign(graph_bundle(write, graph, key.encode())).foreign
    (tensor,) = tree.tensors.values()
    assert len(tensor.attributes["tf.aliases"]) <= 32  # type: ignore[arg-type]


def test_a_graph_that_leads_nowhere_is_refused(write: Write) -> None:
    with pytest.raises(CorruptError, match="an object that is not there"):
        ckptfmt.open_foreign(graph_bundle(write, node(("a", 7))))
    with pytest.raises(CorruptError, match="ends behind its message"):
        ckptfmt.open_foreign(graph_bundle(write, node(("a", 0))[:-1]))


def test_a_very_deep_graph_ends(write: Write) -> None:
    key = "v/.ATTRIBUTES/VARIABLE_VALUE"
    graph = b"".join(node(("a", n + 1)) for n in range(20_000)) + node(key=key)
    tree = ckptfmt.open_foreign(graph_bundle(write, graph, key.encode())).foreign
    assert list(tree.tensors) == ["v"]


def test_two_variables_that_a_graph_gives_one_name_keep_their_own(write: Write) -> None:
    keys = [f"{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in ("v", "w")]
    graph = node(("x", 1), ("x", 2)) + node(key=keys[0]) + node(key=keys[1])
    prefix = graph_bundle(write, graph, *[key.encode() for key in keys])
    tree = ckptfmt.open_foreign(prefix).foreign
    assert {tensor.foreign_name for tensor in tree.tensors.values()} == set(keys)
    assert len(tree.tensors) == 2


def spoiled(
    index: bytes, data: bytes, seed: int, mutations: Mutations
) -> list[tuple[bytes, bytes]]:
    """Mutated files, three indexes for each data file; half with checksums made right again."""
    made = [(bad, data) for bad in mutations(index, seed, 150)]
    made += [(index, bad) for bad in mutations(data, seed, 50)]
    rng = random.Random(seed)
    for _ in range(200):
        raw = bytearray(block([(b"", HEADER), *GOOD]))
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        made.append((table(bytes(raw)), data))
    return made


def test_mutated_bundles_give_the_right_values_or_a_typed_error(
    write: Write, seed: int, mutations: Mutations
) -> None:
    data = DATA + DATA[:4]
    good = table(block([(b"", HEADER), *GOOD]))
    errors = 0
    tracemalloc.start()
    try:
        for index, values in spoiled(good, data, seed, mutations):
            try:
                prefix = write(index, values)
                tree = read_foreign(prefix, source_format="tensorbundle")
                ForeignCheckpoint(str(prefix), tree).load()
            except CheckpointError:
                errors += 1
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert errors > 250
