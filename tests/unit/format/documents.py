"""An index and a data file taken apart: nested maps of columns that a test changes and seals again.

The header, the digests and the lengths are made here, not by the package, so that a test reaches
the rule it breaks and no other.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

INDEX_MAGIC = bytes.fromhex("89434B490D0A1A00")
DATA_MAGIC = bytes.fromhex("89434B440D0A1A00")
SECTIONS = ("about", "files", "tree", "placement")
SIZES = {"xxh3-128": 16, "sha256": 32}
CODES = {"xxh3-128": 1, "sha256": 2}


def digest(data: bytes, algorithm: str) -> bytes:
    return (
        xxhash.xxh3_128_digest(data) if algorithm == "xxh3-128" else hashlib.sha256(data).digest()
    )


def column(width: str, *numbers: int) -> np.ndarray[Any, Any]:
    """`column("u4", 1, 2)`: a little-endian column."""
    return np.array(numbers, f"<{width}")


def pack(table: Any) -> bytes:
    """msgpack, columns as bin; raw bytes that stand for a whole section stay as they are."""
    if isinstance(table, bytes):
        return table
    made: bytes = msgpack.packb(table, default=lambda c: np.ascontiguousarray(c).tobytes())
    return made


class Parts:
    """Places in nested maps by paths: `tree/regions/extent`."""

    def find(self, path: str) -> tuple[dict[str, Any], str]:
        head, *rest = path.split("/")
        if not rest:
            return vars(self), head
        holder = getattr(self, head)
        for key in rest[:-1]:
            holder = holder[key]
        return holder, rest[-1]

    def get(self, path: str) -> Any:
        holder, key = self.find(path)
        return holder[key]

    def set(self, path: str, value: object) -> None:
        holder, key = self.find(path)
        holder[key] = value

    def drop(self, path: str) -> None:
        holder, key = self.find(path)
        del holder[key]

    def put(self, path: str, row: int, value: object) -> None:
        """Change one row of a column or list."""
        self.get(path)[row] = value

    def cut(self, path: str, rows: int) -> None:
        """Keep the first rows of a column or list (all but the last -rows)."""
        self.set(path, self.get(path)[:rows])

    def repeat(self, path: str, row: int) -> None:
        """A row of a column or list once more, at its end."""
        found = self.get(path)
        more = found[row : row + 1] if row != -1 else found[-1:]
        self.set(
            path,
            [*found, *more] if isinstance(found, list) else np.concatenate([found, more]),
        )

    def slots(self) -> Iterator[tuple[str, Any]]:
        """Every path with what is there: maps and what is in them."""
        for name, part in vars(self).items():
            if isinstance(part, dict):
                yield from _slots(name, part)

    def copy(self) -> Any:
        return copy.deepcopy(self)


def _slots(path: str, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        yield f"{path}/{key}", value
        if isinstance(value, dict):
            yield from _slots(f"{path}/{key}", value)


class Document(Parts):
    """An index: four sections, and what the header says of them."""

    def __init__(self, algorithm: str = "xxh3-128") -> None:
        self.algorithm = algorithm
        self.header: dict[str, Any] = {
            "magic": INDEX_MAGIC, "major": 1, "minor": 0, "code": CODES[algorithm],
            "zeros": b"", "commit_id": bytes(range(16)),
        }  # fmt: skip
        self.encodings = [0, 0, 0, 0]
        self.rows: dict[int, dict[str, Any]] = {}
        """Section -> what its row in the header is to say instead of the truth."""
        self.about: Any = {}
        self.files: Any = {}
        self.tree: Any = {}
        self.placement: Any = {}

    def slots(self) -> Iterator[tuple[str, Any]]:
        for name in SECTIONS:
            part = getattr(self, name)
            if isinstance(part, dict):
                yield from _slots(name, part)

    def pack(self) -> bytes:
        """The document, with digests and lengths that fit what it holds now."""
        tree = pack(self.tree)
        about = self.about
        if isinstance(about, dict) and repr(about.get("tree_digest")) == "b''":
            about = {**about, "tree_digest": digest(tree, self.algorithm)}
        raw = [pack(about), pack(self.files), tree, pack(self.placement)]
        stored: list[bytes] = []
        rows = b""
        for position, section in enumerate(raw):
            data = section
            if self.encodings[position] == 1:
                data = zstandard.ZstdCompressor(level=1).compress(section)
            row: dict[str, Any] = {
                "encoding": self.encodings[position], "zeros": b"", "stored": len(data),
                "raw": len(section), "digest": digest(data, self.algorithm),
            } | self.rows.get(position, {})  # fmt: skip
            stored.append(row.pop("data", data))
            rows += struct.pack("<B7sQQ32s", *row.values())
        head = struct.pack("<8sHHB3s16s", *self.header.values()) + rows
        return b"".join([head, digest(head, self.algorithm).ljust(32, b"\0"), *stored])


# Name of the first leaf, dtype, bits, shape, boxes, raw lengths of the chunks of each box.
_TENSORS: list[tuple[str, str, int, tuple[int, ...], list[Any], list[list[int]]]] = [
    ("model/a", "float32", 32, (1024,), [((0,), (1024,))], [[4096]]),
    ("model/b", "float32", 32, (), [((), ())], [[4]]),
    ("nibbles", "int4", 4, (3, 5), [((0, 0), (3, 5))], [[8]]),
    ("text", "string", 0, (2,), [((0,), (2,))], [[27]]),
    ("long", "uint8", 8, (5000,), [((0,), (5000,))], [[4096, 904]]),
    ("empty", "float32", 32, (0, 3), [], []),
    # Five boxes that no straight cut separates.
    ("cut", "float32", 32, (3, 3),
     [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 2))],
     [[8], [8], [8], [4], [8]]),
    ("packed", "float32", 32, (2048,), [((0,), (2048,))], [[4096, 4096]]),
    ("rare", "float24_of_tomorrow", 24, (2, 2), [((0, 0), (2, 2))], [[12]]),
    ("same", "float32", 32, (), [((), ())], [[4]]),
]  # fmt: skip
_PACKED_VALUE, _ENCODED, _SHARED = 4, 7, 9


def index(algorithm: str = "xxh3-128") -> Document:
    """An index with something of everything: ties, values, boxes, strings, codecs, attributes."""
    made = Document(algorithm)
    size = SIZES[algorithm]
    dtypes: dict[tuple[str, int], int] = {}
    tensor_dtypes = [dtypes.setdefault(t[1:3], len(dtypes)) for t in _TENSORS]
    leaves = [(t[0], 2 if row == _PACKED_VALUE else 0, row) for row, t in enumerate(_TENSORS)]
    leaves[2:2] = [("model/count", 1, 0), ("model/tied", 0, 0)]
    leaves.append(("note", 1, 1))
    boxes = [(row, box) for row, t in enumerate(_TENSORS) for box in t[4]]
    raw = [(row, n) for row, t in enumerate(_TENSORS) for lengths in t[5] for n in lengths]
    digests = [digest(f"chunk {i}".encode(), algorithm) for i in range(len(raw))]
    digests[-1] = digests[1]
    made.tree = {
        "dtypes": {"name": [d for d, _ in dtypes], "bits": column("u4", *(b for _, b in dtypes))},
        "leaves": {
            "name": [leaf[0] for leaf in leaves],
            "kind": column("u1", *(leaf[1] for leaf in leaves)),
            "row": column("u4", *(leaf[2] for leaf in leaves)),
        },
        "values": [msgpack.packb(7), msgpack.packb("seven")],
        "containers": {
            "name": ["model"], "kind": ["odict"], "argument": [msgpack.packb(None)]
        },
        "tensors": {
            "dtype": column("u2", *tensor_dtypes),
            "ndim": column("u1", *(len(t[3]) for t in _TENSORS)),
            "dims": column("u8", *(d for t in _TENSORS for d in t[3])),
        },
        "regions": {
            "tensor": column("u4", *(row for row, _ in boxes)),
            "origin": column("u8", *(o for _, box in boxes for o in box[0])),
            "extent": column("u8", *(e for _, box in boxes for e in box[1])),
            "nchunks": column("u4", *(len(c) for t in _TENSORS for c in t[5])),
        },
        "chunks": {
            "raw": column("u4", *(n for _, n in raw)),
            "digest": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, size).copy(),
        },
        "attributes": {
            "leaves": {
                "torch.requires_grad": {
                    "rows": column("u4", 0, 3),
                    "values": [msgpack.packb(True), msgpack.packb(False)],
                }
            },
            "containers": {},
        },
    }  # fmt: skip
    _place(made, raw, digests)
    made.about = {
        "name": f"step-{7:016d}", "step": 7, "created": "2026-01-02T03:04:05.678901Z",
        "txn": bytes(range(16)), "parent": [f"step-{6:016d}", bytes(size)],
        "writer": "documents", "digest": algorithm, "tree_digest": b"", "requires": [],
        "nbytes": 1, "tensors": len(_TENSORS), "metrics": {"loss": 0.5, "epoch": 3},
        "metadata": {"commit": "abc", "lr": [0.1, 0.2]},
    }  # fmt: skip
    return made


def many(count: int) -> bytes:
    """An index of `count` tensors of 16 bytes, of one region and one chunk each, packed."""
    made = Document()
    rows = np.arange(count)
    made.tree = {
        "dtypes": {"name": ["float32"], "bits": column("u4", 32)},
        "leaves": {
            "name": [f"layers.{row // 20}.block.{row % 20}.weight" for row in range(count)],
            "kind": np.zeros(count, "<u1"),
            "row": rows.astype("<u4"),
        },
        "values": [],
        "containers": {"name": [], "kind": [], "argument": []},
        "tensors": {
            "dtype": np.zeros(count, "<u2"),
            "ndim": np.ones(count, "<u1"),
            "dims": np.full(count, 4, "<u8"),
        },
        "regions": {
            "tensor": rows.astype("<u4"),
            "origin": np.zeros(count, "<u8"),
            "extent": np.full(count, 4, "<u8"),
            "nchunks": np.ones(count, "<u4"),
        },
        "chunks": {
            "raw": np.full(count, 16, "<u4"),
            "digest": np.arange(16 * count, dtype="<u8").astype("<u1"),
        },
    }
    made.files = {"id": bytes(16), "nbytes": column("u8", -(-(64 * count + 128) // 4096) * 4096)}
    made.placement = {
        "file": np.zeros(count, "<u4"),
        "offset": (64 * (rows + 1)).astype("<u8"),
        "stored": np.full(count, 16, "<u4"),
        "codec": np.zeros(count, "<u1"),
        "pipelines": [[]],
    }
    made.about = index().about
    return made.pack()


def _place(made: Document, raw: list[tuple[int, int]], digests: list[bytes]) -> None:
    """Two files: the last tensors but one lie in the second, the last shares the second chunk."""
    size = SIZES[made.algorithm]
    rows: list[tuple[int, int, int, int]] = []
    position = 64
    for row, nbytes in raw:
        encoded = row == _ENCODED
        stored = 100 if encoded else nbytes
        if row == _ENCODED and (not rows or rows[-1][0] == 0):
            position = 4096
        rows.append((int(row >= _ENCODED), position, stored, int(encoded)))
        position += -(-stored // 64) * 64
    rows[-1] = rows[1]
    stored_digests = [
        digest(b"stored" + d, made.algorithm) if row[3] else d for d, row in zip(digests, rows)
    ]
    made.files = {
        "id": np.frombuffer(b"\x01" * size + b"\x02" * size, np.uint8).reshape(2, size).copy(),
        "nbytes": column("u8", 16384, 8192),
    }
    made.placement = {
        "file": column("u4", *(r[0] for r in rows)),
        "offset": column("u8", *(r[1] for r in rows)),
        "stored": column("u4", *(r[2] for r in rows)),
        "codec": column("u1", *(r[3] for r in rows)),
        "pipelines": [[], [["zstd"]]],
        "digest": np.frombuffer(b"".join(stored_digests), np.uint8).reshape(-1, size).copy(),
    }


class DataFile(Parts):
    """A data file: chunks, a table, and what head and footer say of them."""

    def __init__(self, algorithm: str = "xxh3-128") -> None:
        self.algorithm = algorithm
        code = CODES[algorithm]
        self.head: dict[str, Any] = {
            "magic": DATA_MAGIC, "major": 1, "minor": 0, "code": code, "zeros": b""
        }  # fmt: skip
        self.footer: dict[str, Any] = {}
        """What the footer is to say instead of the truth."""
        self.chunks: dict[int, bytes] = {}
        self.table: Any = {}
        self.nbytes = 0
        """Of the whole file; 0: as many blocks as it needs."""

    def slots(self) -> Iterator[tuple[str, Any]]:
        if isinstance(self.table, dict):
            yield from _slots("table", self.table)

    def parts(self) -> tuple[bytes, int, bytes, bytes]:
        """(head, offset of the table, table, footer)."""
        table = pack(self.table)
        end = max([64, *(offset + len(data) for offset, data in self.chunks.items())])
        offset = -(-end // 64) * 64
        footer = {
            "offset": offset, "nbytes": len(table), "code": CODES[self.algorithm], "zeros": b"",
            "digest": digest(table, self.algorithm), "magic": DATA_MAGIC,
        } | self.footer  # fmt: skip
        head = struct.pack("<8sHHB51s", *self.head.values())
        return head, offset, table, struct.pack("<QQB7s32s8s", *footer.values())

    def pack(self) -> bytes:
        head, offset, table, footer = self.parts()
        nbytes = self.nbytes or -(-(offset + len(table) + 64) // 4096) * 4096
        made = bytearray(nbytes)
        made[:64] = head
        for start, data in self.chunks.items():
            made[start : start + len(data)] = data
        made[offset : offset + len(table)] = table
        made[nbytes - 64 :] = footer
        return bytes(made)


def data_file(algorithm: str = "xxh3-128") -> DataFile:
    """A data file with three regions, one of them a part of its tensor, one encoded."""
    made = DataFile(algorithm)
    raw = [bytes([1]) * 4096, bytes([2]) * 40, bytes([3]) * 4096, bytes([4]) * 100]
    stored = [raw[0], raw[1], zstandard.ZstdCompressor().compress(raw[2]), raw[3]]
    offsets, position = [], 4096
    for data in stored:
        offsets.append(position)
        made.chunks[position] = data
        position += -(-len(data) // 64) * 64
    raw_digests = b"".join(digest(data, algorithm) for data in raw)
    stored_digests = b"".join(digest(data, algorithm) for data in stored)
    size = SIZES[algorithm]
    made.table = {
        "salt": 0,
        "dtypes": {"name": ["float32", "uint8"], "bits": column("u4", 32, 8)},
        "regions": {
            "name": ["a", "b", "c"],
            "dtype": column("u2", 0, 0, 1),
            "ndim": column("u1", 1, 2, 1),
            "shape": column("u8", 1034, 8, 10, 4196),
            "origin": column("u8", 0, 4, 0, 0),
            "extent": column("u8", 1034, 1, 10, 4196),
            "nchunks": column("u4", 1, 1, 2),
        },
        "chunks": {
            "start": column("u8", 0, 0, 0, 4096),
            "offset": column("u8", *offsets),
            "stored": column("u4", *map(len, stored)),
            "raw": column("u4", *map(len, raw)),
            "codec": column("u1", 0, 0, 1, 0),
            "digest": np.frombuffer(raw_digests, np.uint8).reshape(-1, size).copy(),
            "stored_digest": np.frombuffer(stored_digests, np.uint8).reshape(-1, size).copy(),
        },
        "pipelines": [[], [["zstd"]]],
    }  # fmt: skip
    return made


_WIDTHS = {
    "bits": "u4", "kind": "u1", "row": "u4", "rows": "u4", "dtype": "u2", "ndim": "u1",
    "dims": "u8", "tensor": "u4", "origin": "u8", "extent": "u8", "nchunks": "u4", "raw": "u4",
    "nbytes": "u8", "file": "u4", "offset": "u8", "stored": "u4", "codec": "u1",
}  # fmt: skip


def take_apart(data: bytes) -> Document:
    """An index that somebody wrote, as columns to be changed."""
    _, _, minor, code, _, commit_id = struct.unpack_from("<8sHHB3s16s", data)
    made = Document({1: "xxh3-128", 2: "sha256"}[code])
    made.header |= {"minor": minor, "commit_id": commit_id}
    at = 288
    for position, name in enumerate(SECTIONS):
        encoding, _, stored, _, _ = struct.unpack_from("<B7sQQ32s", data, 32 + 56 * position)
        raw = data[at : at + stored]
        at += stored
        if encoding:
            raw = zstandard.ZstdDecompressor().decompress(raw)
        setattr(made, name, _columns(msgpack.unpackb(raw), SIZES[made.algorithm]))
    made.about["tree_digest"] = b""
    return made


def _columns(table: dict[str, Any], size: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in table.items():
        made[key] = value
        if isinstance(value, dict):
            made[key] = _columns(value, size)
        elif isinstance(value, bytes) and key in _WIDTHS:
            made[key] = np.frombuffer(value, f"<{_WIDTHS[key]}").copy()
        elif isinstance(value, bytes) and key in ("id", "digest"):
            made[key] = np.frombuffer(value, np.uint8).reshape(-1, size).copy()
    return made
