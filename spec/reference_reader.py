"""A reader of ckptfmt stores, written from the specification alone.

Standard library, msgpack, xxhash and zstandard; nothing of the package. It favours clearness over
speed: it checks everything that the specification says a reader checks, reads every byte, and
refuses with the reason codes of section 9.4.

    python spec/reference_reader.py STORE[@NAME] [--list | --json | --dump DIR]

`assert_reference_reads(path)` reads every checkpoint of a store and verifies every data file.
"""

from __future__ import annotations

import argparse
import array
import datetime
import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import msgpack
import xxhash
import zstandard

SECTIONS = ("about", "files", "tree", "placement")
DIGESTS = {1: ("xxh3-128", 16), 2: ("sha256", 32)}
INDEX_MAGIC = bytes.fromhex("89434B490D0A1A00")
DATA_MAGIC = bytes.fromhex("89434B440D0A1A00")
MIB = 1 << 20


class Refused(Exception):
    """The reader refuses; `kind` is a code of section 9.4."""

    def __init__(self, kind: str, what: str = "") -> None:
        super().__init__(f"{kind}: {what}" if what else kind)
        self.kind = kind


def refuse(kind: str, what: object = "") -> NoReturn:
    raise Refused(kind, str(what))


def need(good: object, kind: str, what: object = "") -> None:
    if not good:
        refuse(kind, what)


# -- 6. digests and codecs ------------------------------------------------------------------------


def digest_of(data: Any, algorithm: str) -> bytes:
    if algorithm == "sha256":
        return hashlib.sha256(data).digest()
    return xxhash.xxh3_128_digest(data)


def padded_digest(field32: bytes, size: int) -> bytes:
    """A digest in a field of 32 bytes (M06-5)."""
    need(not any(field32[size:]), "corrupt-padding", "filling of a digest")
    return field32[:size]


def unzstd(stored: bytes, raw_length: int) -> bytes:
    """One frame of a declared size (codecs/zstd)."""
    try:
        parameters = zstandard.get_frame_parameters(stored)
        need(
            parameters.content_size == raw_length and not parameters.dict_id,
            "corrupt-zstd-size",
            f"declares {parameters.content_size}, expected {raw_length}",
        )
        need(stored[:4] == b"\x28\xb5\x2f\xfd", "corrupt-zstd-frame", "not a plain frame")
        raw = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        refuse("corrupt-zstd-frame", error)
    need(len(raw) == raw_length, "corrupt-zstd-size")
    return raw


def decode_chunk(stored: bytes, pipeline: list[list[Any]], raw_length: int) -> bytes:
    for stage in pipeline:
        need(stage == ["zstd"], "unsupported-codec", stage)
    for _ in pipeline:
        stored = unzstd(stored, raw_length)
    return stored


# -- 1.2, 7.4: msgpack maps and columns -----------------------------------------------------------


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = dict(pairs)
    need(len(made) == len(pairs), "corrupt-msgpack", "a key twice")
    return made


def unpack_map(data: Any, where: str) -> dict[str, Any]:
    """One msgpack map with str keys and nothing behind it (M07-12)."""
    try:
        made = msgpack.unpackb(data, raw=False, strict_map_key=True, object_pairs_hook=_unique)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        refuse("corrupt-msgpack", f"{where}: {type(error).__name__}")
    need(is_map(made), "corrupt-msgpack", f"{where} is no map")
    return made


def is_map(value: object) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def entry(table: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = table.get(key)
    good = is_map(value) if kind is dict else type(value) is kind
    need(good, "corrupt-section-entry", f"{where}.{key}")
    return value


def numbers(table: dict[str, Any], key: str, code: str, where: str, rows: int | None = None) -> Any:
    """A column of u8 (B), u16 (H), u32 (I) or u64 (Q)."""
    made = array.array(code)
    data = entry(table, key, bytes, where)
    need(len(data) % made.itemsize == 0, "corrupt-column-length", f"{where}.{key}")
    made.frombytes(data)
    if sys.byteorder == "big":
        made.byteswap()
    need(rows in (None, len(made)), "corrupt-column-length", f"{where}.{key}")
    return made


def strings(
    table: dict[str, Any], key: str, kind: type, where: str, rows: int | None = None
) -> Any:
    items = entry(table, key, list, where)
    need(all(type(item) is kind for item in items), "corrupt-section-entry", f"{where}.{key}")
    need(rows in (None, len(items)), "corrupt-column-length", f"{where}.{key}")
    return items


def digests(
    table: dict[str, Any], key: str, size: int, where: str, rows: int | None = None
) -> list[bytes]:
    data = entry(table, key, bytes, where)
    need(len(data) % size == 0, "corrupt-column-length", f"{where}.{key}")
    need(rows in (None, len(data) // size), "corrupt-column-length", f"{where}.{key}")
    return [data[i : i + size] for i in range(0, len(data), size)]


def ragged(flat: Any, counts: Any) -> list[tuple[int, ...]]:
    """Cut a flat column into runs of these lengths."""
    ends = list(accumulate(counts, initial=0))
    need(ends[-1] == len(flat), "corrupt-column-length")
    return [tuple(flat[a:b]) for a, b in pairwise(ends)]


def pipelines_of(table: dict[str, Any], where: str) -> list[list[list[Any]]]:
    found = table.get("pipelines")
    good = (
        isinstance(found, list)
        and 1 <= len(found) <= 256
        and found[0] == []
        and all(isinstance(p, list) and len(p) <= 4 for p in found)
        and all(found[1:])
        and all(isinstance(s, list) and s and type(s[0]) is str for p in found for s in p)
        and all(type(item) in (str, int) for p in found for s in p for item in s)
    )
    need(good, "corrupt-pipeline", where)
    return found


# -- 4. dtypes ------------------------------------------------------------------------------------

BITS = {
    "bool": 8,
    "string": 0,
    "bytes": 0,
    "bfloat16": 16,
    "complex32": 32,
    "bcomplex32": 32,
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (1, 2, 4, 8, 16, 32, 64)},
    "float16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
    **{f"float8_{k}": 8 for k in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz")},
    **{f"float8_{k}": 8 for k in ("e5m2", "e5m2fnuz", "e8m0fnu")},
    "float4_e2m1fn": 4,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
}
FIXED = re.compile(r"(str|bytes|void)(0|[1-9][0-9]{0,9})\Z")
VARIABLE = ("string", "bytes")
TIME = re.compile(
    r"(datetime64|timedelta64)(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?\Z"
)


def check_dtype(name: str, bits: int) -> None:
    """M04-1."""
    need(1 <= len(name.encode()) <= 255, "corrupt-dtype", "a name of no or too many bytes")
    known = BITS.get(name)
    if fixed := FIXED.match(name):
        known = int(fixed[2])
        need(known % (32 if fixed[1] == "str" else 8) == 0, "corrupt-dtype", name)
    elif TIME.match(name):
        known = 64
    need(known in (None, bits), "corrupt-dtype", f"{name} of {bits} bits")
    need(1 <= bits < 8 or bits % 8 == 0, "corrupt-dtype", f"{name} of {bits} bits")
    need(bits or name in VARIABLE or fixed, "corrupt-dtype", f"{name} of 0 bits")


def dtypes_of(table: dict[str, Any], where: str) -> list[tuple[str, int]]:
    names = strings(table, "name", str, where)
    bits = numbers(table, "bits", "I", where, len(names))
    need(len(set(names)) == len(names), "corrupt-dtype", f"{where}: twice")
    for name, width in zip(names, bits):
        check_dtype(name, width)
    return list(zip(names, bits))


@dataclass
class Tensor:
    """`data`: C order, little-endian, one byte an element under 8 bits. Items: text and bytes."""

    dtype: str
    bits: int
    shape: tuple[int, ...]
    data: bytes = b""
    items: list[Any] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        return (self.bits + 7) // 8


def unpack_bits(payload: bytes, bits: int, count: int) -> bytes:
    """4.2: element i is bits [i * bits, (i + 1) * bits)."""
    spare = 8 * len(payload) - bits * count
    need(not spare or payload[-1] >> (8 - spare) == 0, "corrupt-padding", "spare bits")
    made, mask = bytearray(count), (1 << bits) - 1
    group = 8  # elements that fill a whole number of bytes
    for start in range(0, count, group):
        at = start * bits // 8
        word = int.from_bytes(payload[at : at + bits], "little")
        for i in range(min(group, count - start)):
            made[start + i] = word >> (i * bits) & mask
    return bytes(made)


def unpack_payload(payload: bytes, name: str, bits: int, count: int) -> Any:
    """A region's elements: bytes, one an element under 8 bits (4.2), or a list (4.3)."""
    if name in VARIABLE:
        return split_strings(payload, count, name)
    expected = (count * bits + 7) // 8
    need(len(payload) >= expected, "corrupt-truncated", name)
    need(len(payload) <= expected, "corrupt-trailing-bytes", name)
    return unpack_bits(payload, bits, count) if bits < 8 else payload


def split_strings(payload: bytes, count: int, name: str) -> list[Any]:
    """4.3."""
    need(len(payload) >= 8 * (count + 1), "corrupt-strings", "shorter than its offsets")
    offsets = struct.unpack_from(f"<{count + 1}Q", payload)
    body = payload[8 * (count + 1) :]
    need(offsets[0] == 0 and offsets[-1] == len(body), "corrupt-strings", "offsets")
    need(all(a <= b for a, b in pairwise(offsets)), "corrupt-strings", "offsets descend")
    items: list[Any] = [body[a:b] for a, b in pairwise(offsets)]
    if name == "string":
        try:
            items = [item.decode() for item in items]
        except UnicodeDecodeError:
            refuse("corrupt-strings", "not UTF-8")
    return items


# -- 3. names and values --------------------------------------------------------------------------


def unescape(text: str) -> str:
    need(re.fullmatch(r"([^~]|~[01])*", text, re.S), "corrupt-name", ascii(text))
    return text.replace("~1", "/").replace("~0", "~")


def parse_part(part: str) -> Any:
    """The dict key of a part (3.1)."""
    need(part and "/" not in part, "corrupt-name", ascii(part))
    if part == "~2":
        return ""
    return parse_key_text(unescape(part[2:]), 0) if part.startswith("~3") else unescape(part)


def parse_key_text(text: str, depth: int) -> Any:
    letter, rest = text[:1], text[1:]
    if letter == "n" and not rest:
        return None
    if letter == "b" and rest in ("0", "1"):
        return rest == "1"
    if letter == "i" and re.fullmatch(r"0|-?[1-9][0-9]{0,3999}", rest, re.A):
        return int(rest)
    if letter == "x" and re.fullmatch(r"([0-9a-f]{2})*", rest):
        return bytes.fromhex(rest)
    if letter == "f":
        try:
            key = float(rest)
        except ValueError:
            refuse("corrupt-name", ascii(text))
        need(repr(key) == rest, "corrupt-name", ascii(text))
        return key
    if letter == "t" and depth < 8:
        try:
            items = json.loads(rest)
        except (ValueError, RecursionError):
            refuse("corrupt-name", ascii(text))
        need(isinstance(items, list) and all(type(i) is str for i in items), "corrupt-name")
        compact = json.dumps(items, ensure_ascii=False, separators=(",", ":"))
        need(compact == rest, "corrupt-name", ascii(text))
        return tuple(
            parse_key_text(unescape(i[2:]), depth + 1) if i.startswith("~3") else parse_part(i)
            for i in items
        )
    refuse("corrupt-name", ascii(text))


@dataclass(frozen=True)
class Tagged:
    """A value that Python has no type of its own for: a scalar of NumPy, a registered type, …"""

    tag: str
    payload: Any


PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
FACTORIES = {"int": int, "float": float, "str": str, "list": list, "dict": dict, "set": set}


def parse_value(data: bytes) -> Any:
    """One packed value (3.5)."""
    return open_value(unpack_value(data), 1)


def unpack_value(data: bytes) -> Any:
    """What msgpack has: nested ext stay closed, so that their depth counts."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, object_pairs_hook=_unique)
    except msgpack.ExtraData:
        refuse("corrupt-trailing-bytes", "after a value")
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        refuse("corrupt-msgpack", type(error).__name__)


def open_value(value: Any, level: int) -> Any:
    need(level <= 64, "corrupt-value-depth")
    if type(value) is dict:
        need(is_map(value), "corrupt-value", "key of a map")
        return {key: open_value(item, level + 1) for key, item in value.items()}
    if type(value) is list:
        return [open_value(item, level + 1) for item in value]
    if isinstance(value, msgpack.ExtType):
        frame = unpack_value(value.data) if value.code == 1 else None
        good = type(frame) is list and len(frame) == 2 and type(frame[0]) is str
        need(good, "corrupt-value", "ext")
        try:
            return open_tag(frame[0], frame[1], level + 1)
        except (TypeError, ValueError):
            refuse("corrupt-value", frame[0])
    need(value is None or type(value) in (bool, int, float, str, bytes), "corrupt-value")
    return value


def open_tag(tag: str, payload: Any, level: int) -> Any:
    """A tagged value; what is inside of it is at `level`."""

    def check(good: object) -> None:
        need(good, "corrupt-value", tag)

    def types(of: Any, *expected: Any) -> Any:
        check(type(of) is list and len(of) == len(expected))
        check(all(type(x) in (e if isinstance(e, tuple) else (e,)) for x, e in zip(of, expected)))
        return of

    def items(of: Any) -> list[Any]:
        check(type(of) is list)
        return [open_value(item, level) for item in of]

    def pairs(of: Any) -> dict[Any, Any]:
        check(type(of) is list and all(type(p) is list and len(p) == 2 for p in of))
        made = {open_value(k, level): open_value(v, level) for k, v in of}
        check(len(made) == len(of))
        return made

    if tag == "int":
        check(type(payload) is bytes)
        made = int.from_bytes(payload, "little", signed=True)
        check(not -(1 << 63) <= made < 1 << 64 and len(payload) == made.bit_length() // 8 + 1)
        return made
    if tag == "complex":
        return complex(*types(payload, float, float))
    if tag == "tuple":
        return tuple(items(payload))
    if tag in ("set", "frozenset"):
        found = (set if tag == "set" else frozenset)(items(payload))
        packed = [msgpack.packb(item) for item in payload]
        check(len(found) == len(payload) and packed == sorted(packed))
        return found
    if tag in ("dict", "odict"):
        return (OrderedDict if tag == "odict" else dict)(pairs(payload))
    if tag == "counter":
        return Counter(pairs(payload))
    if tag == "defaultdict":
        types(payload, (str, NoneType), list)
        return defaultdict(factory(payload[0]), pairs(payload[1]))
    if tag == "namedtuple":
        types(payload, str, list, list)
        return make_namedtuple(payload[0], payload[1], items(payload[2]))
    if tag == "np":
        check_scalar(*types(payload, str, bytes))
    elif tag == "path":
        check(types(payload, str, str)[0] in PATHS)
    elif tag in ("datetime", "time", "date"):
        parts = [payload, 0, None] if tag == "date" else payload
        text, fold, zone = types(parts, str, int, (list, NoneType))
        moment = getattr(datetime, tag).fromisoformat(text)
        check(moment.isoformat() == text and fold in (0, 1))
        check(tag == "date" or moment.tzinfo is None)
        if zone is not None:
            check_zone(*types(zone, int, (str, NoneType)))
    elif tag == "timezone":
        check_zone(*types(payload, int, (str, NoneType)))
    elif tag == "timedelta":
        _, seconds, micro = types(payload, int, int, int)
        check(0 <= seconds < 86400 and 0 <= micro < 1_000_000)
    elif tag == "bytearray":
        check(type(payload) is bytes)
    elif tag == "np.dtype":
        check(type(payload) is str)
        need(scalar_bits(payload) is not None, "unsupported-value-dtype", payload)
    elif tag in ("range", "slice"):
        check(type(payload) is list and len(payload) == 3)
        payload = items(payload)
        check(tag == "slice" or (all(type(x) is int for x in payload) and payload[2]))
    elif tag in ("namespace", "argparse.Namespace"):
        check(is_map(payload))
        payload = {key: open_value(item, level) for key, item in payload.items()}
    elif tag == "deque":
        longest, kept = types(payload, (int, NoneType), list)
        check(longest is None or 0 <= len(kept) <= longest)
        payload = [longest, items(kept)]
    elif tag == "type":
        check(type(payload) is list and len(payload) == 2 and type(payload[0]) is str)
        payload = [payload[0], open_value(payload[1], level)]
    else:
        need("." in tag, "unsupported-value-tag", tag)
        payload = open_value(payload, level)
    return Tagged(tag, payload)


def scalar_bits(name: str) -> int | None:
    """Bits of a dtype that this specification names."""
    fixed = FIXED.match(name)
    if fixed:
        width = 32 if fixed[1] == "str" else 8
        need(int(fixed[2]) % width == 0, "corrupt-value", name)
    return int(fixed[2]) if fixed else 64 if TIME.match(name) else BITS.get(name)


def check_scalar(name: str, data: bytes) -> None:
    """A NumPy scalar: one element."""
    bits = scalar_bits(name)
    need(bits is not None, "unsupported-value-dtype", name)
    good = name not in VARIABLE and len(data) == ((bits or 0) + 7) // 8
    if good and bits and bits < 8:
        good = data[0] >> bits == 0
    if good and name.startswith("str"):
        data.decode("utf-32-le")
    need(good, "corrupt-value", f"np {name}")


def check_zone(microseconds: int, name: str | None) -> None:
    need(abs(microseconds) < 86_400_000_000, "corrupt-value", "offset of a day or more")


def factory(name: Any) -> Any:
    good = name is None or (type(name) is str and name in FACTORIES)
    need(good, "corrupt-value", "factory")
    return FACTORIES.get(name)


def make_namedtuple(name: Any, fields: Any, values: list[Any]) -> Any:
    good = type(name) is str and type(fields) is list and len(fields) == len(values)
    good = good and len(fields) <= 1000 and all(type(f) is str for f in fields)
    need(good, "corrupt-value", "namedtuple")
    try:
        made = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    except (ValueError, TypeError):
        refuse("corrupt-value", "namedtuple")
    need(list(made._fields) == fields, "corrupt-value", "fields of a namedtuple")
    return made(*values)


# -- 7. the index ---------------------------------------------------------------------------------


@dataclass
class Chunk:
    raw: int
    digest: bytes
    file: int = 0
    offset: int = 0
    stored: int = 0
    codec: int = 0
    stored_digest: bytes = b""


@dataclass
class Region:
    origin: tuple[int, ...]
    extent: tuple[int, ...]
    chunks: list[Chunk]


@dataclass
class Entry:
    """A row of `tensors` with its regions."""

    dtype: str
    bits: int
    shape: tuple[int, ...]
    regions: list[Region] = field(default_factory=list)


@dataclass
class Index:
    algorithm: str
    commit_id: bytes
    about: dict[str, Any]
    files: list[tuple[str, int]]
    dtypes: list[tuple[str, int]]
    leaves: list[tuple[str, int, int]]
    values: list[bytes]
    containers: list[tuple[str, str, bytes]]
    tensors: list[Entry]
    attributes: dict[str, dict[str, list[tuple[int, bytes]]]]
    pipelines: list[list[list[Any]]]


def parse_header(data: bytes) -> tuple[str, int, bytes, list[tuple[int, int, int, bytes]]]:
    """7.1 and the lengths of 7.2."""
    need(len(data) >= 288, "corrupt-truncated", f"{len(data)} bytes")
    magic, major, _minor, code, zeros, commit_id = struct.unpack_from("<8sHHB3s16s", data)
    need(magic == INDEX_MAGIC, "corrupt-magic")
    need(major == 1, "unsupported-major", major)
    need(code in DIGESTS, "unsupported-digest", code)
    algorithm, size = DIGESTS[code]
    found = digest_of(data[:256], algorithm)
    need(data[256:288] == found.ljust(32, b"\0"), "corrupt-header-digest")
    need(not any(zeros), "corrupt-padding", "header")
    rows = []
    for position in range(4):
        row = struct.unpack_from("<B7sQQ32s", data, 32 + 56 * position)
        encoding, zeros, stored, raw, digest = row
        need(encoding == 0 or (encoding == 1 and position >= 2), "unsupported-encoding", encoding)
        need(not any(zeros), "corrupt-padding", "header")
        need(encoding or stored == raw, "corrupt-section-length", SECTIONS[position])
        need(raw <= 16 * MIB or raw <= 1000 * stored, "corrupt-limit", "raw against stored")
        rows.append((encoding, stored, raw, padded_digest(digest, size)))
    need(sum(row[2] for row in rows) <= 1 << 30, "corrupt-limit", "sections")
    return algorithm, size, commit_id, rows


def parse_index(data: bytes) -> Index:
    algorithm, size, commit_id, rows = parse_header(data)
    expected = 288 + sum(row[1] for row in rows)
    need(len(data) >= expected, "corrupt-truncated", f"{len(data)} of {expected}")
    need(len(data) == expected, "corrupt-trailing-bytes", f"{len(data)} of {expected}")
    sections, at = [], 288
    for name, (encoding, stored, raw, digest) in zip(SECTIONS, rows):
        part = data[at : at + stored]
        at += stored
        need(digest_of(part, algorithm) == digest, "corrupt-section-digest", name)
        sections.append(unzstd(part, raw) if encoding else part)
    about = parse_about(sections[0], algorithm, size)
    files = parse_files(sections[1], size)
    need(digest_of(sections[2], algorithm) == about["tree_digest"], "corrupt-tree-digest")
    index = parse_tree(sections[2], size)
    index.algorithm, index.commit_id, index.about, index.files = algorithm, commit_id, about, files
    parse_placement(index, sections[3], size)
    return index


def parse_about(data: bytes, algorithm: str, size: int) -> dict[str, Any]:
    """7.3."""
    table = unpack_map(data, "$.about")
    for requirement in strings(table, "requires", str, "$.about"):
        refuse("unsupported-requires", requirement)
    for key in ("name", "created", "writer", "digest"):
        entry(table, key, str, "$.about")
    need(table["digest"] == algorithm, "corrupt-section-entry", "$.about.digest")
    for key, length in (("txn", 16), ("tree_digest", size)):
        good = len(entry(table, key, bytes, "$.about")) == length
        need(good, "corrupt-section-entry", f"$.about.{key}")
    step, parent = table.get("step"), table.get("parent")
    good = step is None or (type(step) is int and 0 <= step < 1 << 53)
    need(good, "corrupt-section-entry", "$.about.step")
    good = type(parent) is list and [type(x) for x in parent] == [str, bytes]
    need(parent is None or good, "corrupt-section-entry", "$.about.parent")
    for total in ("nbytes", "tensors"):
        good = type(table.get(total, 0)) is int and 0 <= table.get(total, 0) < 1 << 63
        need(good, "corrupt-section-entry", f"$.about.{total}")
    metrics = entry(table, "metrics", dict, "$.about").values()
    need(all(type(m) in (int, float) for m in metrics), "corrupt-section-entry", "$.about.metrics")
    name = table["name"]
    need(legal_name(name), "corrupt-name", ascii(name))
    stepped = f"step-{step:016d}" if step is not None else None
    good = name == stepped or (not name.startswith("step-"))
    need(good, "corrupt-name", f"{name} of step {step}")
    metadata = {k: open_value(v, 2) for k, v in entry(table, "metadata", dict, "$.about").items()}
    return {**table, "step": step, "parent": parent, "metadata": metadata}


def parse_files(data: bytes, size: int) -> list[tuple[str, int]]:
    table = unpack_map(data, "$.files")
    ids = digests(table, "id", size, "$.files")
    nbytes = numbers(table, "nbytes", "Q", "$.files", len(ids))
    need(all(a < b for a, b in pairwise(ids)), "corrupt-order", "$.files.id")
    good = all(n >= 4096 and n % 4096 == 0 and n < 1 << 63 for n in nbytes)
    need(good, "corrupt-column-range", "$.files.nbytes")
    return [(i.hex(), n) for i, n in zip(ids, nbytes)]


def by_first_use(rows: Any, count: int) -> bool:
    """M07-18: 0 … count - 1, each met first after all smaller ones."""
    highest = -1
    for row in rows:
        if row > highest + 1:
            return False
        highest = max(highest, row)
    return highest == count - 1


def parse_tree(data: bytes, size: int) -> Index:
    """7.4 and the first half of 7.6."""
    table = unpack_map(data, "$.tree")
    part = {
        key: entry(table, key, dict, "$.tree")
        for key in ("dtypes", "leaves", "containers", "tensors", "regions", "chunks")
    }
    dtypes = dtypes_of(part["dtypes"], "$.tree.dtypes")
    names = strings(part["leaves"], "name", str, "$.tree.leaves")
    kinds = numbers(part["leaves"], "kind", "B", "$.tree.leaves", len(names))
    rows = numbers(part["leaves"], "row", "I", "$.tree.leaves", len(names))
    values = strings(table, "values", bytes, "$.tree")
    boxes = strings(part["containers"], "name", str, "$.tree.containers")
    count = len(boxes)
    box_kinds = strings(part["containers"], "kind", str, "$.tree.containers", count)
    arguments = strings(part["containers"], "argument", bytes, "$.tree.containers", count)
    of = numbers(part["tensors"], "dtype", "H", "$.tree.tensors")
    ndim = numbers(part["tensors"], "ndim", "B", "$.tree.tensors", len(of))
    need(all(n <= 64 for n in ndim), "corrupt-dims", "$.tree.tensors.ndim")
    dims = ragged(numbers(part["tensors"], "dims", "Q", "$.tree.tensors"), ndim)
    attributes = parse_attributes(table, len(names), count)

    need(len(set(names)) == len(names), "corrupt-duplicate-name", "$.tree.leaves")
    need(len(set(boxes)) == count, "corrupt-duplicate-name", "$.tree.containers")
    need(all(len(name) <= MIB for name in names), "corrupt-name", "$.tree.leaves")
    need(all(kind <= 2 for kind in kinds), "corrupt-column-range", "$.tree.leaves.kind")
    need(all(len(value) <= 4096 for value in values), "corrupt-value", "$.tree.values")
    tensor_rows = [row for kind, row in zip(kinds, rows) if kind != 1]
    value_rows = [row for kind, row in zip(kinds, rows) if kind == 1]
    need(by_first_use(value_rows, len(values)), "corrupt-order", "$.tree.leaves.row")
    need(by_first_use(tensor_rows, len(of)), "corrupt-order", "$.tree.leaves.row")
    need(by_first_use(of, len(dtypes)), "corrupt-order", "$.tree.tensors.dtype")
    for shape, dtype in zip(dims, of):
        numel = math.prod(shape)
        good = max(shape, default=0) < 1 << 63 and numel < 1 << 63
        need(good and numel * dtypes[dtype][1] < 1 << 65, "corrupt-dims-overflow", shape)
    tensors = [Entry(*dtypes[d], shape) for d, shape in zip(of, dims)]
    for kind, row in zip(kinds, rows):
        good = kind != 2 or (tensors[row].dtype == "uint8" and len(tensors[row].shape) == 1)
        need(good, "corrupt-value", "a packed value that is no run of bytes")

    parse_regions(part["regions"], part["chunks"], tensors, size)
    leaves = list(zip(names, kinds, rows))
    containers = list(zip(boxes, box_kinds, arguments))
    return Index("", b"", {}, [], dtypes, leaves, values, containers, tensors, attributes, [])


def parse_attributes(table: dict[str, Any], nleaves: int, ncontainers: int) -> dict[str, Any]:
    made: dict[str, dict[str, Any]] = {"leaves": {}, "containers": {}}
    both = entry(table, "attributes", dict, "$.tree") if "attributes" in table else {}
    for which, count in (("leaves", nleaves), ("containers", ncontainers)):
        keys = entry(both, which, dict, "$.tree.attributes") if which in both else {}
        for key in keys:
            where = f"$.tree.attributes.{which}.{key}"
            column = entry(keys, key, dict, where)
            rows = numbers(column, "rows", "I", where)
            values = strings(column, "values", bytes, where, len(rows))
            good = all(a < b for a, b in pairwise(rows)) and (not rows or rows[-1] < count)
            need(good, "corrupt-column-range", where)
            made[which][key] = list(zip(rows, values))
    return made


def parse_regions(
    regions: dict[str, Any], chunks: dict[str, Any], tensors: list[Entry], size: int
) -> None:
    owners = numbers(regions, "tensor", "I", "$.tree.regions")
    nchunks = numbers(regions, "nchunks", "I", "$.tree.regions", len(owners))
    good = all(a <= b for a, b in pairwise(owners)) and (not owners or owners[-1] < len(tensors))
    need(good, "corrupt-column-range", "$.tree.regions.tensor")
    need(all(n >= 1 for n in nchunks), "corrupt-column-range", "$.tree.regions.nchunks")
    ndim = [len(tensors[owner].shape) for owner in owners]
    origins = ragged(numbers(regions, "origin", "Q", "$.tree.regions"), ndim)
    extents = ragged(numbers(regions, "extent", "Q", "$.tree.regions"), ndim)
    raw = numbers(chunks, "raw", "I", "$.tree.chunks")
    raw_digests = digests(chunks, "digest", size, "$.tree.chunks", len(raw))
    need(sum(nchunks) == len(raw), "corrupt-column-length", "$.tree.chunks")
    at = 0
    for owner, origin, extent, count in zip(owners, origins, extents, nchunks):
        made = [Chunk(*row) for row in zip(raw[at : at + count], raw_digests[at : at + count])]
        tensors[owner].regions.append(Region(origin, extent, made))
        at += count
    for tensor in tensors:
        check_tiling(tensor)
        for region in tensor.regions:
            check_chunks(tensor, region)


def check_tiling(tensor: Entry) -> None:
    """M07-21 to M07-23. Boxes inside the tensor whose volumes add up to its own tile it exactly
    once if their corners cancel, two by two, down to those of the tensor."""
    regions, shape = tensor.regions, tensor.shape
    total = math.prod(shape)
    payload = total and (tensor.bits or tensor.dtype in VARIABLE)
    need(bool(regions) == bool(payload), "corrupt-regions", "elements without a region")
    need(tensor.bits or len(regions) <= 1, "corrupt-regions", "strings in several regions")
    ordered = all(a.origin < b.origin for a, b in pairwise(regions))
    need(ordered, "corrupt-order" if len({r.origin for r in regions}) else "corrupt-regions")
    for r in regions:
        inside = all(e >= 1 and o + e <= d for o, e, d in zip(r.origin, r.extent, shape))
        need(inside, "corrupt-regions", "outside of the tensor")
    if not regions:
        return
    need(sum(math.prod(r.extent) for r in regions) == total, "corrupt-regions", "volume")
    cut = [a for a in range(len(shape)) if any(r.extent[a] != shape[a] for r in regions)]
    if not cut:
        need(len(regions) == 1, "corrupt-regions")
    elif 2 ** len(cut) <= max(64, len(regions)):
        odd: set[tuple[int, ...]] = set()
        for r in regions:
            odd ^= set(product(*((r.origin[a], r.origin[a] + r.extent[a]) for a in cut)))
        need(odd == set(product(*((0, shape[a]) for a in cut))), "corrupt-regions", "overlap")
    else:
        for i, r in enumerate(regions):
            for s in regions[:i]:
                meets = all(
                    r.origin[a] < s.origin[a] + s.extent[a]
                    and s.origin[a] < r.origin[a] + r.extent[a]
                    for a in cut
                )
                need(not meets, "corrupt-regions", "overlap")


def check_chunks(tensor: Entry, region: Region) -> None:
    """M07-24, M07-25."""
    raw = [chunk.raw for chunk in region.chunks]
    count = math.prod(region.extent)
    good = all(1 <= n <= 1 << 30 for n in raw)
    good = good and all(n == raw[0] for n in raw[:-1]) and raw[-1] <= raw[0]
    good = good and (len(raw) == 1 or raw[0] % 4096 == 0)
    if tensor.bits:
        good = good and sum(raw) == (count * tensor.bits + 7) // 8
    else:
        good = good and sum(raw) >= 8 * (count + 1)
    need(good, "corrupt-chunk-length", f"{raw[:4]} for {count} elements of {tensor.bits} bits")


def all_chunks(index: Index) -> list[Chunk]:
    return [c for tensor in index.tensors for region in tensor.regions for c in region.chunks]


def parse_placement(index: Index, data: bytes, size: int) -> None:
    """7.5 and the second half of 7.6."""
    table, chunks = unpack_map(data, "$.placement"), all_chunks(index)
    count, where = len(chunks), "$.placement"
    index.pipelines = pipelines_of(table, where)
    file = numbers(table, "file", "I", where, count)
    offset = numbers(table, "offset", "Q", where, count)
    stored = numbers(table, "stored", "I", where, count)
    codec = numbers(table, "codec", "B", where, count)
    if "digest" in table:
        stored_digests = digests(table, "digest", size, where, count)
    else:
        need(not any(codec), "corrupt-section-entry", f"{where}.digest")
        stored_digests = [chunk.digest for chunk in chunks]
    need(all(c < len(index.pipelines) for c in codec), "corrupt-column-range", f"{where}.codec")
    need(all(f < len(index.files) for f in file), "corrupt-column-range", f"{where}.file")
    need(len(set(file)) == len(index.files), "corrupt-column-range", "a file that is not used")
    for c, own, chunk in zip(codec, stored_digests, chunks):
        need(c or own == chunk.digest, "corrupt-chunk-digest", "a raw chunk of two digests")
    seen: dict[tuple[int, int], Chunk] = {}
    for chunk, *row in zip(chunks, file, offset, stored, codec, stored_digests):
        chunk.file, chunk.offset, chunk.stored, chunk.codec, chunk.stored_digest = row
        good = chunk.stored >= 1 and (chunk.codec or chunk.stored == chunk.raw)
        need(good, "corrupt-chunk-length", f"{where}.stored")
        end = index.files[chunk.file][1] - 64
        good = chunk.offset >= 64 and chunk.offset + chunk.stored <= end
        need(good, "corrupt-chunk-range", f"{where}.offset")
        twin = seen.setdefault((chunk.file, chunk.offset), chunk)
        same = (twin.stored, twin.raw, twin.codec) == (chunk.stored, chunk.raw, chunk.codec)
        need(same and twin.digest == chunk.digest, "corrupt-overlap", "shared and different")
    for a, b in pairwise(seen[key] for key in sorted(seen)):
        need(a.file != b.file or a.offset + a.stored <= b.offset, "corrupt-overlap")


# -- 3.3: the tree --------------------------------------------------------------------------------


class _Node:
    def __init__(self) -> None:
        self.children: dict[str, Any] = {}
        self.kind, self.argument = "dict", None


def build_tree(index: Index, leaf: Any) -> Any:
    """The tree of an index; `leaf(kind, row)` gives a leaf."""
    if [name for name, _, _ in index.leaves] == [""]:
        need(not index.containers, "corrupt-structure", "a container without a leaf")
        return leaf(*index.leaves[0][1:])
    need(index.leaves, "corrupt-structure", "no leaf")
    need("" not in {name for name, _, _ in index.leaves}, "corrupt-structure", "root and leaves")
    root = _Node()
    nodes: list[tuple[_Node | None, str, _Node]] = [(None, "", root)]
    for name, kind, row in index.leaves:
        node = root
        *path, last = name.split("/")
        for part in path:
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node()
                nodes.append((node, part, child))
            need(isinstance(child, _Node), "corrupt-structure", f"a leaf above {name!r}")
            node = child
        need(last not in node.children, "corrupt-structure", f"a leaf above others: {name!r}")
        node.children[last] = leaf(kind, row)
    for name, kind, argument in index.containers:
        node = root
        for part in name.split("/") if name else []:
            node = node.children.get(part)
            need(isinstance(node, _Node), "corrupt-structure", f"no leaf below {name!r}")
        node.kind, node.argument = kind, parse_value(argument)
    made: Any = None
    for parent, part, node in reversed(nodes):
        made = build_container(node.kind, node.argument, node.children)
        if parent is not None:
            parent.children[part] = made
    return made


def build_container(kind: str, argument: Any, children: dict[str, Any]) -> Any:
    if kind == "type":
        good = type(argument) is list and len(argument) == 3 and type(argument[0]) is str
        need(good and argument[1] != "type", "corrupt-value", "argument of a type")
        return Tagged("type", [argument[0], build_container(argument[1], argument[2], children)])
    if kind in ("list", "tuple", "namedtuple"):
        positions = [str(i) for i in range(len(children))]
        need(list(children) == positions, "corrupt-structure", f"positions of a {kind}")
        items = [children[position] for position in positions]
        if kind == "namedtuple":
            good = type(argument) is list and len(argument) == 2 and type(argument[1]) is list
            need(good, "corrupt-value", "namedtuple")
            need(len(argument[1]) == len(items), "corrupt-structure", "fields of a namedtuple")
            return make_namedtuple(argument[0], argument[1], items)
        need(argument is None, "corrupt-value", kind)
        return items if kind == "list" else tuple(items)
    made = {parse_part(part): child for part, child in children.items()}
    need(len(made) == len(children), "corrupt-structure", "equal keys")
    if kind == "defaultdict":
        return defaultdict(factory(argument), made)
    need(kind in ("dict", "odict"), "corrupt-column-range", f"container {kind!r}")
    need(argument is None, "corrupt-value", kind)
    return OrderedDict(made) if kind == "odict" else made


# -- 5. data files --------------------------------------------------------------------------------


@dataclass
class DataFile:
    id: str
    algorithm: str
    salt: int
    table_offset: int
    table_length: int
    regions: list[dict[str, Any]]
    pipelines: list[list[list[Any]]]


def parse_data_file(data: bytes, *, read_chunks: bool = True) -> DataFile:
    """Check a whole data file, found alone: bytes, table, padding, every chunk."""
    need(len(data) >= 4096 and len(data) % 4096 == 0, "corrupt-truncated", f"{len(data)} bytes")
    magic, major, _minor, code, zeros = struct.unpack_from("<8sHHB51s", data)
    need(magic == DATA_MAGIC, "corrupt-magic", "head")
    need(major == 1, "unsupported-major", major)
    need(not any(zeros), "corrupt-padding", "head")
    need(code in DIGESTS, "unsupported-digest", code)
    end = len(data) - 64
    at, length, again, zeros, digest, magic = struct.unpack_from("<QQB7s32s8s", data, end)
    need(magic == DATA_MAGIC, "corrupt-magic", "footer")
    need(again in DIGESTS, "unsupported-digest", again)
    need(again == code, "corrupt-algorithm", f"{code} in the head, {again} in the footer")
    algorithm, size = DIGESTS[code]
    need(not any(zeros), "corrupt-padding", "footer")
    table_digest = padded_digest(digest, size)
    good = at >= 64 and at % 64 == 0 and length <= 1 << 30 and at + length <= end
    need(good, "corrupt-table-range", f"[{at}, +{length})")
    raw = data[at : at + length]
    need(digest_of(raw, algorithm) == table_digest, "corrupt-table-digest")
    file = parse_table(raw, table_digest.hex(), algorithm, size, at)
    chunks = [chunk for region in file.regions for chunk in region["chunks"]]
    ends = [64, *(chunk["offset"] + chunk["stored"] for chunk in chunks)]
    starts = [*(chunk["offset"] for chunk in chunks), at]
    good = all(stop <= start for stop, start in zip(ends, starts))
    need(good, "corrupt-chunk-range", "chunks overlap, descend or leave the file")
    for stop, start in [*zip(ends, starts), (at + length, end)]:
        need(not any(data[stop:start]), "corrupt-padding", f"[{stop}, {start})")
    for chunk in chunks if read_chunks else ():
        stored = data[chunk["offset"] : chunk["offset"] + chunk["stored"]]
        check_stored(stored, chunk, file.pipelines[chunk["codec"]], algorithm)
    return file


def check_stored(stored: bytes, chunk: dict[str, Any], pipeline: Any, algorithm: str) -> bytes:
    found = digest_of(stored, algorithm)
    need(found == chunk["stored_digest"], "corrupt-chunk-digest", f"at {chunk['offset']}")
    raw = decode_chunk(stored, pipeline, chunk["raw"])
    need(digest_of(raw, algorithm) == chunk["digest"], "corrupt-chunk-digest", "raw")
    return raw


def parse_table(data: bytes, file_id: str, algorithm: str, size: int, at: int) -> DataFile:
    """5.3."""
    table = unpack_map(data, "$")
    salt = entry(table, "salt", int, "$")
    need(salt >= 0, "corrupt-section-entry", "$.salt")
    dtypes = dtypes_of(entry(table, "dtypes", dict, "$"), "$.dtypes")
    columns, chunks = entry(table, "regions", dict, "$"), entry(table, "chunks", dict, "$")
    pipelines = pipelines_of(table, "$")
    names = strings(columns, "name", str, "$.regions")
    of = numbers(columns, "dtype", "H", "$.regions", len(names))
    ndim = numbers(columns, "ndim", "B", "$.regions", len(names))
    nchunks = numbers(columns, "nchunks", "I", "$.regions", len(names))
    need(all(n <= 64 for n in ndim), "corrupt-dims", "$.regions.ndim")
    need(all(d < len(dtypes) for d in of), "corrupt-column-range", "$.regions.dtype")
    need(all(n >= 1 for n in nchunks), "corrupt-column-range", "$.regions.nchunks")
    boxes = [
        ragged(numbers(columns, k, "Q", "$.regions"), ndim) for k in ("shape", "origin", "extent")
    ]
    offset = numbers(chunks, "offset", "Q", "$.chunks")
    count = len(offset)
    need(sum(nchunks) == count, "corrupt-column-length", "$.chunks")
    start = numbers(chunks, "start", "Q", "$.chunks", count)
    stored = numbers(chunks, "stored", "I", "$.chunks", count)
    raw = numbers(chunks, "raw", "I", "$.chunks", count)
    codec = numbers(chunks, "codec", "B", "$.chunks", count)
    raw_digests = digests(chunks, "digest", size, "$.chunks", count)
    if "stored_digest" in chunks:
        stored_digests = digests(chunks, "stored_digest", size, "$.chunks", count)
    else:
        need(not any(codec), "corrupt-section-entry", "$.chunks.stored_digest")
        stored_digests = raw_digests
    need(all(c < len(pipelines) for c in codec), "corrupt-column-range", "$.chunks.codec")
    need(all(s < 1 << 63 for s in start), "corrupt-chunk-range", "$.chunks.start")
    for c, own, raw_digest in zip(codec, stored_digests, raw_digests):
        need(c or own == raw_digest, "corrupt-chunk-digest", "a raw chunk of two digests")
    for n, s, c in zip(raw, stored, codec):
        good = 1 <= n <= 1 << 30 and s >= 1 and (c or s == n)
        need(good, "corrupt-chunk-length", "$.chunks")
    rows = [
        dict(zip(("start", "offset", "stored", "raw", "codec", "digest", "stored_digest"), row))
        for row in zip(start, offset, stored, raw, codec, raw_digests, stored_digests)
    ]
    regions, done = [], 0
    for name, d, shape, origin, extent, n in zip(names, of, *boxes, nchunks):
        for dims in (shape, extent):
            good = max(dims, default=0) < 1 << 63 and math.prod(dims) < 1 << 63
            need(good, "corrupt-dims-overflow", dims)
        inside = all(o + e <= s for o, e, s in zip(origin, extent, shape))
        need(inside, "corrupt-regions", "outside of the tensor")
        mine = rows[done : done + n]
        done += n
        regions.append(
            {
                "name": name,
                "dtype": dtypes[d],
                "shape": shape,
                "origin": origin,
                "extent": extent,
                "chunks": mine,
            }
        )
    return DataFile(file_id, algorithm, salt, at, len(data), regions, pipelines)


# -- 2. the store ---------------------------------------------------------------------------------

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,119}", re.A)
DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.A)
STEP = re.compile(r"step-([0-9]{16})", re.A)
INDEX = re.compile(r"(.+)~(0|[1-9][0-9]*)\.index", re.A)


def legal_name(name: str) -> bool:
    """2.2."""
    if not NAME.fullmatch(name) or name.endswith(".") or DEVICE.fullmatch(name):
        return False
    if name == "latest" or name.isdigit():
        return False
    step = STEP.fullmatch(name)
    return not name.startswith("step-") or (step is not None and int(step[1]) < 1 << 53)


def read_regular(path: Path) -> bytes:
    """M05-4: a regular file, no symbolic link at the last step."""
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    )
    with open(descriptor, "rb") as file:
        need(stat.S_ISREG(os.fstat(descriptor).st_mode), "corrupt-file-id", path)
        return file.read()


class Checkpoint:
    def __init__(self, store: Store, name: str, generation: int, data: bytes) -> None:
        self.store, self.name, self.generation = store, name, generation
        self.index = parse_index(data)
        need(self.index.about["name"] == name, "corrupt-index-name", f"{name} is named otherwise")
        self._tensors: dict[int, Tensor] = {}
        self.tree_without_data()

    def tree_without_data(self) -> Any:
        """Checks names, containers and values."""
        return build_tree(
            self.index,
            lambda kind, row: parse_value(self.index.values[row]) if kind == 1 else (kind, row),
        )

    def tensor(self, row: int) -> Tensor:
        """A tensor, every byte checked; ties give the same object."""
        if row not in self._tensors:
            self._tensors[row] = self._read(self.index.tensors[row])
        return self._tensors[row]

    def leaf(self, kind: int, row: int) -> Any:
        if kind == 1:
            return parse_value(self.index.values[row])
        tensor = self.tensor(row)
        return tensor if kind == 0 else parse_value(tensor.data)

    def tree(self) -> Any:
        return build_tree(self.index, self.leaf)

    def leaves(self) -> dict[str, Any]:
        return {name: self.leaf(kind, row) for name, kind, row in self.index.leaves}

    def _read(self, row: Entry) -> Tensor:
        made = Tensor(row.dtype, row.bits, row.shape)
        whole = bytearray(math.prod(row.shape) * made.itemsize)
        for region in row.regions:
            payload = b"".join(self._chunk(chunk) for chunk in region.chunks)
            count = math.prod(region.extent)
            elements = unpack_payload(payload, row.dtype, row.bits, count)
            if row.dtype in VARIABLE:
                made.items = elements
                return made
            place(whole, elements, made.itemsize, row.shape, region)
        made.data = bytes(whole)
        return made

    def _chunk(self, chunk: Chunk) -> bytes:
        file_id, nbytes = self.index.files[chunk.file]
        data = self.store.data_file(file_id)
        need(len(data) >= nbytes, "corrupt-short-file", f"data/{file_id}")
        stored = data[chunk.offset : chunk.offset + chunk.stored]
        pipeline = self.index.pipelines[chunk.codec]
        return check_stored(stored, vars(chunk), pipeline, self.index.algorithm)


def place(whole: bytearray, payload: bytes, itemsize: int, shape: Any, region: Region) -> None:
    """Copy a region's elements to where they belong, a row of the last axis at a time."""
    if not shape:
        whole[:] = payload
        return
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    length = region.extent[-1] * itemsize
    for number, outer in enumerate(product(*(range(n) for n in region.extent[:-1]))):
        position = sum((o + i) * s for o, i, s in zip(region.origin, (*outer, 0), steps)) * itemsize
        whole[position : position + length] = payload[number * length : (number + 1) * length]


class Store:
    """A folder. Everything is found by listing; nothing is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.skipped: list[tuple[str, Refused]] = []
        self._data: dict[str, bytes] = {}

    def generations(self, folder: str = "checkpoints") -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        place = self.path / folder
        for key in sorted(os.listdir(place)) if place.is_dir() else []:
            match = INDEX.fullmatch(key)
            if match and legal_name(match[1]) and int(match[2]) < 1 << 63:
                found.setdefault(match[1], []).append(int(match[2]))
        return {name: sorted(numbers, reverse=True) for name, numbers in found.items()}

    def open(self, name: str) -> Checkpoint:
        """The highest acceptable generation of a name (M02-8), none that is set aside (M02-18)."""
        aside = self.generations("quarantine").get(name, [])
        last: Refused | None = None
        for generation in self.generations().get(name, []):
            if generation in aside:
                continue
            key = f"{name}~{generation}.index"
            try:
                return Checkpoint(
                    self, name, generation, read_regular(self.path / "checkpoints" / key)
                )
            except Refused as error:
                self.skipped.append((f"checkpoints/{key}", error))
                last = last or error
        raise last or KeyError(name)

    def latest(self) -> Checkpoint:
        """M02-9, M02-10."""
        names = sorted((n for n in self.generations() if STEP.fullmatch(n)), reverse=True)
        last: Refused | None = None
        for name in [*names, *(["main"] if "main" in self.generations() else [])]:
            try:
                return self.open(name)
            except Refused as error:
                last = last or error
            except KeyError:
                continue
        raise last or KeyError("latest")

    def select(self, which: str | None) -> Checkpoint:
        """2.4: a step, `latest`, a name, else a tag."""
        if which is None or which == "latest":
            return self.latest()
        if which.isdigit():
            return self.open(f"step-{int(which):016d}")
        tag = self.path / "tags" / which
        if which in self.generations() or not (legal_name(which) and tag.is_file()):
            return self.open(which)
        held = json.loads(read_regular(tag))
        found = self.open(held["name"])
        if found.index.about["tree_digest"].hex() != held["digest"]:
            raise KeyError(f"{which} does not hold")
        return found

    def data_file(self, file_id: str) -> bytes:
        need(re.fullmatch(r"[0-9a-f]{32}([0-9a-f]{32})?", file_id), "corrupt-file-id", file_id)
        if file_id not in self._data:
            path = self.path / "data" / file_id
            need(os.path.lexists(path), "corrupt-missing-file", path)
            self._data[file_id] = read_regular(path)
        return self._data[file_id]

    def verify_data_files(self) -> int:
        """Every data file of the store, referred to or not."""
        folder, count = self.path / "data", 0
        for file_id in sorted(os.listdir(folder)) if folder.is_dir() else []:
            if re.fullmatch(r"[0-9a-f]{32}([0-9a-f]{32})?", file_id):
                need(parse_data_file(self.data_file(file_id)).id == file_id, "corrupt-file-id")
                count += 1
        return count


def assert_reference_reads(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Read every checkpoint of a store, every byte checked; gives leaves by checkpoint name.

    Raises Refused or KeyError where this reader does not read what another program wrote.
    """
    store, made = Store(path), {}
    aside = store.generations("quarantine")
    for name, generations in store.generations().items():
        if set(generations) - set(aside.get(name, [])):
            checkpoint = store.open(name)
            checkpoint.tree()
            made[name] = checkpoint.leaves()
    if store.skipped:
        raise store.skipped[0][1]
    store.verify_data_files()
    return made


# -- command line ---------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as JSON that loses nothing: what JSON has not is an object with one key."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else {"int": str(value)}
    if isinstance(value, float):
        return {"float": struct.pack(">d", value).hex(), "text": repr(value)}
    if isinstance(value, complex):
        return {"complex": [plain(value.real), plain(value.imag)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Tagged):
        return {value.tag: plain(value.payload)}
    if isinstance(value, Tensor):
        content = (
            {"items": plain(value.items)} if value.dtype in VARIABLE else {"data": value.data.hex()}
        )
        return {"tensor": {"dtype": value.dtype, "shape": list(value.shape), **content}}
    if isinstance(value, set | frozenset):
        items = sorted((plain(item) for item in value), key=lambda item: json.dumps(item))
        return {type(value).__name__: items}
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            items = [plain(item) for item in value]
            return {"namedtuple": [type(value).__name__, list(value._fields), items]}
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    pairs = [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, Counter):
        return {"counter": pairs}
    if isinstance(value, defaultdict):
        factory = value.default_factory
        return {"defaultdict": [factory and factory.__name__, pairs]}
    return {"odict" if isinstance(value, OrderedDict) else "dict": pairs}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read a ckptfmt store, every byte checked.")
    parser.add_argument("store", help="a folder; @NAME, @STEP or @latest behind it chooses")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--list", action="store_true", help="list the checkpoints (default)")
    how.add_argument("--json", action="store_true", help="print the whole tree as JSON")
    how.add_argument("--dump", metavar="DIR", help="write each tensor's bytes to a file in DIR")
    options = parser.parse_args(arguments)
    path, _, which = options.store.rpartition("@")
    if not path or os.path.exists(options.store) or "/" in which:
        path, which = options.store, ""
    store = Store(path)
    try:
        if options.json:
            print(json.dumps(plain(store.select(which or None).tree()), ensure_ascii=False))
        elif options.dump:
            dump(store.select(which or None), Path(options.dump))
        else:
            for name in [which] if which else sorted(store.generations()):
                index = store.select(which or name).index
                tensors = f"{len(index.tensors)} tensors, {len(index.leaves)} leaves"
                print(name, index.about["created"], tensors, index.about["tree_digest"].hex())
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 4
    except KeyError as error:
        print(f"not found: {error}", file=sys.stderr)
        return 10
    for key, reason in store.skipped:
        print(f"skipped {key}: {reason}", file=sys.stderr)
    return 0


def dump(checkpoint: Checkpoint, folder: Path) -> None:
    """`N.bin` for each leaf that is a tensor, and `leaves.json` that says what N is."""
    folder.mkdir(parents=True, exist_ok=True)
    described = []
    for number, (name, leaf) in enumerate(checkpoint.leaves().items()):
        if isinstance(leaf, Tensor) and leaf.dtype not in VARIABLE:
            (folder / f"{number}.bin").write_bytes(leaf.data)
            row = {"file": f"{number}.bin", "dtype": leaf.dtype, "shape": list(leaf.shape)}
        else:
            row = {"value": plain(leaf)}
        described.append({"name": name, **row})
    (folder / "leaves.json").write_text(json.dumps(described, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
