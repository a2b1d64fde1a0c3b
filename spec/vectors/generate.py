"""Writes the vectors: a writer made from the specification, which shares no code with the package.

    python spec/vectors/generate.py          writes what is missing, and checks the rest
    python spec/vectors/generate.py --check  writes nothing; exit code 1 if a file differs

Deterministic: no clock, no randomness, and zstd frames made by hand (raw and run-length blocks).
A vector that was released is never edited: a new one is added.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import xxhash

HERE = Path(__file__).parent
BLOCK, ALIGN = 4096, 64
INDEX_MAGIC = bytes.fromhex("89434B490D0A1A00")
DATA_MAGIC = bytes.fromhex("89434B440D0A1A00")
CODES = {"xxh3-128": 1, "sha256": 2}
TXN = bytes(range(16))
COMMIT = bytes(range(0xA0, 0xB0))
CREATED = "2026-01-02T03:04:05.678901Z"


# -- small parts ----------------------------------------------------------------------------------


class Column:
    """A column of fixed-width numbers: B, H, I, Q."""

    def __init__(self, code: str, rows: Any = ()) -> None:
        self.code, self.rows = code, list(rows)

    def pack(self) -> bytes:
        return struct.pack(f"<{len(self.rows)}{self.code}", *self.rows)


class Splice(bytes):
    """Packed msgpack that stands in a map as it is."""


def pack(value: Any) -> bytes:
    """msgpack in its shortest forms; maps in their order."""
    if isinstance(value, Splice):
        return bytes(value)
    if isinstance(value, Column):
        return pack(value.pack())
    if isinstance(value, dict):
        head = msgpack.Packer().pack_map_header(len(value))
        return head + b"".join(pack(key) + pack(item) for key, item in value.items())
    if isinstance(value, list):
        head = msgpack.Packer().pack_array_header(len(value))
        return head + b"".join(pack(item) for item in value)
    made: bytes = msgpack.packb(value, use_bin_type=True)
    return made


def ext(tag: str, payload: Any, code: int = 1) -> Splice:
    data = pack([tag, payload])
    return Splice(msgpack.packb(msgpack.ExtType(code, data)))


def digest(data: bytes, algorithm: str) -> bytes:
    if algorithm == "sha256":
        return hashlib.sha256(data).digest()
    made: bytes = xxhash.xxh3_128_digest(data)
    return made


def stream(seed: str, nbytes: int) -> bytes:
    """Bytes that look random and are not."""
    made, number = b"", 0
    while len(made) < nbytes:
        made += hashlib.sha256(f"{seed} {number}".encode()).digest()
        number += 1
    return made[:nbytes]


def frame(raw: bytes, declared: int | None = None, *, size: bool = True) -> bytes:
    """A zstd frame by hand: run-length blocks where a block is one byte repeated, else raw ones."""
    declared = len(raw) if declared is None else declared
    head = b"\x28\xb5\x2f\xfd"
    # Single segment with a 4-byte content size; without a size, a window of 1 MiB.
    head += b"\xa0" + struct.pack("<I", declared) if size else b"\x00\x50"
    blocks, limit = b"", min(1 << 17, max(len(raw), 1))
    pieces = [raw[at : at + limit] for at in range(0, len(raw), limit)] or [b""]
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        run = len(piece) > 1 and piece == piece[:1] * len(piece)
        header = int(last) | (1 if run else 0) << 1 | len(piece) << 3
        blocks += struct.pack("<I", header)[:3] + (piece[:1] if run else piece)
    return head + blocks


def bits_of(elements: list[int], bits: int) -> bytes:
    """4.2: element i is bits [i * bits, (i + 1) * bits)."""
    word = sum((e & ((1 << bits) - 1)) << (i * bits) for i, e in enumerate(elements))
    return word.to_bytes((len(elements) * bits + 7) // 8, "little")


def strings(items: list[bytes]) -> bytes:
    """4.3."""
    offsets = [0]
    for item in items:
        offsets.append(offsets[-1] + len(item))
    return struct.pack(f"<{len(offsets)}Q", *offsets) + b"".join(items)


# -- what a checkpoint is made of ------------------------------------------------------------------


class Tensor:
    """Regions with their payloads; by default one region, one chunk."""

    def __init__(
        self,
        dtype: str,
        bits: int,
        shape: tuple[int, ...],
        payload: bytes = b"",
        *,
        regions: list[tuple[tuple[int, ...], tuple[int, ...], bytes]] | None = None,
        chunk: int = 1 << 22,
        codec: int = 0,
        twin: Any = None,
    ) -> None:
        self.dtype, self.bits, self.shape, self.chunk = dtype, bits, shape, chunk
        if regions is None:
            regions = [((0,) * len(shape), shape, payload)] if payload else []
        self.regions, self.codec = regions, codec
        # How a reader shows it: bytes, one an element under 8 bits; or a list of items.
        self.twin = payload if twin is None else twin

    def plain(self) -> dict[str, Any]:
        fixed = self.dtype not in ("string", "bytes")
        body = {"data": self.twin.hex()} if fixed else {"items": self.twin}
        return {"tensor": {"dtype": self.dtype, "shape": list(self.shape), **body}}


class Packed:
    """A value: its bytes, and how JSON shows it. `big`: stored as a tensor."""

    def __init__(self, data: Any, plain: Any, *, big: bool = False) -> None:
        self.data, self.plain_form, self.big = pack(data), plain, big

    def plain(self) -> Any:
        return self.plain_form


class Data:
    """A data file in the making; `take` gives (offset, stored, stored digest) of a chunk."""

    def __init__(self, algorithm: str, salt: int, pipelines: list[Any]) -> None:
        self.algorithm, self.salt, self.pipelines = algorithm, salt, pipelines
        self.body = bytearray(
            DATA_MAGIC + struct.pack("<HHB", 1, 0, CODES[algorithm]) + bytes(51)
        )
        self.dtypes: list[tuple[str, int]] = []
        self.regions: list[list[Any]] = []
        self.chunks: list[list[Any]] = []

    def region(self, name: str, tensor: Tensor, box: tuple[Any, Any], nbytes: int) -> None:
        align = BLOCK if nbytes >= 64 << 10 else ALIGN
        self.body += bytes(-len(self.body) % align)
        dtype = (tensor.dtype, tensor.bits)
        if dtype not in self.dtypes:
            self.dtypes.append(dtype)
        row = [name, self.dtypes.index(dtype), len(tensor.shape), tensor.shape, *box, 0]
        self.regions.append(row)

    def chunk(self, start: int, raw: bytes, stored: bytes, codec: int) -> tuple[Any, ...]:
        offset = len(self.body)
        self.body += stored
        both = digest(raw, self.algorithm), digest(stored, self.algorithm)
        self.chunks.append([start, offset, len(stored), len(raw), codec, *both])
        self.regions[-1][-1] += 1
        return offset, len(stored), both[1]

    def table(self) -> dict[str, Any]:
        def flat(column: int) -> list[int]:
            return [n for row in self.regions for n in row[column]]

        def of(column: int, rows: list[list[Any]]) -> list[Any]:
            return [row[column] for row in rows]

        chunks = {
            "start": Column("Q", of(0, self.chunks)),
            "offset": Column("Q", of(1, self.chunks)),
            "stored": Column("I", of(2, self.chunks)),
            "raw": Column("I", of(3, self.chunks)),
            "codec": Column("B", of(4, self.chunks)),
            "digest": b"".join(of(5, self.chunks)),
        }
        if any(of(4, self.chunks)):
            chunks["stored_digest"] = b"".join(of(6, self.chunks))
        return {
            "salt": self.salt,
            "dtypes": {
                "name": [name for name, _ in self.dtypes],
                "bits": Column("I", [bits for _, bits in self.dtypes]),
            },
            "regions": {
                "name": of(0, self.regions),
                "dtype": Column("H", of(1, self.regions)),
                "ndim": Column("B", of(2, self.regions)),
                "shape": Column("Q", flat(3)),
                "origin": Column("Q", flat(4)),
                "extent": Column("Q", flat(5)),
                "nchunks": Column("I", of(6, self.regions)),
            },
            "chunks": chunks,
            "pipelines": self.pipelines,
        }

    def finish(self, table: bytes | None = None) -> tuple[str, bytes]:
        """(id, bytes)."""
        table = pack(self.table()) if table is None else table
        body = bytes(self.body) + bytes(-len(self.body) % ALIGN)
        offset = len(body)
        body += table
        body += bytes(-(len(body) + 64) % BLOCK)
        name = digest(table, self.algorithm)
        footer = struct.pack("<QQB7s32s", offset, len(table), CODES[self.algorithm], b"", name)
        return name.hex(), body + footer + DATA_MAGIC

    def content(self) -> dict[str, Any]:
        rows, at = [], 0
        for name, dtype, _, shape, origin, extent, count in self.regions:
            keys = ("start", "offset", "stored", "raw", "codec", "digest", "stored_digest")
            chunks = [dict(zip(keys, row)) for row in self.chunks[at : at + count]]
            for chunk in chunks:
                chunk["digest"] = chunk["digest"].hex()
                chunk["stored_digest"] = chunk["stored_digest"].hex()
            at += count
            rows.append(
                {
                    "name": name,
                    "dtype": list(self.dtypes[dtype]),
                    "shape": list(shape),
                    "origin": list(origin),
                    "extent": list(extent),
                    "chunks": chunks,
                }
            )
        return {
            "algorithm": self.algorithm,
            "salt": self.salt,
            "pipelines": self.pipelines,
            "regions": rows,
        }


class Draft:
    """An index before it is sealed: four sections that a test may bend, then `seal`."""

    def __init__(
        self,
        leaves: list[tuple[str, Any]],
        *,
        algorithm: str = "xxh3-128",
        containers: list[tuple[str, str, Any]] | None = None,
        pipelines: list[Any] | None = None,
        salt: int = 0,
        encoding: int = 0,
        minor: int = 0,
        about: dict[str, Any] | None = None,
        share: bool = False,
        files: int = 1,
    ) -> None:
        self.algorithm, self.encoding, self.minor = algorithm, encoding, minor
        self.pipelines = pipelines or [[]]
        self.datas = [Data(algorithm, salt, self.pipelines) for _ in range(files)]
        self.leaves, self.share = leaves, share
        self._rows(leaves)
        self._sections(containers or [], about or {})

    def _rows(self, leaves: list[tuple[str, Any]]) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[bytes] = []
        self.dtypes: list[tuple[str, int]] = []
        self.leaf_rows: list[tuple[str, int, int]] = []
        self.region_rows: list[tuple[int, Any, Any, int]] = []
        self.chunk_rows: list[list[Any]] = []  # raw, digest, data, offset, stored, codec, digest
        for name, leaf in leaves:
            if isinstance(leaf, Packed) and not leaf.big:
                self.values.append(leaf.data)
                self.leaf_rows.append((name, 1, len(self.values) - 1))
                continue
            kind, tensor = 0, leaf
            if isinstance(leaf, Packed):
                kind, tensor = 2, Tensor("uint8", 8, (len(leaf.data),), leaf.data)
            if tensor not in self.tensors:
                self.tensors.append(tensor)
                self._place(name, tensor)
            self.leaf_rows.append((name, kind, self.tensors.index(tensor)))

    def _place(self, name: str, tensor: Tensor) -> None:
        if (tensor.dtype, tensor.bits) not in self.dtypes:
            self.dtypes.append((tensor.dtype, tensor.bits))
        for origin, extent, payload in tensor.regions:
            cuts = range(0, len(payload), tensor.chunk)
            raws = [payload[at : at + tensor.chunk] for at in cuts]
            row = (len(self.tensors) - 1, origin, extent, len(raws))
            self.region_rows.append(row)
            for number, raw in enumerate(raws):
                where = number % len(self.datas)
                data = self.datas[where]
                known = [c for c in self.chunk_rows if c[1] == digest(raw, self.algorithm)]
                if self.share and known:
                    self.chunk_rows.append(list(known[0]))
                    continue
                if number < len(self.datas):
                    data.region(name, tensor, (origin, extent), len(payload))
                stored = raw
                for stage in self.pipelines[tensor.codec]:
                    stored = frame(raw) if stage == ["zstd"] else stored[::-1]
                placed = data.chunk(number * tensor.chunk, raw, stored, tensor.codec)
                self.chunk_rows.append(
                    [len(raw), digest(raw, self.algorithm), where, *placed[:2], tensor.codec]
                    + [placed[2]]
                )

    def _sections(self, containers: list[tuple[str, str, Any]], about: dict[str, Any]) -> None:
        finished = [data.finish() for data in self.datas if data.chunks]
        self.data_files = dict(finished)
        order = sorted(name for name, _ in finished)
        row_of = {at: order.index(name) for at, (name, _) in enumerate(finished)}
        self.tree: dict[str, Any] = {
            "dtypes": {
                "name": [name for name, _ in self.dtypes],
                "bits": Column("I", [bits for _, bits in self.dtypes]),
            },
            "leaves": {
                "name": [row[0] for row in self.leaf_rows],
                "kind": Column("B", [row[1] for row in self.leaf_rows]),
                "row": Column("I", [row[2] for row in self.leaf_rows]),
            },
            "values": list(self.values),
            "containers": {
                "name": [row[0] for row in containers],
                "kind": [row[1] for row in containers],
                "argument": [pack(row[2]) for row in containers],
            },
            "tensors": {
                "dtype": Column("H", [self.dtypes.index((t.dtype, t.bits)) for t in self.tensors]),
                "ndim": Column("B", [len(t.shape) for t in self.tensors]),
                "dims": Column("Q", [n for t in self.tensors for n in t.shape]),
            },
            "regions": {
                "tensor": Column("I", [row[0] for row in self.region_rows]),
                "origin": Column("Q", [n for row in self.region_rows for n in row[1]]),
                "extent": Column("Q", [n for row in self.region_rows for n in row[2]]),
                "nchunks": Column("I", [row[3] for row in self.region_rows]),
            },
            "chunks": {
                "raw": Column("I", [row[0] for row in self.chunk_rows]),
                "digest": b"".join(row[1] for row in self.chunk_rows),
            },
            "attributes": {"leaves": {}, "containers": {}},
        }
        self.files: dict[str, Any] = {
            "id": b"".join(bytes.fromhex(name) for name in order),
            "nbytes": Column("Q", [len(self.data_files[name]) for name in order]),
        }
        self.placement: dict[str, Any] = {
            "file": Column("I", [row_of[row[2]] for row in self.chunk_rows]),
            "offset": Column("Q", [row[3] for row in self.chunk_rows]),
            "stored": Column("I", [row[4] for row in self.chunk_rows]),
            "codec": Column("B", [row[5] for row in self.chunk_rows]),
            "pipelines": self.pipelines,
        }
        if any(row[5] for row in self.chunk_rows):
            self.placement["digest"] = b"".join(row[6] for row in self.chunk_rows)
        self.about: dict[str, Any] = {
            "name": "main",
            "step": None,
            "created": CREATED,
            "txn": TXN,
            "parent": None,
            "writer": "vectors 1",
            "digest": self.algorithm,
            "tree_digest": None,
            "requires": [],
            "nbytes": sum(len(p) for t in self.tensors for _, _, p in t.regions),
            "tensors": len(self.tensors),
            "metrics": {},
            "metadata": {},
            **about,
        }

    def raw_sections(self) -> list[bytes]:
        tree = pack(self.tree)
        if self.about["tree_digest"] is None:
            self.about["tree_digest"] = digest(tree, self.algorithm)
        return [pack(self.about), pack(self.files), tree, pack(self.placement)]

    def seal(
        self,
        raws: list[bytes] | None = None,
        *,
        rows: Callable[[list[list[Any]]], None] | None = None,
        head: Callable[[bytearray], None] | None = None,
    ) -> bytes:
        """The document. `rows` bends the sections' rows, `head` the header before its digest."""
        table = []
        for position, raw in enumerate(raws or self.raw_sections()):
            encoding = self.encoding if position >= 2 else 0
            stored = frame(raw) if encoding else raw
            table.append([encoding, stored, len(stored), len(raw)])
        if rows:
            rows(table)
        made = bytearray(
            INDEX_MAGIC + struct.pack("<HHB3s", 1, self.minor, CODES[self.algorithm], b"") + COMMIT
        )
        for encoding, stored, length, raw_length in table:
            own = digest(stored, self.algorithm)
            made += struct.pack("<B7sQQ32s", encoding, b"", length, raw_length, own)
        if head:
            head(made)
        known = self.algorithm
        made += digest(bytes(made), known).ljust(32, b"\0")
        return bytes(made) + b"".join(row[1] for row in table)

    def content(self) -> dict[str, Any]:
        """What the document says, as JSON: the twin."""
        chunks = iter(self.chunk_rows)
        order = sorted(self.data_files)
        ids = [data.finish()[0] for data in self.datas]
        tensors: list[dict[str, Any]] = [
            {"dtype": t.dtype, "bits": t.bits, "shape": list(t.shape), "regions": []}
            for t in self.tensors
        ]
        for owner, origin, extent, count in self.region_rows:
            rows = [next(chunks) for _ in range(count)]
            tensors[owner]["regions"].append(
                {
                    "origin": list(origin),
                    "extent": list(extent),
                    "chunks": [
                        {
                            "raw": row[0],
                            "digest": row[1].hex(),
                            "file": order.index(ids[row[2]]),
                            "offset": row[3],
                            "stored": row[4],
                            "codec": row[5],
                            "stored_digest": row[6].hex(),
                        }
                        for row in rows
                    ],
                }
            )
        parent = self.about["parent"]
        return {
            "algorithm": self.algorithm,
            "minor": self.minor,
            "commit_id": COMMIT.hex(),
            "about": {
                "name": self.about["name"],
                "step": self.about["step"],
                "created": self.about["created"],
                "txn": self.about["txn"].hex(),
                "parent": parent and [parent[0], parent[1].hex()],
                "writer": self.about["writer"],
                "metrics": self.about["metrics"],
                "nbytes": self.about["nbytes"],
                "tensors": self.about["tensors"],
            },
            "files": [{"id": i, "nbytes": len(self.data_files[i])} for i in order],
            "leaves": [list(row) for row in self.leaf_rows],
            "values": [value.hex() for value in self.values],
            "containers": [
                [n, k, a.hex()]
                for n, k, a in zip(
                    self.tree["containers"]["name"],
                    self.tree["containers"]["kind"],
                    self.tree["containers"]["argument"],
                )
            ],
            "tensors": tensors,
            "attributes": {
                which: {
                    key: [[r, v.hex()] for r, v in zip(entry["rows"].rows, entry["values"])]
                    for key, entry in self.tree.get("attributes", {}).get(which, {}).items()
                }
                for which in ("leaves", "containers")
            },
            "pipelines": self.pipelines,
        }


# -- writing --------------------------------------------------------------------------------------

MADE: dict[str, bytes] = {}


def emit(folder: str, name: str, data: bytes, twin: dict[str, Any]) -> None:
    assert f"{folder}/{name}.bin" not in MADE, name
    caller = sys._getframe(1).f_code.co_name
    provenance = f"spec/vectors/generate.py, {caller}()"
    text = json.dumps({**twin, "provenance": provenance}, indent=1, ensure_ascii=True) + "\n"
    MADE[f"{folder}/{name}.bin"] = data
    MADE[f"{folder}/{name}.json"] = text.encode()


def accept_index(
    name: str,
    draft: Draft,
    why: str,
    covers: str,
    *,
    tree: Any = None,
    packs_back: bool = True,
    unreadable: tuple[str, ...] = (),
) -> None:
    """The index, its data files, and what they say."""
    names = []
    for number, data in enumerate(data for data in draft.datas if data.chunks):
        file_id, content = data.finish()
        data_name = f"{name.replace('index-', 'data-')}-{number}"
        names.append(data_name)
        twin = {
            "format": "data-file",
            "why": f"data of {name}",
            "covers": ["M05-1", "M05-2"],
            "packs_back": not any(s != ["zstd"] for p in data.pipelines for s in p),
            "id": file_id,
            "content": data.content(),
        }
        if unreadable:
            twin["unreadable"] = "unsupported-codec"
        emit("accept", data_name, content, twin)
    emit(
        "accept",
        name,
        draft.seal(),
        {
            "format": "index",
            "why": why,
            "covers": covers.split(),
            "packs_back": packs_back,
            "data": names,
            "unreadable": list(unreadable),
            "content": draft.content(),
            "metadata": METADATA if draft.about["metadata"] else {"dict": []},
            "leaves": [[n, leaf.plain()] for n, leaf in draft.leaves if n not in unreadable],
            "tree": tree,
        },
    )


def reject(name: str, form: str, data: bytes, kind: str, why: str, covers: str = "") -> None:
    twin = {"format": form, "kind": kind, "why": why, "covers": covers.split()}
    emit("reject", name, data, twin)


METADATA = {
    "dict": [
        ["epoch", 3],
        ["commit", "caf\u00e9"],
        ["lr", {"float": "3f50624dd2f1a9fc", "text": "0.001"}],
        ["range", {"tuple": [1, 2]}],
    ]
}


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


SMALL = Tensor("float32", 32, (2, 3), floats(1, -2.5, 0, -0.0, math.inf, 6))


def every_dtype() -> list[tuple[str, Tensor]]:
    """One tensor of each dtype, 7 elements in 7 x 1 or 7."""
    made: list[tuple[str, Tensor]] = []

    def add(name: str, bits: int, payload: bytes, twin: bytes | None = None) -> None:
        made.append((name, Tensor(name, bits, (7,), payload, twin=twin)))

    add("bool", 8, bytes([0, 1, 1, 0, 1, 0, 1]))
    for bits in (8, 16, 32, 64):
        add(f"int{bits}", bits, stream(f"int{bits}", 7 * bits // 8))
        add(f"uint{bits}", bits, stream(f"uint{bits}", 7 * bits // 8))
    # Signalling and quiet NaN with payloads, infinities, negative zero, a subnormal.
    add("float16", 16, struct.pack("<7H", 0x7C01, 0x7E55, 0x7C00, 0xFC00, 0x8000, 1, 0x3C00))
    words = (0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x3F800000)
    add("float32", 32, struct.pack("<7I", *words))
    add("float64", 64, struct.pack("<7Q", 0x7FF0000000000001, *(word << 32 for word in words[1:])))
    add("bfloat16", 16, struct.pack("<7H", *(word >> 16 for word in words)))
    for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"):
        add(f"float8_{kind}", 8, stream(kind, 7))
    for bits in (64, 128):
        add(f"complex{bits}", bits, stream(f"complex{bits}", 7 * bits // 8))
    for name in ("complex32", "bcomplex32"):
        add(name, 32, stream(name, 28))
    packed = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4}
    packed |= {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
    for name, bits in packed.items():
        elements = [byte & ((1 << bits) - 1) for byte in stream(name, 7)]
        add(name, bits, bits_of(elements, bits), bytes(elements))
    text = ["", "ab", "c", "\u00e9\u4e2d", "\U0001f600", "xyz", "0"]
    add("str96", 96, b"".join(t.encode("utf-32-le").ljust(12, b"\0") for t in text))
    add("bytes24", 24, b"".join(t.encode()[:3].ljust(3, b"\0") for t in text))
    add("void40", 40, stream("void40", 35))
    add("datetime64[ns]", 64, struct.pack("<7q", -(1 << 63), -1, 0, 1, 2, 3, (1 << 63) - 1))
    add("datetime64", 64, struct.pack("<7q", *[-(1 << 63)] * 7))
    add("timedelta64[25s]", 64, struct.pack("<7q", *range(-3, 4)))
    items = ["", "a", "caf\u00e9", "\u4e2d\u6587", "\U0001f600", "x" * 70, "\0end"]
    coded = [item.encode() for item in items]
    made.append(("string", Tensor("string", 0, (7,), strings(coded), twin=items)))
    raw = [b"", b"\xff", b"\0", b"abc", b"\x80" * 65, b"", b"z"]
    shown = [{"bytes": item.hex()} for item in raw]
    made.append(("bytes", Tensor("bytes", 0, (7,), strings(raw), twin=shown)))
    add("posit16_of_another_world", 16, stream("posit16", 14))
    elements = [byte & 7 for byte in stream("opaque3", 7)]
    add("opaque3", 3, bits_of(elements, 3), bytes(elements))
    return made


def shapes() -> list[tuple[str, Any]]:
    return [
        ("scalar", Tensor("float64", 64, (), struct.pack("<d", 2.5))),
        ("none", Tensor("float32", 32, (0,))),
        ("none2", Tensor("int4", 4, (3, 0, 2))),
        ("nostrings", Tensor("string", 0, (0, 4), twin=[])),
        ("onestring", Tensor("string", 0, (), strings([b"one"]), twin=["one"])),
        ("hollow", Tensor("void0", 0, (3,))),
        ("ones", Tensor("uint8", 8, (1,) * 64, b"\x07")),
        ("bit", Tensor("uint1", 1, (), b"\x01", twin=b"\x01")),
    ]


# Value, its packed form, and how JSON shows it.
def every_value() -> list[tuple[str, Any, Any]]:
    def f(number: float) -> dict[str, str]:
        return {"float": struct.pack(">d", number).hex(), "text": repr(number)}

    payload_nan = struct.unpack(">d", bytes.fromhex("7ff800000000beef"))[0]
    return [
        ("none", None, None),
        ("true", True, True),
        ("false", False, False),
        ("zero", 0, 0),
        ("negative", -33, -33),
        ("int64-min", -(1 << 63), {"int": str(-(1 << 63))}),
        ("uint64-max", (1 << 64) - 1, {"int": str((1 << 64) - 1)}),
        ("big", ext("int", (1 << 64).to_bytes(9, "little")), {"int": str(1 << 64)}),
        (
            "big-negative",
            ext("int", (-(1 << 63) - 1).to_bytes(9, "little", signed=True)),
            {"int": str(-(1 << 63) - 1)},
        ),
        ("float", 1.5, f(1.5)),
        ("negative-zero", -0.0, f(-0.0)),
        ("inf", math.inf, f(math.inf)),
        ("nan", Splice(b"\xcb" + bytes.fromhex("7ff800000000beef")), f(payload_nan)),
        ("text", "caf\u00e9 \U0001f600", "caf\u00e9 \U0001f600"),
        ("bytes", b"\x00\xff", {"bytes": "00ff"}),
        ("list", [1, [], "x"], [1, [], "x"]),
        ("map", {"b": 1, "a": {}, "": None}, {"dict": [["b", 1], ["a", {"dict": []}], ["", None]]}),
        ("complex", ext("complex", [0.0, -0.0]), {"complex": [f(0.0), f(-0.0)]}),
        ("tuple", ext("tuple", [1, ext("tuple", [])]), {"tuple": [1, {"tuple": []}]}),
        ("set", ext("set", [1, 2, "a"]), {"set": ["a", 1, 2]}),
        ("frozenset", ext("frozenset", []), {"frozenset": []}),
        (
            "dict",
            ext("dict", [[1, "one"], [None, 2], [ext("tuple", [1, "a"]), 3], ["1", 4]]),
            {"dict": [[1, "one"], [None, 2], [{"tuple": [1, "a"]}, 3], ["1", 4]]},
        ),
        ("odict", ext("odict", [["z", 1], ["a", 2]]), {"odict": [["z", 1], ["a", 2]]}),
        ("counter", ext("counter", [["x", 3]]), {"counter": [["x", 3]]}),
        (
            "defaultdict",
            ext("defaultdict", ["list", [["k", [1]]]]),
            {"defaultdict": ["list", [["k", [1]]]]},
        ),
        ("defaultdict-none", ext("defaultdict", [None, []]), {"defaultdict": [None, []]}),
        (
            "namedtuple",
            ext("namedtuple", ["Point", ["x", "y"], [1, 2.5]]),
            {"namedtuple": ["Point", ["x", "y"], [1, f(2.5)]]},
        ),
        ("np-float32", ext("np", ["float32", floats(1.5)]), {"np": ["float32", {"bytes": "0000c03f"}]}),
        ("np-int4", ext("np", ["int4", b"\x0d"]), {"np": ["int4", {"bytes": "0d"}]}),
        ("np-str", ext("np", ["str64", "ab".encode("utf-32-le")]),
         {"np": ["str64", {"bytes": "6100000062000000"}]}),
        ("np-str-empty", ext("np", ["str0", b""]), {"np": ["str0", {"bytes": ""}]}),
        ("np-datetime", ext("np", ["datetime64[ns]", bytes(8)]),
         {"np": ["datetime64[ns]", {"bytes": "00" * 8}]}),
        ("np-dtype", ext("np.dtype", "bfloat16"), {"np.dtype": "bfloat16"}),
        ("path", ext("path", ["PurePosixPath", "a/b"]), {"path": ["PurePosixPath", "a/b"]}),
        ("datetime", ext("datetime", ["2026-01-02T03:04:05", 0, [3600000000, None]]),
         {"datetime": ["2026-01-02T03:04:05", 0, [3600000000, None]]}),
        ("date", ext("date", "2026-01-02"), {"date": "2026-01-02"}),
        ("time", ext("time", ["03:04:05.000006", 1, None]), {"time": ["03:04:05.000006", 1, None]}),
        ("timedelta", ext("timedelta", [-1, 86399, 999999]), {"timedelta": [-1, 86399, 999999]}),
        ("timezone", ext("timezone", [-1800000000, "half"]), {"timezone": [-1800000000, "half"]}),
        ("range", ext("range", [0, 10, 3]), {"range": [0, 10, 3]}),
        ("slice", ext("slice", [None, 5, None]), {"slice": [None, 5, None]}),
        ("bytearray", ext("bytearray", b"\x01"), {"bytearray": {"bytes": "01"}}),
        ("deque", ext("deque", [3, [1, 2]]), {"deque": [3, [1, 2]]}),
        ("namespace", ext("namespace", {"a": 1}), {"namespace": {"dict": [["a", 1]]}}),
        ("args", ext("argparse.Namespace", {"lr": 2}), {"argparse.Namespace": {"dict": [["lr", 2]]}}),
        ("depth-64", nested(63, None), nested_plain(63)),
        ("depth-64-tuples", nested_tuples(63), nested_tuple_plain(63)),
    ]  # fmt: skip


def unknown_values() -> list[tuple[str, Any, Any]]:
    """Values that a process does not know: it gives the plain payload, with a warning."""
    return [
        ("framework", ext("somewhere.Thing", [1, {"a": 2}]),
         {"somewhere.Thing": [1, {"dict": [["a", 2]]}]}),
        ("registered", ext("type", ["my.Config", {"lr": 1}]),
         {"type": ["my.Config", {"dict": [["lr", 1]]}]}),
    ]  # fmt: skip


def nested(levels: int, inside: Any) -> Any:
    for _ in range(levels):
        inside = [inside]
    return inside


def nested_plain(levels: int) -> Any:
    return nested(levels, None)


def nested_tuples(levels: int) -> Any:
    made: Any = None
    for _ in range(levels):
        made = ext("tuple", [made])
    return made


def nested_tuple_plain(levels: int) -> Any:
    made: Any = None
    for _ in range(levels):
        made = {"tuple": [made]}
    return made


# -- accept ---------------------------------------------------------------------------------------


def values_accepted() -> None:
    for name, packed, plain in every_value():
        twin = {"format": "value", "why": f"value: {name}", "covers": ["M03-11", "M03-12"]}
        emit("accept", f"value-{name}", pack(packed), {**twin, "value": plain, "packs_back": True})
    for name, packed, plain in unknown_values():
        twin = {"format": "value", "why": f"value: {name}", "covers": ["M03-14", "M03-9"]}
        emit("accept", f"value-{name}", pack(packed), {**twin, "value": plain, "packs_back": False})


def names_accepted() -> None:
    keys: list[tuple[str, str, list[Any]]] = [
        ("root", "", []),
        ("plain", "model/encoder.0.weight", ["model", "encoder.0.weight"]),
        ("escapes", "a~0b/c~1d/~2/~03", ["a~b", "c/d", "", "~3"]),
        ("int", "~3i1/~3i-20/1", [1, -20, "1"]),
        ("bool", "~3b1/~3b0/~3n", [True, False, None]),
        (
            "float",
            "~3f0.5/~3f-0.0/~3fnan/~3finf/~3f1e-07",
            [
                {"float": "3fe0000000000000", "text": "0.5"},
                {"float": "8000000000000000", "text": "-0.0"},
                {"float": "7ff8000000000000", "text": "nan"},
                {"float": "7ff0000000000000", "text": "inf"},
                {"float": "3e7ad7f29abcaf48", "text": "1e-07"},
            ],
        ),
        ("bytes", "~3x00ff/~3x", [{"bytes": "00ff"}, {"bytes": ""}]),
        ("tuple", '~3t["~03i1","a"]', [{"tuple": [1, "a"]}]),
        (
            "tuple-escapes",
            '~3t["a~00b","c~01d","~02","~03t[\\"~003i1\\"]"]/~3t[]',
            [{"tuple": ["a~b", "c/d", "", {"tuple": [1]}]}, {"tuple": []}],
        ),
        ("unicode", "caf\u00e9/cafe\u0301/\u4e2d", ["caf\u00e9", "cafe\u0301", "\u4e2d"]),
    ]
    for name, text, plain in keys:
        twin = {"format": "name", "why": f"leaf name: {name}", "covers": ["M03-1", "M03-3"]}
        emit("accept", f"name-{name}", text.encode(), {**twin, "keys": plain, "packs_back": True})
    legal = ["main", "a", "0a", "best.v2", "x" * 120, "step-0000000000000007", "con1", "run-1_2"]
    legal += ["step-9007199254740991", "1-"]
    for number, text in enumerate(legal):
        twin = {"format": "checkpoint-name", "why": "a legal checkpoint name", "covers": ["M02-4"]}
        emit("accept", f"checkpoint-name-{number}", text.encode(), twin)


def dtypes_accepted() -> None:
    """Payloads alone: a dtype, a shape, elements."""
    for name, tensor in every_dtype():
        shown = tensor.plain()["tensor"]
        safe = name.replace("[", "-").replace("]", "")
        twin = {"format": "payload", "why": f"payload of {name}", "covers": ["M04-4", "M01-1"]}
        if name.startswith(("posit", "opaque")):
            twin["covers"] = ["M04-8"]
        if tensor.bits == 0:
            twin["covers"] = ["M04-5", "M04-6"]
        twin |= {"bits": tensor.bits, "packs_back": True, **shown}
        emit("accept", f"payload-{safe}", tensor.regions[0][2], twin)


def indexes_accepted() -> None:
    accept_index(
        "index-minimal",
        Draft([("", Packed({}, {"dict": []}))]),
        "the root is one value, an empty dict; no tensor, no file",
        "M07-1 M07-2 M07-12 M02-3",
        tree={"dict": []},
    )
    accept_index("index-dtypes", Draft(every_dtype()), "a tensor of each dtype", "M04-4 M04-8")
    accept_index(
        "index-shapes",
        Draft(shapes()),
        "0-d, empty, and 64-dimensional tensors; one packed bit",
        "M07-22",
    )
    rows = [(name, Packed(packed, plain)) for name, packed, plain in every_value()]
    long = Packed(["x" * 5000, 1], ["x" * 5000, 1], big=True)
    accept_index(
        "index-values",
        Draft([*rows, ("long", long)]),
        "every value that needs no framework, and one stored as a tensor",
        "M07-20 M03-15",
    )
    ints = [Tensor("int32", 32, (), struct.pack("<i", i)) for i in range(12)]
    shown = [t.plain() for t in ints]
    accept_index(
        "index-containers",
        Draft(
            [
                ("l/0", ints[0]),
                ("l/1/~3i1", ints[1]),
                ("l/1/1", ints[2]),
                ("t/0", ints[3]),
                ("n/0", ints[4]),
                ("n/1/z", ints[5]),
                ("n/1/a", Packed(None, None)),
                ("d/~3n", ints[6]),
                ("~2/a~1b", ints[7]),
                ('~2/~3t["~03i1","a"]', ints[8]),
                ("~2/~3b1", Packed([], [])),
                ("ten/0", ints[9]),
                *((f"ten/{i}", Packed(i, i)) for i in range(1, 11)),
            ],
            containers=[
                ("l", "list", None),
                ("t", "tuple", None),
                ("n", "namedtuple", ["Pair", ["left", "right"]]),
                ("n/1", "odict", None),
                ("d", "defaultdict", "list"),
                ("ten", "list", None),
            ],
        ),
        "every kind of container, keys of every kind, order of insertion",
        "M03-5 M03-6 M03-8 M03-10",
        tree={
            "dict": [
                ["l", [shown[0], {"dict": [[1, shown[1]], ["1", shown[2]]]}]],
                ["t", {"tuple": [shown[3]]}],
                [
                    "n",
                    {
                        "namedtuple": [
                            "Pair",
                            ["left", "right"],
                            [shown[4], {"odict": [["z", shown[5]], ["a", None]]}],
                        ]
                    },
                ],
                ["d", {"defaultdict": ["list", [[None, shown[6]]]]}],
                ["", {"dict": [["a/b", shown[7]], [{"tuple": [1, "a"]}, shown[8]], [True, []]]}],
                ["ten", [shown[9], *range(1, 11)]],
            ]
        },
    )
    accept_index(
        "index-root-list",
        Draft([("0", ints[0]), ("1", ints[1])], containers=[("", "list", None)]),
        "the root is a list",
        "M03-5",
        tree=[shown[0], shown[1]],
    )
    accept_index(
        "index-ties",
        Draft(
            [("a", SMALL), ("b", SMALL), ("c", Tensor("float32", 32, (3, 2), SMALL.twin))],
            share=True,
        ),
        "a and b are one tensor; c has the same bytes, stored once, and is no tie",
        "M07-28",
    )
    one = Tensor("uint8", 8, (10000,), stream("chunks", 10000), chunk=4096)
    accept_index("index-chunks", Draft([("x", one)]), "three chunks of one region", "M07-24 M07-25")
    accept_index(
        "index-reused",
        Draft([("x", one)], files=2),
        "chunks of one region in two data files",
        "M07-26",
    )
    accept_index("index-regions", Draft(cut_tensors()), "several regions", "M07-21 M07-23 M04-3")
    zstd = [[], [["zstd"]]]
    run = Tensor("int64", 64, (20000,), bytes(160000), codec=1, chunk=1 << 17)
    accept_index(
        "index-zstd-chunks",
        Draft([("raw", SMALL), ("run", run)], pipelines=zstd),
        "one raw chunk, two zstd chunks: stored digests for all",
        "M06-10 M06-11 M07-29 M05-9 M05-11 M05-12",
    )
    accept_index(
        "index-zstd-twice",
        Draft(
            [("x", Tensor("uint8", 8, (70,), bytes(70), codec=1))],
            pipelines=[[], [["zstd"]], [["zstd"], ["later"]]],
        ),
        "a pipeline that no chunk uses is not looked at",
        "M06-8",
        packs_back=True,
    )
    accept_index(
        "index-unknown-codec",
        Draft(
            [("a", SMALL), ("b", Tensor("uint8", 8, (9,), b"unknown!!", codec=1))],
            pipelines=[[], [["mirror", 7]]],
        ),
        "a chunk with an unknown stage: everything else is read",
        "M06-6 M06-7",
        unreadable=("b",),
    )
    draft = Draft([("a", SMALL), ("v", Packed("x" * 200, "x" * 200))], encoding=1)
    accept_index(
        "index-zstd-sections",
        draft,
        "tree and placement as zstd frames",
        "M07-11",
        packs_back=False,
    )
    accept_index(
        "index-sha256",
        Draft([("a", SMALL), ("v", Packed(1, 1))], algorithm="sha256"),
        "digests of 32 bytes",
        "M06-2 M06-4",
    )
    accept_index("index-salt", Draft([("a", SMALL)], salt=3), "a data file with a salt", "M08-14")
    draft = Draft([("a/w", SMALL), ("a/b", Packed(1, 1)), ("l/0", ints[0])],
                  containers=[("l", "list", None)])  # fmt: skip
    draft.tree["attributes"] = {
        "leaves": {
            "numpy.order": {"rows": Column("I", [0]), "values": [pack("F")]},
            "torch.requires_grad": {"rows": Column("I", [0, 2]), "values": [pack(True)] * 2},
        },
        "containers": {"torch.versions": {"rows": Column("I", [0]), "values": [pack({"a": 2})]}},
    }
    accept_index("index-attributes", draft, "attributes of leaves and containers", "M07-17")
    draft = Draft([("a", SMALL)])
    del draft.tree["attributes"]
    accept_index(
        "index-no-attributes", draft, "attributes may be absent", "M07-17", packs_back=False
    )
    draft = Draft([("a", SMALL)], minor=7)
    draft.about["later"] = {"x": [1]}
    draft.files["hint"] = b"123"
    draft.tree["leaves"]["colour"] = ["red"]
    draft.tree["statistics"] = {"max": b"abc"}
    draft.placement["rack"] = [1, 2, 3]
    accept_index(
        "index-unknown-keys",
        draft,
        "unknown keys and columns of a later minor version are ignored",
        "M09-2 M09-8",
        packs_back=False,
    )
    accept_index(
        "index-about",
        Draft(
            [("a", SMALL)],
            about={
                "name": "step-0000000000000007",
                "step": 7,
                "parent": ["main", bytes(16)],
                "metrics": {"loss": 0.25, "acc": -0.0},
                "metadata": {
                    "epoch": 3,
                    "commit": "caf\u00e9",
                    "lr": 0.001,
                    "range": ext("tuple", [1, 2]),
                },
            },
        ),
        "step, parent, metrics, metadata",
        "M07-13 M07-14",
    )
    note = Draft([], about={"metrics": {"val_loss": 0.5}})
    accept_index("index-note", note, "a note: empty tree, files and placement", "M02-15 M02-17")


def cut_tensors() -> list[tuple[str, Tensor]]:
    def cut(
        dtype: str, bits: int, shape: tuple[int, ...], boxes: list[tuple[Any, Any]]
    ) -> Tensor:
        size = max(bits // 8, 1)
        whole = stream(f"{dtype} {shape}", math.prod(shape) * size)
        if bits < 8:
            whole = bytes(byte & ((1 << bits) - 1) for byte in whole)
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        regions = []
        for origin, extent in sorted(boxes):
            positions = [0]
            for start, length, step in zip(origin, extent, steps):
                positions = [p + (start + i) * step for p in positions for i in range(length)]
            elements = [whole[p * size : (p + 1) * size] for p in positions]
            payload = b"".join(elements)
            if bits < 8:
                payload = bits_of([e[0] for e in elements], bits)
            regions.append((origin, extent, payload))
        return Tensor(dtype, bits, shape, regions=regions, twin=whole)

    pinwheel = [((0, 0), (2, 3)), ((0, 3), (3, 2)), ((2, 0), (3, 2)), ((3, 2), (2, 3)),
                ((2, 2), (1, 1))]  # fmt: skip
    return [
        ("rows", cut("float32", 32, (5, 3), [((0, 0), (2, 3)), ((2, 0), (3, 3))])),
        ("grid", cut("int16", 16, (4, 4), [((r, c), (2, 2)) for r in (0, 2) for c in (0, 2)])),
        ("pinwheel", cut("uint8", 8, (5, 5), pinwheel)),
        ("packed", cut("float6_e2m3fn", 6, (5, 3), [((0, 0), (5, 1)), ((0, 1), (5, 2))])),
        ("deep", cut("uint8", 8, (2,) * 6, [((i,) + (0,) * 5, (1,) + (2,) * 5) for i in (0, 1)])),
    ]


# -- reject ---------------------------------------------------------------------------------------


def base() -> Draft:
    """Leaves: a (float32 2 x 3), b (uint8 10000 in three chunks), c (two regions), v (a value)."""
    chunked = Tensor("uint8", 8, (10000,), stream("reject", 10000), chunk=4096)
    halves = [((0, 0), (1, 2), floats(1, 2)), ((1, 0), (1, 2), floats(3, 4))]
    two = Tensor("float32", 32, (2, 2), regions=halves, twin=floats(1, 2, 3, 4))
    return Draft([("a", SMALL), ("b", chunked), ("c", two), ("v", Packed(7, 7))])


def at(path: str, value: Any) -> Callable[[Draft], None]:
    """Bend a draft: `tree.tensors.dims[0]` = value, or a whole column, or (None) remove a key."""

    def bend(draft: Draft) -> None:
        *way, last = path.partition("[")[0].split(".")
        table = getattr(draft, way[0])
        for key in way[1:]:
            table = table[key]
        if "[" in path:
            row = int(path.partition("[")[2][:-1])
            column = table[last]
            (column.rows if isinstance(column, Column) else column)[row] = value
        elif value is None:
            del table[last]
        else:
            table[last] = value

    return bend


def bent(*bends: Callable[[Draft], None]) -> bytes:
    draft = base()
    for bend in bends:
        bend(draft)
    return draft.seal()


def flip(data: bytes, position: int, mask: int = 1) -> bytes:
    made = bytearray(data)
    made[position] ^= mask
    return bytes(made)


def poke(position: int, value: bytes) -> Callable[[bytearray], None]:
    def head(made: bytearray) -> None:
        made[position : position + len(value)] = value

    return head


def headers_rejected() -> None:
    good = base().seal()
    u64 = struct.Struct("<Q").pack

    def bad(name: str, data: bytes, kind: str, why: str, covers: str) -> None:
        reject(f"index-{name}", "index", data, kind, why, covers)

    bad("empty", b"", "corrupt-truncated", "nothing", "M07-1 M09-6")
    bad("short", good[:287], "corrupt-truncated", "one byte less than a header", "M07-1")
    bad("cut", good[:-1], "corrupt-truncated", "the last byte is missing", "M07-6")
    bad("header-only", good[:288], "corrupt-truncated", "no section", "M07-6")
    bad("trailing", good + b"\0", "corrupt-trailing-bytes", "a byte behind the document", "M07-6")
    bad("magic", flip(good, 0), "corrupt-magic", "a bit of the magic", "M07-2")
    bad("data-magic", DATA_MAGIC + good[8:], "corrupt-magic", "a data file's magic", "M07-2")
    bad("header-flip", flip(good, 20), "corrupt-header-digest", "a bit of the commit id", "M07-3")
    bad("digest-flip", flip(good, 256), "corrupt-header-digest", "a bit of the digest", "M07-3")
    for name, position, why in (
        ("digest-filling", 287, "filling of the header's digest"),
    ):
        data = flip(good, position)
        bad(name, data, "corrupt-header-digest", why, "M06-5")
    major = base().seal(head=poke(8, b"\x02\0"))
    bad("major", major, "unsupported-major", "major 2, all else right", "M09-1")
    for name, place, value, kind, why, covers in (
        ("algorithm", 12, b"\x09", "unsupported-digest", "digest algorithm 9", "M06-1"),
        ("reserved", 14, b"\x01", "corrupt-padding", "a reserved byte", "M07-4"),
        ("section-reserved", 95, b"\x01", "corrupt-padding", "a section's reserved byte", "M07-4"),
        ("section-filling", 199, b"\x01", "corrupt-padding", "filling of a digest", "M06-5"),
        ("encoding", 144, b"\x02", "unsupported-encoding", "encoding 2 of tree", "M07-7"),
        ("about-zstd", 32, b"\x01", "unsupported-encoding", "about compressed", "M07-8"),
        ("raw-length", 160, u64(5), "corrupt-section-length", "plain, two lengths", "M07-7"),
    ):
        bad(name, base().seal(head=poke(place, value)), kind, why, covers)
    huge = base().seal(head=lambda made: (poke(152, u64(1 << 63))(made), poke(160, u64(1 << 63))(made)))
    bad("section-huge", huge, "corrupt-limit", "a section of 2^63 bytes", "M07-9 M09-9")
    for position, name in enumerate(("about", "files", "tree", "placement")):
        draft = base()
        start = 288 + sum(len(raw) for raw in draft.raw_sections()[:position])
        data = flip(draft.seal(), start + 1)
        bad(f"{name}-flip", data, "corrupt-section-digest", f"a bit of {name}", "M07-10 M09-7")


def sections_rejected() -> None:
    def bad(name: str, data: bytes, kind: str, why: str, covers: str) -> None:
        reject(f"index-{name}", "index", data, kind, why, covers)

    def replaced(position: int, raw: bytes) -> bytes:
        draft = base()
        raws = draft.raw_sections()
        raws[position] = raw
        if position == 2:
            draft.about["tree_digest"] = digest(raw, draft.algorithm)
            raws[0] = pack(draft.about)
        return draft.seal(raws)

    def compressed(stored: bytes, raw_length: int) -> bytes:
        def rows(table: list[list[Any]]) -> None:
            table[2] = [1, stored, len(stored), raw_length]

        return base().seal(rows=rows)

    tree = base().raw_sections()[2]
    good = frame(tree)
    size = "corrupt-zstd-size"
    bad("zstd-other-size", compressed(good, len(tree) + 1), size, "another size", "M06-11")
    bomb = frame(bytes(1 << 17), 1 << 30)
    bad("zstd-bomb", compressed(bomb, len(tree)), size, "declares 1 GiB", "M06-11 M06-9")
    ratio = compressed(frame(bytes(1 << 17), 512 << 20), 512 << 20)
    bad("zstd-ratio", ratio, "corrupt-limit", "512 MiB of 14 bytes", "M07-9")
    bad("zstd-no-size", compressed(frame(tree, size=False), len(tree)), size, "no size", "M06-10")
    lied = compressed(frame(tree + b"\0", len(tree)), len(tree))
    bad("zstd-lies", lied, "corrupt-zstd-frame", "more bytes than it declares", "M06-9")
    name = "corrupt-zstd-frame"
    bad("zstd-twice", compressed(good + good, len(tree)), name, "two frames", "M06-12")
    bad("zstd-cut", compressed(good[:-1], len(tree)), name, "a frame cut off", "M06-10")
    bad("zstd-none", compressed(tree, len(tree)), name, "no frame", "M06-10")
    bad("msgpack", replaced(2, b"\xc1"), "corrupt-msgpack", "a byte msgpack never uses", "M07-12")
    bad("nil", replaced(2, b"\xc0"), "corrupt-msgpack", "a section that is nil", "M07-12")
    bad("section-trailing", replaced(2, tree + b"\xc0"), "corrupt-msgpack", "two objects", "M07-12")
    items = pack("values") + b"\xdd\xff\xff\xff\xff"
    hostile = bytes([tree[0]]) + items
    bad("array-header", replaced(2, hostile), "corrupt-msgpack", "4 billion items", "M03-13 M09-6")
    twice = bytes([tree[0] + 1]) + tree[1:] + pack("values") + pack([])
    bad("key-twice", replaced(2, twice), "corrupt-msgpack", "a key twice", "M01-2")
    bad("int-key", replaced(1, pack({1: b""})), "corrupt-msgpack", "a key that is no str", "M07-12")
    utf8 = replaced(1, b"\x81\xa2\xff\xfe\xc0")
    bad("not-utf8", utf8, "corrupt-msgpack", "a str that is not UTF-8", "M07-12")
    deep = replaced(1, b"\x81\xa1x" + b"\x91" * 100000 + b"\xc0")
    bad("deep-section", deep, "corrupt-msgpack", "100,000 arrays in each other", "M09-6")


def about_rejected() -> None:
    def bad(name: str, bend: Callable[[Draft], None], kind: str, why: str, covers: str) -> None:
        reject(f"index-about-{name}", "index", bent(bend), kind, why, covers)

    entry = "corrupt-section-entry"
    unknown = at("about.requires", ["xor-delta"])
    bad("requires", unknown, "unsupported-requires", "an unknown requirement", "M09-3")
    for key in ("name", "created", "txn", "writer", "digest", "requires", "metrics", "metadata"):
        bad(f"no-{key}", at(f"about.{key}", None), entry, f"{key} is absent", "M07-13")
    bad("txn", at("about.txn", bytes(15)), entry, "txn of 15 bytes", "M07-13")
    bad("step", at("about.step", "7"), entry, "a step that is text", "M07-13")
    bad("step-big", at("about.step", 1 << 53), entry, "a step of 2^53", "M07-13")
    bad("nbytes", at("about.nbytes", -1), entry, "a negative total", "M07-13")
    bad("parent", at("about.parent", ["main"]), entry, "a parent without digest", "M07-13")
    bad("digest", at("about.digest", "sha256"), entry, "another digest's name", "M06-2")
    bad("metrics", at("about.metrics", {"a": "b"}), entry, "a metric that is text", "M07-13")
    bad("tree-digest", at("about.tree_digest", bytes(16)), "corrupt-tree-digest", "another digest",
        "M07-14")  # fmt: skip
    bad("name-path", at("about.name", "../main"), "corrupt-name", "a path as name", "M02-4")
    bad("name-step", at("about.name", "step-0000000000000001"), "corrupt-name",
        "the name of a step, without the step", "M02-4")  # fmt: skip
    deep = at("about.metadata", {"x": nested(70, None)})
    bad("metadata-deep", deep, "corrupt-value-depth", "metadata 70 levels deep", "M03-12")


def columns_rejected() -> None:
    def bad(name: str, kind: str, why: str, covers: str, *bends: Callable[[Draft], None]) -> None:
        reject(f"index-{name}", "index", bent(*bends), kind, why, covers)

    def column(code: str, *rows: int) -> Column:
        return Column(code, rows)

    length, span, order = "corrupt-column-length", "corrupt-column-range", "corrupt-order"
    entry, regions, chunks = "corrupt-section-entry", "corrupt-regions", "corrupt-chunk-length"
    top = (1 << 64) - 1
    bad("no-column", entry, "leaves.row is absent", "M07-16", at("tree.leaves.row", None))
    bad("column-type", entry, "a column that is text", "M07-16", at("tree.leaves.row", "abcd"))
    bad("name-bin", entry, "a name that is bin", "M07-16", at("tree.leaves.name[0]", b"a"))
    bad("no-table", entry, "tensors is absent", "M07-16", at("tree.tensors", None))
    bad("half-row", length, "3 bytes of u32", "M07-15", at("tree.leaves.row", b"123"))
    bad("rows", length, "one kind too few", "M07-15", at("tree.leaves.kind", column("B", 0, 0, 0)))
    bad("dims-short", length, "a dim too few", "M07-15",
        at("tree.tensors.dims", column("Q", 2, 3, 10000, 2)))  # fmt: skip
    bad("chunks-short", length, "a chunk too few", "M07-15", at("tree.regions.nchunks[1]", 4))
    bad("digest-rows", length, "a digest too few", "M07-15", at("tree.chunks.digest", bytes(16)))
    bad("name-twice", "corrupt-duplicate-name", "two leaves named a", "M03-2",
        at("tree.leaves.name[1]", "a"))  # fmt: skip
    bad("kind", span, "leaf kind 3", "M07-17", at("tree.leaves.kind[3]", 3))
    bad("value-row", order, "a value's row out of range", "M07-17 M07-18", at("tree.leaves.row[3]", 1))
    bad("tensor-row", order, "a tensor's row out of range", "M07-17", at("tree.leaves.row[0]", 9))
    bad("row-order", order, "tensors not numbered by first use", "M07-18",
        at("tree.leaves.row[0]", 1), at("tree.leaves.row[1]", 0))  # fmt: skip
    bad("dtype-row", order, "a dtype's row out of range", "M07-17", at("tree.tensors.dtype[0]", 7))
    bad("dtype-bits", "corrupt-dtype", "float32 of 16 bits", "M04-1", at("tree.dtypes.bits[0]", 16))
    bad("dtype-9-bits", "corrupt-dtype", "an unknown dtype of 9 bits", "M04-1",
        at("tree.dtypes.name[0]", "odd9"), at("tree.dtypes.bits[0]", 9))  # fmt: skip
    bad("dtype-0-bits", "corrupt-dtype", "an unknown dtype of 0 bits", "M04-1",
        at("tree.dtypes.name[0]", "void"), at("tree.dtypes.bits[0]", 0))  # fmt: skip
    bad("dtype-text-bits", "corrupt-dtype", "string of 8 bits", "M04-1",
        at("tree.dtypes.name[1]", "string"))  # fmt: skip
    bad("dtype-zero-unit", "corrupt-dtype", "a unit counted 0 times, of 32 bits", "M04-1",
        at("tree.dtypes.name[0]", "datetime64[ns]"))  # fmt: skip
    bad("dtype-twice", "corrupt-dtype", "two dtypes of one name", "M04-1",
        at("tree.dtypes.name[1]", "float32"), at("tree.dtypes.bits[1]", 32))  # fmt: skip
    bad("ndim", "corrupt-dims", "65 dims", "M09-9",
        at("tree.tensors.ndim[0]", 65), at("tree.tensors.dims", column("Q", *[1] * 68)))  # fmt: skip
    bad("dims-overflow", "corrupt-dims-overflow", "2^32 x 2^32", "M07-19 M09-10",
        at("tree.tensors.dims[0]", 1 << 32), at("tree.tensors.dims[1]", 1 << 32))  # fmt: skip
    bad("dims-wrap", "corrupt-dims-overflow", "a product that is 6 modulo 2^64", "M07-19 M09-10",
        at("tree.tensors.dims[0]", 3 << 62), at("tree.tensors.dims[1]", 6))  # fmt: skip
    bad("dims-top", "corrupt-dims-overflow", "a dim of 2^64 - 1", "M07-19",
        at("tree.tensors.dims[2]", top))  # fmt: skip
    bad("packed-value", "corrupt-value", "a packed value in floats", "M07-20",
        at("tree.leaves.kind[0]", 2))  # fmt: skip
    bad("value-long", "corrupt-value", "a value of 5,000 bytes", "M07-20",
        at("tree.values[0]", pack("x" * 5000)))  # fmt: skip
    bad("region-owner", span, "a region of no tensor", "M07-17", at("tree.regions.tensor[3]", 5))
    bad("region-descends", span, "regions of tensors 1, 0", "M07-17",
        at("tree.regions.tensor[0]", 1), at("tree.regions.tensor[1]", 0),
        at("tree.regions.origin", column("Q", 0, 0, 0, 0, 0, 1, 0)),
        at("tree.regions.extent", column("Q", 10000, 2, 3, 1, 2, 1, 2)))  # fmt: skip
    bad("region-gap", regions, "a gap between regions", "M07-21", at("tree.tensors.dims[3]", 3))
    bad("region-short", regions, "a region shorter than its tensor", "M07-21",
        at("tree.regions.extent[0]", 1))  # fmt: skip
    bad("region-overlap", regions, "both regions begin in row 0", "M07-21",
        at("tree.regions.extent[3]", 2), at("tree.regions.origin[5]", 1))  # fmt: skip
    bad("region-outside", regions, "a region leaves its tensor", "M07-21",
        at("tree.regions.origin[5]", 2))  # fmt: skip
    bad("region-wraps", regions, "origin + extent is 2^64", "M07-21",
        at("tree.regions.origin[5]", top))  # fmt: skip
    bad("region-reversed", order, "regions not sorted by origin", "M07-23",
        at("tree.regions.origin", column("Q", 0, 0, 0, 1, 0, 0, 0)))  # fmt: skip
    bad("region-of-nothing", regions, "a region of a tensor without elements", "M07-22",
        at("tree.tensors.dims[0]", 0))  # fmt: skip
    bad("no-chunk", span, "a region of 0 chunks", "M07-15", at("tree.regions.nchunks[0]", 0))
    bad("chunk-sum", chunks, "chunks of 23 of 24 bytes", "M07-25", at("tree.chunks.raw[0]", 23),
        at("placement.stored[0]", 23))  # fmt: skip
    bad("chunk-unequal", chunks, "chunks of 4096, 4095, 1809", "M07-24",
        at("tree.chunks.raw[2]", 4095), at("tree.chunks.raw[3]", 1809),
        at("placement.stored[2]", 4095), at("placement.stored[3]", 1809))  # fmt: skip
    bad("chunk-zero", chunks, "a chunk of 0 bytes", "M07-24", at("tree.chunks.raw[0]", 0))
    bad("chunk-huge", chunks, "a chunk of more than 1 GiB", "M07-24 M09-9",
        at("tree.chunks.raw[0]", (1 << 30) + 1))  # fmt: skip
    bad("attribute-row", span, "an attribute of leaf 4", "M07-17",
        at("tree.attributes.leaves", {"x.y": {"rows": column("I", 4), "values": [b"\xc0"]}}))  # fmt: skip
    two = [((0,), (1,), strings([b"a"])), ((1,), (1,), strings([b"b"]))]
    text = Draft([("s", Tensor("string", 0, (2,), regions=two, twin=["a", "b"]))]).seal()
    reject("index-strings-cut", "index", text, regions, "strings in two regions", "M04-7 M07-30")
    bad("container-twice", "corrupt-duplicate-name", "two rows of one container", "M03-2",
        at("tree.containers", {"name": ["x", "x"], "kind": ["list"] * 2, "argument": [b"\xc0"] * 2}))  # fmt: skip


def placements_rejected() -> None:
    def bad(name: str, kind: str, why: str, covers: str, *bends: Callable[[Draft], None]) -> None:
        reject(f"index-{name}", "index", bent(*bends), kind, why, covers)

    span, away = "corrupt-column-range", "corrupt-chunk-range"
    draft = base()
    offset, nbytes = draft.placement["offset"].rows[1], draft.files["nbytes"].rows[0]
    own = draft.files["id"]
    both = own + bytes.fromhex("00" * 16)
    sizes = Column("Q", [nbytes] * 2)
    bad("files-order", "corrupt-order", "ids descend", "M07-17",
        at("files.id", both), at("files.nbytes", sizes))  # fmt: skip
    bad("files-twice", "corrupt-order", "an id twice", "M07-17",
        at("files.id", own * 2), at("files.nbytes", sizes))  # fmt: skip
    bad("file-unused", span, "a file that no chunk uses", "M07-31",
        at("files.id", both[16:] + own), at("files.nbytes", sizes),
        at("placement.file", Column("I", [1] * 6)))  # fmt: skip
    bad("file-id-length", "corrupt-column-length", "an id of 15 bytes", "M07-15",
        at("files.id", own[:15]))  # fmt: skip
    bad("file-nbytes", span, "a size that is no whole block", "M07-17", at("files.nbytes[0]", nbytes + 1))
    bad("file-row", span, "a file's row out of range", "M07-17", at("placement.file[0]", 1))
    bad("codec-row", span, "a pipeline out of range", "M07-17",
        at("placement.codec[0]", 1), at("placement.digest", draft.tree["chunks"]["digest"]))  # fmt: skip
    bad("chunk-head", away, "a chunk in the head", "M07-26", at("placement.offset[0]", 63))
    bad("chunk-end", away, "a chunk in the footer", "M07-26", at("placement.offset[0]", nbytes - 87))
    bad("chunk-far", away, "an offset of 2^64 - 1", "M07-26", at("placement.offset[0]", (1 << 64) - 1))
    bad("chunk-overlap", "corrupt-overlap", "two chunks overlap by a byte", "M07-28",
        at("placement.offset[2]", offset + 4095))  # fmt: skip
    bad("chunk-shared", "corrupt-overlap", "two chunks of other content share a range", "M07-28",
        at("placement.offset[2]", offset))  # fmt: skip
    bad("stored-raw", "corrupt-chunk-length", "a raw chunk stored in 23 of 24 bytes", "M07-27",
        at("placement.stored[0]", 23))  # fmt: skip
    digests = draft.tree["chunks"]["digest"]
    bad("raw-digest", "corrupt-chunk-digest", "a raw chunk with another stored digest", "M06-13",
        at("placement.digest", flip(digests, 16)))  # fmt: skip
    zstd = [[], [["zstd"]]]
    bad("no-stored-digest", "corrupt-section-entry", "zstd without stored digests", "M07-29",
        at("placement.pipelines", zstd), at("placement.codec[0]", 1))  # fmt: skip
    for name, pipelines, why in (
        ("pipeline-first", [[["zstd"]]], "a first pipeline that is not raw"),
        ("pipeline-none", [], "no pipeline"),
        ("pipeline-long", [[], [["zstd"]] * 5], "five stages"),
        ("pipeline-many", [[]] * 257, "257 pipelines"),
        ("pipeline-empty", [[], []], "a second raw pipeline"),
        ("pipeline-type", [[], [[1]]], "a stage without a name"),
    ):
        bad(name, "corrupt-pipeline", why, "M06-8", at("placement.pipelines", pipelines))


def structures_rejected() -> None:
    """Refused when the tree is rebuilt."""
    one, none = Packed(1, 1), Packed(None, None)

    def bad(
        name: str, leaves: list[tuple[str, Any]], kind: str, why: str, covers: str, **o: Any
    ) -> None:
        reject(f"tree-{name}", "tree", Draft(leaves, **o).seal(), kind, why, covers)

    shape, wrong = "corrupt-structure", "corrupt-name"
    listed = {"containers": [("l", "list", None)]}
    bad("empty", [], shape, "no leaf", "M03-19")
    bad("leaf-above", [("a", one), ("a/b", none)], shape, "a leaf above a leaf", "M03-6")
    bad("leaf-below", [("a/b", one), ("a", none)], shape, "a leaf above a leaf, later", "M03-6")
    bad("root-above", [("", one), ("a", none)], shape, "the root and a child", "M03-6")
    bad("list-gap", [("l/0", SMALL), ("l/2", one)], shape, "positions 0, 2", "M03-5", **listed)
    bad("list-key", [("l/0", SMALL), ("l/x", one)], shape, "a key in a list", "M03-5", **listed)
    bad("list-order", [("l/1", SMALL), ("l/0", one)], shape, "positions 1, 0", "M03-10", **listed)
    bad("list-zero", [("l/00", SMALL)], shape, "position 00", "M03-5", **listed)
    bad("no-leaf", [("a", SMALL)], shape, "a container without a leaf", "M03-17", **listed)
    bad("container-leaf", [("l", SMALL)], shape, "a leaf as container", "M03-17", **listed)
    bad("kind", [("l/0", SMALL)], "corrupt-column-range", "an unknown container", "M03-7",
        containers=[("l", "bag", None)])  # fmt: skip
    bad("argument", [("l/x", SMALL)], "corrupt-value", "an unknown factory", "M03-7",
        containers=[("l", "defaultdict", "eval")])  # fmt: skip
    bad("fields", [("l/0", SMALL)], shape, "a field too many", "M03-7",
        containers=[("l", "namedtuple", ["P", ["x", "y"]])])  # fmt: skip
    bad("part", [("a/~9", SMALL)], wrong, "an unknown escape", "M03-1")
    bad("empty-part", [("a//b", SMALL)], wrong, "an empty part", "M03-1")
    bad("equal-keys", [("a/~3i1", SMALL), ("a/~3b1", one)], shape, "keys 1 and True", "M03-18")


def names_rejected() -> None:
    for number, text in enumerate(
        ["~", "a~", "~9", "a~2", "a~3i1", "~3", "~3z", "~3i01", "~3i-0", "~3i", "~3b2", "~3n1",
         "~3f1", "~3f0.50", "~3fx", "~3xF0", "~3x0", '~3t["a" ]', "~3t{}", "~3t[1]", "~3t",
         '~3t["~03i01"]', "~3i\u0661", "~3i+1", "~3f1_0.0", "~3iffff"]  # fmt: skip
    ):
        reject(f"name-{number:02}", "name", text.encode(), "corrupt-name", repr(text), "M03-1")
    for number, text in enumerate(
        ["", "A", "a/b", "..", ".a", "a.", "-a", "_a", "con", "nul.txt", "lpt1", "com0", "7",
         "007", "latest", "step-1", "step-00000000000000070", "step-9007199254740992", "step-x",
         "x" * 121, "a b", "a\n", "caf\u00e9", "a\0", "a~0", "\u0661"]  # fmt: skip
    ):
        twin = (f"checkpoint-name-{number:02}", "checkpoint-name", text.encode())
        reject(*twin, "corrupt-name", repr(text), "M02-4 M02-5")


def values_rejected() -> None:
    value, bad_msgpack, depth = "corrupt-value", "corrupt-msgpack", "corrupt-value-depth"
    rows: list[tuple[str, Any, str, str]] = [
        ("empty", Splice(b""), bad_msgpack, "no byte"),
        ("never", Splice(b"\xc1"), bad_msgpack, "a byte that msgpack never uses"),
        ("cut", Splice(b"\xa5abc"), bad_msgpack, "text cut off"),
        ("trailing", Splice(b"\xc0\xc0"), "corrupt-trailing-bytes", "two objects"),
        ("array-header", Splice(b"\xdd\xff\xff\xff\xff"), bad_msgpack, "4 billion items"),
        ("map-header", Splice(b"\xdf\xff\xff\xff\xff"), bad_msgpack, "4 billion pairs"),
        ("ext-header", Splice(b"\xc9\xff\xff\xff\xff\x01"), bad_msgpack, "4 GiB of ext"),
        ("bin-header", Splice(b"\xc6\xff\xff\xff\xff"), bad_msgpack, "4 GiB of bin"),
        ("utf8", Splice(b"\xa1\xff"), bad_msgpack, "text that is not UTF-8"),
        ("key-twice", Splice(b"\x82\xa1a\x01\xa1a\x02"), bad_msgpack, "a key twice"),
        ("int-key", {1: 2}, value, "a map with an int as key"),
        ("depth-65", nested(64, None), depth, "65 levels of arrays"),
        ("depth-tuples", nested_tuples(64), depth, "65 levels of ext"),
        ("depth-maps", Splice(b"\x81\xa1a" * 500 + b"\xc0"), depth, "501 levels of maps"),
        ("depth-10000", Splice(b"\x91" * 10000 + b"\xc0"), bad_msgpack, "more than msgpack takes"),
        ("ext-code", ext("tuple", [], code=2), value, "ext of type 2"),
        ("timestamp", Splice(b"\xd6\xff\x00\x00\x00\x00"), value, "msgpack's own timestamp"),
        ("ext-nil", Splice(b"\xd4\x01\xc0"), value, "an ext that holds nil"),
        ("ext-three", Splice(msgpack.packb(msgpack.ExtType(1, b"\x93\xa1a\xc0\xc0"))), value, "three"),
        ("tag-int", Splice(msgpack.packb(msgpack.ExtType(1, b"\x92\x01\x90"))), value, "tag 1"),
        ("tag-unknown", ext("pickle", b""), "unsupported-value-tag", "an unknown tag"),
        ("int-small", ext("int", b"\x07"), value, "an int that msgpack has itself"),
        ("int-long", ext("int", bytes(8) + b"\x01\0"), value, "an int with needless bytes"),
        ("int-text", ext("int", "7"), value, "an int as text"),
        ("complex", ext("complex", [1.0]), value, "a complex number of one part"),
        ("complex-int", ext("complex", [1, 2]), value, "a complex number of ints"),
        ("tuple", ext("tuple", 1), value, "a tuple that is 1"),
        ("set-twice", ext("set", [1, 1]), value, "an item twice"),
        ("set-list", ext("set", [[]]), value, "a list in a set"),
        ("set-order", ext("set", [2, 1]), value, "items that descend"),
        ("dict-flat", ext("dict", [1, 2]), value, "no pairs"),
        ("dict-twice", ext("dict", [[1, 2], [1, 3]]), value, "a key twice"),
        ("dict-list-key", ext("dict", [[[], 1]]), value, "a list as key"),
        ("factory", ext("defaultdict", ["eval", []]), value, "an unknown factory"),
        ("namedtuple-fields", ext("namedtuple", ["P", ["x"], [1, 2]]), value, "a value too many"),
        ("namedtuple-name", ext("namedtuple", ["P q", ["x"], [1]]), value, "no identifier"),
        ("namedtuple-keyword", ext("namedtuple", ["P", ["def"], [1]]), value, "a keyword"),
        ("namedtuple-twice", ext("namedtuple", ["P", ["x", "x"], [1, 2]]), value, "a field twice"),
        ("np-length", ext("np", ["float32", b"\0"]), value, "float32 of one byte"),
        ("np-dtype", ext("np", ["object", b""]), "unsupported-value-dtype", "an unknown dtype"),
        ("path", ext("path", ["os.system", "a"]), value, "no class of paths"),
        ("timedelta", ext("timedelta", [0, 86400, 0]), value, "seconds of more than a day"),
        ("range", ext("range", [0, 1.5, 1]), value, "a range of floats"),
        ("type", ext("type", [1, 2]), value, "a registered name that is no text"),
    ]
    for name, packed, kind, why in rows:
        covers = "M03-12" if kind == depth else "M03-13 M09-6" if "header" in name else "M03-11"
        covers = "M03-16" if name == "tag-unknown" else covers
        reject(f"value-{name}", "value", pack(packed), kind, why, covers)


def payloads_rejected() -> None:
    def bad(name: str, dtype: tuple[str, int], count: int, data: bytes, kind: str, why: str) -> None:
        covers = {"corrupt-padding": "M04-3", "corrupt-strings": "M04-5 M04-6"}.get(kind, "M07-25")
        twin = {"format": "payload", "kind": kind, "why": why, "covers": covers.split()}
        twin |= {"dtype": dtype[0], "bits": dtype[1], "shape": [count]}
        emit("reject", f"payload-{name}", data, twin)

    bad("spare-4", ("int4", 4), 3, b"\x21\x13", "corrupt-padding", "spare bits of int4")
    bad("spare-6", ("float6_e2m3fn", 6), 1, b"\x40", "corrupt-padding", "spare bits of 6 bits")
    bad("spare-1", ("uint1", 1), 1, b"\x02", "corrupt-padding", "spare bits of one bit")
    bad("short", ("float32", 32), 2, bytes(7), "corrupt-truncated", "7 bytes of 8")
    bad("long", ("float32", 32), 2, bytes(9), "corrupt-trailing-bytes", "9 bytes of 8")
    words = struct.Struct("<3Q").pack
    strings_ = ("string", 0)
    bad("strings-first", strings_, 2, words(1, 1, 2) + b"ab", "corrupt-strings", "first not 0")
    bad("strings-descend", strings_, 2, words(0, 3, 2) + b"ab", "corrupt-strings", "descending")
    bad("strings-last", strings_, 2, words(0, 1, 3) + b"ab", "corrupt-strings", "last not the end")
    bad("strings-short", strings_, 2, words(0, 0, 0)[:-1], "corrupt-strings", "within the offsets")
    bad("strings-utf8", strings_, 2, words(0, 1, 2) + b"\xc3\xa9", "corrupt-strings", "half a letter")
    huge = words(0, 1 << 63, 2) + b"ab"
    bad("strings-huge", strings_, 2, huge, "corrupt-strings", "an offset of 2^63")


def data_files_rejected() -> None:
    def fresh(**o: Any) -> Data:
        draft = base() if not o else Draft([("run", Tensor("uint8", 8, (900,), bytes(900), codec=1))], **o)
        return copy.deepcopy(draft.datas[0])

    def bad(name: str, data: bytes, kind: str, why: str, covers: str) -> None:
        reject(f"data-{name}", "data-file", data, kind, why, covers)

    def table_bent(name: str, kind: str, why: str, covers: str, *bends: Callable[[Any], None]) -> None:
        data = fresh()
        table = data.table()
        for bend in bends:
            bend(table)
        bad(name, data.finish(pack(table))[1], kind, why, covers)

    def row(table: str, column: str, position: int, value: int) -> Callable[[Any], None]:
        def bend(made: Any) -> None:
            made[table][column].rows[position] = value

        return bend

    def removed(table: str, column: str) -> Callable[[Any], None]:
        return lambda made: made[table].pop(column)

    data = fresh()
    good = data.finish()[1]
    size = len(good)
    end = size - 64
    table_at, table_length = struct.unpack_from("<QQ", good, end)

    def footer(offset: int, value: bytes) -> bytes:
        made = bytearray(good)
        made[end + offset : end + offset + len(value)] = value
        return bytes(made)

    u64 = struct.Struct("<Q").pack
    away = "corrupt-table-range"
    bad("empty", b"", "corrupt-truncated", "nothing", "M05-1")
    bad("cut", good[:-1], "corrupt-truncated", "a byte too few", "M05-1")
    bad("long", good + b"\0", "corrupt-truncated", "a byte too many", "M05-1")
    bad("half", good[: size // 2 // BLOCK * BLOCK], "corrupt-magic", "the second half is gone", "M05-1")
    bad("magic", flip(good, 1), "corrupt-magic", "a bit of the magic", "M05-3")
    bad("end-magic", flip(good, size - 1), "corrupt-magic", "a bit of the last magic", "M05-3")
    bad("major", flip(good, 8, 3), "unsupported-major", "major 2", "M09-1")
    bad("algorithm", flip(good, 12, 8), "unsupported-digest", "digest algorithm 9", "M06-1")
    bad("algorithms", flip(good, 12, 3), "corrupt-algorithm", "sha256 in the head only", "M06-2")
    bad("head-padding", flip(good, 63), "corrupt-padding", "a byte of the head", "M05-3")
    bad("footer-padding", flip(good, end + 17), "corrupt-padding", "a byte of the footer", "M05-3")
    bad("footer-filling", flip(good, end + 55), "corrupt-padding", "filling of a digest", "M06-5")
    bad("gap", flip(good, data.chunks[1][1] - 1), "corrupt-padding", "between chunks", "M05-3")
    bad("tail", flip(good, end - 1), "corrupt-padding", "behind the table", "M05-3")
    bad("zeroed-tail", good[:-BLOCK] + bytes(BLOCK), "corrupt-magic", "a zeroed last block", "M05-3")
    bad("table-flip", flip(good, table_at + 9), "corrupt-table-digest", "a bit of the table", "M05-2")
    bad("table-digest", flip(good, end + 24), "corrupt-table-digest", "a bit of its digest", "M05-2")
    bad("table-far", footer(0, u64(1 << 63)), away, "a table at 2^63", "M05-7")
    bad("table-odd", footer(0, u64(table_at + 1)), away, "a table at no multiple of 64", "M05-7")
    bad("table-long", footer(8, u64(size)), away, "a table of the file's size", "M05-7")
    bad("table-huge", footer(8, u64((1 << 64) - 1)), away, "a table of 2^64 - 1 bytes", "M05-7 M09-9")
    bad("chunk-flip", flip(good, data.chunks[2][1]), "corrupt-chunk-digest", "a bit of a chunk", "M05-12")
    bad("chunk-last", flip(good, 64 + 23, 128), "corrupt-chunk-digest", "a chunk's last bit", "M05-12")
    zstd = [[], [["zstd"]]]
    coded = fresh(pipelines=zstd)
    stored = coded.chunks[0][1]
    bad("stored-flip", flip(coded.finish()[1], stored + 9), "corrupt-chunk-digest",
        "a bit of a zstd chunk", "M05-11")  # fmt: skip
    coded.body[stored + 5] ^= 1
    coded.chunks[0][6] = digest(bytes(coded.body[stored : stored + coded.chunks[0][2]]), "xxh3-128")
    bad("zstd-size", coded.finish()[1], "corrupt-zstd-size", "a frame of another size", "M06-11")
    coded = fresh(pipelines=zstd)
    coded.body[stored] ^= 1
    coded.chunks[0][6] = digest(bytes(coded.body[stored : stored + coded.chunks[0][2]]), "xxh3-128")
    bad("zstd-frame", coded.finish()[1], "corrupt-zstd-frame", "no frame at all", "M06-10")
    bad("codec", fresh(pipelines=[[], [["zstd", 3]]]).finish()[1], "unsupported-codec",
        "zstd with a parameter", "M06-6")  # fmt: skip
    offset = data.chunks[1][1]
    lengths = "corrupt-chunk-length"
    table_bent("overlap", "corrupt-chunk-range", "two chunks overlap", "M05-6",
               row("chunks", "offset", 2, offset + 1))  # fmt: skip
    table_bent("descend", "corrupt-chunk-range", "offsets descend", "M05-6",
               row("chunks", "offset", 0, offset), row("chunks", "offset", 1, 64))  # fmt: skip
    table_bent("outside", "corrupt-chunk-range", "a chunk in the table", "M05-6",
               row("chunks", "offset", 5, table_at - 7))  # fmt: skip
    table_bent("head", "corrupt-chunk-range", "a chunk in the head", "M05-6",
               row("chunks", "offset", 0, 0))  # fmt: skip
    table_bent("raw-length", lengths, "raw, two lengths", "M05-8", row("chunks", "raw", 0, 23))
    table_bent("no-chunk", "corrupt-column-range", "0 chunks", "M05-7",
               row("regions", "nchunks", 0, 0))  # fmt: skip
    table_bent("chunk-count", "corrupt-column-length", "a chunk too many", "M05-7",
               row("regions", "nchunks", 0, 2))  # fmt: skip
    table_bent("dtype-row", "corrupt-column-range", "a dtype out of range", "M05-7",
               row("regions", "dtype", 0, 2))  # fmt: skip
    table_bent("box", "corrupt-regions", "a box outside its shape", "M05-7",
               row("regions", "extent", 0, 3))  # fmt: skip
    table_bent("box-wraps", "corrupt-regions", "origin + extent is 2^64", "M05-7",
               row("regions", "origin", 0, (1 << 64) - 2))  # fmt: skip
    table_bent("shape", "corrupt-dims-overflow", "a shape of 2^64 - 2 rows", "M05-7",
               row("regions", "shape", 0, (1 << 64) - 2))  # fmt: skip
    table_bent("no-column", "corrupt-section-entry", "no offsets", "M05-7", removed("chunks", "offset"))
    table_bent("codec-row", "corrupt-section-entry", "zstd without stored digests", "M05-9",
               row("chunks", "codec", 0, 1))  # fmt: skip
    table_bent("raw-digest", "corrupt-chunk-digest", "a raw chunk with two digests", "M06-13",
               lambda made: made["chunks"].update(stored_digest=bytes(96)))  # fmt: skip
    table_bent("pipelines", "corrupt-pipeline", "no pipelines", "M06-8",
               lambda made: made.pop("pipelines"))  # fmt: skip
    bad("table-nil", fresh().finish(b"\xc0")[1], "corrupt-msgpack", "a table that is nil", "M05-7")


# -- fragments ------------------------------------------------------------------------------------

TICKET = {"name": "step-0000000000000003", "step": 3}


class Piece(Draft):
    """A rank's fragment (8.9): its own leaves, the regions that it wrote, and its replicas.

    `leaves` may name one tensor several times; `replicas`: leaf -> boxes with their digests.
    """

    def __init__(
        self,
        leaves: list[tuple[str, Any]],
        rank: int,
        size: int,
        *,
        replicas: list[tuple[str, tuple[Any, Any], bytes]] | None = None,
        algorithm: str = "xxh3-128",
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(leaves, algorithm=algorithm, about={**TICKET, **(about or {})})
        rows = {name: row for name, kind, row in self.leaf_rows if kind != 1}
        held = sorted((rows[name], box, own) for name, box, own in replicas or [])
        self.entry: dict[str, Any] = {
            "rank": rank,
            "size": size,
            "written_nbytes": sum(map(len, self.data_files.values())),
            "replicas": {
                "tensor": Column("I", [row for row, _, _ in held]),
                "origin": Column("Q", [n for _, (origin, _), _ in held for n in origin]),
                "extent": Column("Q", [n for _, (_, extent), _ in held for n in extent]),
                "digest": b"".join(own for _, _, own in held),
            },
        }
        self.about["metadata"] = {"ckptfmt.fragment": self.entry}


def box_digest(payload: bytes, chunk: int = 1 << 22, algorithm: str = "xxh3-128") -> bytes:
    """Of a box's content: of the digests of its chunks, one after another."""
    raws = [payload[at : at + chunk] for at in range(0, len(payload), chunk)]
    return digest(b"".join(digest(raw, algorithm) for raw in raws), algorithm)


def rows_of(*numbers: int, dtype: str = "float32", shape: tuple[int, ...] = (4, 2)) -> Tensor:
    """A float32 matrix of which some rows are written."""
    regions = [((n, 0), (1, shape[1]), stream(f"row {n}", 4 * shape[1])) for n in numbers]
    whole = b"".join(stream(f"row {n}", 4 * shape[1]) for n in range(shape[0]))
    return Tensor(dtype, 32, shape, regions=regions, twin=whole)


def unwritten(like: Tensor) -> Tensor:
    """Dtype and shape alone."""
    return Tensor(like.dtype, like.bits, like.shape, regions=[], twin=like.twin)


WHOLE = ((0, 0), (2, 3))


def pair(**o: Any) -> list[Piece]:
    """Two ranks: `m/a` is written by rank 0, `m/w` has two rows of each, `v` is a value."""
    none = unwritten(SMALL)
    first: list[tuple[str, Any]] = [("m/a", SMALL), ("m/w", rows_of(0, 1)), ("v", Packed(7, 7))]
    second: list[tuple[str, Any]] = [("m/a", none), ("m/w", rows_of(2, 3)), ("v", Packed(7, 7))]
    payload = SMALL.regions[0][2]
    algorithm = o.get("algorithm", "xxh3-128")
    replica = ("m/a", WHOLE, box_digest(payload, algorithm=algorithm))
    return [Piece(first, 0, 2, **o), Piece(second, 1, 2, replicas=[replica], **o)]


def accept_pieces(name: str, pieces: list[Draft], merged: Draft, why: str, covers: str) -> None:
    """Fragments of all ranks, and the tree that they make."""
    tree = merged.raw_sections()[2]
    chunk_files = {digest: file for file, data in data_of(pieces).items() for digest in data}
    files = sorted({chunk_files[row[1]] for row in merged.chunk_rows})
    content = {k: merged.content()[k] for k in ("leaves", "values", "containers")}
    regions = [
        {"tensor": tensor, "origin": list(origin), "extent": list(extent)}
        for tensor, origin, extent, _ in merged.region_rows
    ]
    twin = {
        "format": "fragments",
        "why": why,
        "covers": covers.split(),
        "ticket": {**TICKET, "txn": TXN.hex(), "digest": merged.algorithm},
        "tree_digest": digest(tree, merged.algorithm).hex(),
        "files": files,
        "content": {**content, "regions": regions},
        "indexes": [is_index(piece) for piece in pieces],
    }
    emit("accept", name, pack([piece.seal() for piece in pieces]), twin)


def data_of(pieces: list[Draft]) -> dict[str, set[bytes]]:
    """Data file -> digests of its chunks; of files with equal chunks that of the lowest rank."""
    made: dict[str, set[bytes]] = {}
    for piece in reversed(pieces):
        for number, data in enumerate(piece.datas):
            own = {row[1] for row in piece.chunk_rows if row[2] == number}
            if own:
                made.pop(data.finish()[0], None)
                made[data.finish()[0]] = own
    return made


def is_index(piece: Draft) -> bool:
    """Whether a reader takes it for an index: its regions tile every tensor."""
    held = [0] * len(piece.tensors)
    for tensor, _, extent, _ in piece.region_rows:
        held[tensor] += math.prod(extent)
    return held == [math.prod(tensor.shape) for tensor in piece.tensors]


def fragments_accepted() -> None:
    for algorithm in ("xxh3-128", "sha256"):
        whole = [("m/a", SMALL), ("m/w", rows_of(0, 1, 2, 3)), ("v", Packed(7, 7))]
        accept_pieces(
            f"fragments-pair-{algorithm}",
            [*pair(algorithm=algorithm)],
            Draft(whole, algorithm=algorithm),
            "boxes of two ranks, a replica, and a value that both have",
            "M08-23 M08-24 M08-25 M08-26",
        )
    accept_pieces(
        "fragments-sole",
        [Piece(whole, 0, 1)],
        Draft(whole),
        "one rank alone: its fragment is an index too",
        "M08-23 M08-24",
    )
    one, two, five = Packed(1, 1), Packed(2, 2), stream("five", 5)
    accept_pieces(
        "fragments-own-keys",
        [
            Piece([("m/x0", SMALL), ("m/y", one), ("z", rows_of(0))], 0, 3),
            Piece([("m/x1", Tensor("uint8", 8, (5,), five)), ("z", rows_of(2, 3)), ("m2", two)], 1, 3),
            Piece([("m/y", one), ("m/x2", Packed(3, 3)), ("z", rows_of(1))], 2, 3),
        ],
        Draft(
            [
                ("m/x0", SMALL),
                ("m/y", one),
                ("m/x1", Tensor("uint8", 8, (5,), five)),
                ("m/x2", Packed(3, 3)),
                ("z", rows_of(*range(4))),
                ("m2", two),
            ]
        ),
        "a dict has the keys of rank 0, then those that rank 1 adds, and so on",
        "M08-24 M08-26",
    )
    same = stream("same", 24)
    accept_pieces(
        "fragments-written-twice",
        [
            Piece([("a", Tensor("uint8", 8, (24,), same))], 0, 2),
            Piece([("a", Tensor("uint8", 8, (24,), same)), ("b", rows_of(*range(4)))], 1, 2),
        ],
        Draft([("a", Tensor("uint8", 8, (24,), same)), ("b", rows_of(*range(4)))]),
        "a box that two ranks wrote is taken from the lower one",
        "M08-24 M08-25",
    )
    tied, hollow = rows_of(*range(4)), unwritten(rows_of())
    accept_pieces(
        "fragments-ties",
        [
            Piece([("t/a", hollow), ("t/b", unwritten(rows_of()))], 0, 2),
            Piece([("t/a", tied), ("t/b", tied)], 1, 2),
        ],
        Draft([("t/a", tied), ("t/b", tied)]),
        "names that one rank ties are tied; a rank without their bytes cannot tell",
        "M08-26",
    )


def fragments_rejected() -> None:
    def bad(name: str, kind: str, why: str, *bends: Callable[[Draft], None]) -> None:
        piece = pair()[1]
        for bend in bends:
            bend(piece)
        reject(f"fragment-{name}", "fragment", piece.seal(), kind, why, "M08-23")

    def set_entry(*path: str, to: Any) -> Callable[[Draft], None]:
        def bend(draft: Draft) -> None:
            table = draft.about["metadata"]["ckptfmt.fragment"]
            for key in path[:-1]:
                table = table[key]
            if to is None:
                del table[path[-1]]
            else:
                table[path[-1]] = to

        return bend

    wrong = "corrupt-fragment"
    bad("none", wrong, "an index that is no fragment", lambda d: d.about["metadata"].clear())
    bad("nil", wrong, "an entry that is nil",
        lambda d: d.about["metadata"].update({"ckptfmt.fragment": None}))  # fmt: skip
    bad("rank", wrong, "rank 2 of 2", set_entry("rank", to=2))
    bad("rank-below", wrong, "rank -1", set_entry("rank", to=-1))
    bad("no-rank", "corrupt-section-entry", "no rank", set_entry("rank", to=None))
    bad("size-text", "corrupt-section-entry", "a size that is text", set_entry("size", to="2"))
    bad("no-replicas", "corrupt-section-entry", "no table", set_entry("replicas", to=None))
    bad("no-digest", "corrupt-section-entry", "replicas without digests",
        set_entry("replicas", "digest", to=None))  # fmt: skip
    bad("tensor", "corrupt-column-range", "a replica of tensor 2 of 2",
        set_entry("replicas", "tensor", to=Column("I", [2])))  # fmt: skip
    bad("origin", "corrupt-column-length", "an origin of one axis of two",
        set_entry("replicas", "origin", to=Column("Q", [0])))  # fmt: skip
    bad("outside", "corrupt-regions", "a replica beyond its tensor",
        set_entry("replicas", "extent", to=Column("Q", [2, 4])))  # fmt: skip
    bad("wraps", "corrupt-regions", "a replica that ends beyond 2^64",
        set_entry("replicas", "origin", to=Column("Q", [1, (1 << 64) - 1])))  # fmt: skip
    bad("digest", "corrupt-column-length", "a digest of 15 bytes",
        set_entry("replicas", "digest", to=bytes(15)))  # fmt: skip
    bad("region-outside", "corrupt-regions", "a region beyond its tensor",
        at("tree.regions.origin[0]", 4))  # fmt: skip
    good = pair()[1].seal()
    flipped = flip(good, len(good) - 1)
    reject("fragment-flip", "fragment", flipped, "corrupt-section-digest", "a flipped bit", "M08-23")
    reject("fragment-cut", "fragment", good[:-1], "corrupt-truncated", "a byte less", "M08-23")


def fragment_sets_rejected() -> None:
    def bad(name: str, pieces: list[Any], kind: str, why: str, covers: str) -> None:
        sealed = [piece.seal() for piece in pieces]
        twin = {
            "format": "fragments",
            "kind": kind,
            "why": why,
            "covers": covers.split(),
            "ticket": {**TICKET, "txn": TXN.hex(), "digest": "xxh3-128"},
        }
        emit("reject", f"fragments-{name}", pack(sealed), twin)

    def with_second(leaves: list[tuple[str, Any]], **o: Any) -> list[Piece]:
        return [pair()[0], Piece(leaves, 1, 2, **o)]

    strange, first, second = "conflict-fragment", *pair()
    bad("one-missing", [first], strange, "rank 0 of 2 alone", "M08-23")
    bad("no-rank-0", [second], strange, "rank 1 of 2 alone", "M08-23")
    bad("none", [], strange, "no fragment at all", "M08-23")
    bad("one-twice", [first, second, second], strange, "rank 1 twice", "M08-23")
    step = {"name": "step-0000000000000004", "step": 4}
    for key, about in (("txn", {"txn": bytes(16)}), ("name", {"name": "main"}), ("step", step)):
        other = pair(about=about)[1]
        bad(f"other-{key}", [first, other], strange, f"another {key}", "M08-23")
    bad("other-digest", [first, pair(algorithm="sha256")[1]], strange,
        "another digest algorithm", "M08-23")  # fmt: skip

    payload, none, seven = SMALL.regions[0][2], unwritten(SMALL), Packed(7, 7)
    own = ("m/a", WHOLE, box_digest(payload))
    tiling, replica = "mismatch-ranks-tiling", "mismatch-ranks-replica"
    bad("hole", with_second([("m/a", none), ("m/w", rows_of(2)), ("v", seven)], replicas=[own]),
        tiling, "nobody has row 3", "M08-24")  # fmt: skip
    longer = Tensor("float32", 32, (4, 2), regions=[((1, 0), (3, 2), stream("three", 24))])
    bad("overlap", with_second([("m/a", none), ("m/w", longer), ("v", seven)], replicas=[own]),
        tiling, "row 1 in two boxes", "M08-24")  # fmt: skip
    bad("replica", with_second([("m/a", none), ("m/w", rows_of(2, 3)), ("v", seven)],
                               replicas=[("m/a", WHOLE, box_digest(bytes(24)))]),
        replica, "a replica of other bytes", "M08-25")  # fmt: skip
    other = Tensor("float32", 32, (2, 3), bytes(24))
    bad("written-twice", with_second([("m/a", other), ("m/w", rows_of(2, 3)), ("v", seven)]),
        replica, "a box that two ranks wrote, with other bytes", "M08-25")  # fmt: skip
    row = ("m/w", ((3, 0), (1, 2)), box_digest(stream("row 3", 8)))
    bad("unwritten", with_second([("m/a", none), ("m/w", rows_of(2)), ("v", seven)],
                                 replicas=[own, row]),
        "mismatch-ranks-box", "a replica of what nobody wrote", "M08-25")  # fmt: skip
    bad("value", with_second([("m/a", none), ("m/w", rows_of(2, 3)), ("v", Packed(8, 8))],
                             replicas=[own]),
        "mismatch-ranks-value", "another value", "M08-26")  # fmt: skip
    shape, wider = "mismatch-ranks-shape", rows_of(2, 3, shape=(4, 3))
    bad("shape", with_second([("m/a", none), ("m/w", wider), ("v", seven)], replicas=[own]),
        shape, "another shape", "M08-26")  # fmt: skip
    ints = rows_of(2, 3, dtype="int32")
    bad("dtype", with_second([("m/a", none), ("m/w", ints), ("v", seven)], replicas=[own]),
        shape, "another dtype", "M08-26")  # fmt: skip
    bad("kind", with_second([("m/a", none), ("m/w", rows_of(2, 3)), ("v", rows_of(*range(4)))],
                            replicas=[own]),
        "mismatch-ranks", "a value here, a tensor there", "M08-26")  # fmt: skip
    bad("leaf-and-dict", with_second([("m/a/b", seven), ("m/w", rows_of(2, 3)), ("v", seven)]),
        "mismatch-ranks", "a leaf here, a dict there", "M08-26")  # fmt: skip
    tied, loose = rows_of(*range(4)), [rows_of(*range(4)), rows_of(*range(4))]
    bad("tie", [Piece([("a", tied), ("b", tied)], 0, 2),
                Piece([("a", loose[0]), ("b", loose[1])], 1, 2)],
        "mismatch-ranks-tie", "tied here, two tensors with bytes there", "M08-26")  # fmt: skip
    shorter = pair()
    at("files.nbytes[0]", 8192)(shorter[1])
    ids = first.files["id"]
    shorter[1].files["id"] = ids
    bad("file-size", [first, shorter[1]], "corrupt-fragment", "two sizes of one data file", "M08-23")


def main() -> int:
    check = "--check" in sys.argv[1:]
    for make in (
        values_accepted,
        names_accepted,
        dtypes_accepted,
        indexes_accepted,
        headers_rejected,
        sections_rejected,
        about_rejected,
        columns_rejected,
        placements_rejected,
        structures_rejected,
        names_rejected,
        values_rejected,
        payloads_rejected,
        data_files_rejected,
        fragments_accepted,
        fragments_rejected,
        fragment_sets_rejected,
    ):
        make()
    differs = []
    for name, data in MADE.items():
        path = HERE / name
        if path.exists():
            if path.read_bytes() != data:
                differs.append(name)
        elif check:
            differs.append(name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
    for name in differs:
        print(f"differs or is missing: {name}", file=sys.stderr)
    print(f"{len(MADE) // 2} vectors")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
