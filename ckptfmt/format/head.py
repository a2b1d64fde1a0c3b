"""The header of an index and its first section, `about`: all that a listing reads, beside `files`.

Spec: 07-index.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfmt.errors import UnsupportedError, UsageError
from ckptfmt.format.codecs import decode
from ckptfmt.format.columns import corrupt, get_list, get_map, get_scalar, pack_map, parse_map
from ckptfmt.format.digests import DIGEST_NBYTES, algorithm_name, digest
from ckptfmt.format.limits import (
    INT63_MAX,
    MAJOR,
    SECTION_RATIO_MAX,
    SECTION_RATIO_NBYTES,
    SECTIONS_NBYTES_MAX,
)
from ckptfmt.format.names import check_checkpoint_name, step_of
from ckptfmt.format.values import pack_value, parse_value

MAGIC = bytes.fromhex("89434B490D0A1A00")
HEADER_NBYTES = 288
SECTIONS = ("about", "files", "tree", "placement")
ABOUT, FILES, TREE, PLACEMENT = range(4)

PLAIN, ZSTD = 0, 1
HEAD = struct.Struct("<8sHHB3s16s")
SECTION = struct.Struct("<B7sQQ32s")
KNOWN_REQUIRES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SectionRow:
    """A section's row in the header; `offset` is where it begins in the document."""

    encoding: int
    stored_nbytes: int
    raw_nbytes: int
    digest: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """The first 288 bytes."""

    major: int
    minor: int
    algorithm: str
    commit_id: bytes
    sections: tuple[SectionRow, SectionRow, SectionRow, SectionRow]

    @property
    def nbytes(self) -> int:
        """Of the whole document."""
        last = self.sections[-1]
        return last.offset + last.stored_nbytes


@dataclass(frozen=True, slots=True)
class About:
    """Who, when and what; `metadata` and `metrics` are the user's.

    `nbytes` (logical bytes, each tied tensor once) and `tensors` repeat what the tree says, so that
    a listing reads one small range; nothing else relies on them.
    """

    name: str
    step: int | None
    created: str
    txn: bytes
    parent: tuple[str, bytes] | None
    writer: str
    algorithm: str
    tree_digest: bytes
    requires: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    tensors: int = 0


def parse_header(data: bytes | memoryview, where: str = "index") -> Header:
    """Check and take the header from the first 288 bytes (more may follow).

    Raises:
        CorruptError: magic, digest, lengths or zeros are wrong.
        UnsupportedError: A newer major, an unknown digest or encoding.
    """
    if len(data) < HEADER_NBYTES:
        corrupt("index is too short", "truncated", where, f"{HEADER_NBYTES} bytes", len(data))
    data = memoryview(data)[:HEADER_NBYTES]
    magic, major, minor, code, zeros, commit_id = HEAD.unpack_from(data)
    if magic != MAGIC:
        corrupt("not an index", "magic", where, MAGIC.hex(), magic.hex())
    if major != MAJOR:
        raise UnsupportedError(
            "index of another major version",
            reason="major",
            where=where,
            expected=MAJOR,
            found=major,
            do=f"use a ckptfmt that reads format {major}",
        )
    algorithm = algorithm_name(code, where)
    expected = bytes(data[256:])
    found = digest(data[:256], algorithm).ljust(32, b"\0")
    if found != expected:
        corrupt("header digest differs", "header-digest", where, expected.hex(), found.hex())
    if any(zeros):
        corrupt("header has bytes that are not zero", "padding", where)
    rows, offset = [], HEADER_NBYTES
    for position, name in enumerate(SECTIONS):
        encoding, zeros, stored, raw, section_digest = SECTION.unpack_from(data, 32 + 56 * position)
        row = SectionRow(encoding, stored, raw, section_digest, offset)
        _check_section_row(row, name, zeros, algorithm, where)
        rows.append(row)
        offset += stored
    if sum(row.raw_nbytes for row in rows) > SECTIONS_NBYTES_MAX:
        corrupt("sections are too large", "limit", where, f"at most {SECTIONS_NBYTES_MAX} bytes")
    a, b, c, d = rows
    return Header(major, minor, algorithm, commit_id, (a, b, c, d))


def _check_section_row(
    row: SectionRow, name: str, zeros: bytes, algorithm: str, where: str
) -> None:
    at = f"{where} header, section {name}"
    if row.encoding not in (PLAIN, ZSTD) or (row.encoding == ZSTD and name in SECTIONS[:2]):
        raise UnsupportedError(
            "unknown section encoding",
            reason="encoding",
            where=at,
            expected="0 (plain) or, for tree and placement, 1 (zstd)",
            found=row.encoding,
            do="upgrade ckptfmt",
        )
    if any(zeros) or any(row.digest[DIGEST_NBYTES[algorithm] :]):
        corrupt("header has bytes that are not zero", "padding", at)
    if row.encoding == PLAIN and row.stored_nbytes != row.raw_nbytes:
        corrupt(
            "plain section of two lengths", "section-length", at, row.raw_nbytes, row.stored_nbytes
        )
    if max(row.raw_nbytes, row.stored_nbytes) > SECTIONS_NBYTES_MAX or (
        row.raw_nbytes > SECTION_RATIO_NBYTES
        and row.raw_nbytes > SECTION_RATIO_MAX * row.stored_nbytes
    ):
        corrupt("section is too large", "limit", at, found=row.raw_nbytes)


def parse_section(
    header: Header, position: int, stored: bytes | memoryview, where: str = "index"
) -> bytes | memoryview:
    """A section's raw bytes from its stored bytes, digest and size checked."""
    row, at = header.sections[position], f"{where}, section {SECTIONS[position]}"
    if len(stored) != row.stored_nbytes:
        corrupt("index is cut off", "truncated", at, f"{row.stored_nbytes} bytes", len(stored))
    found = digest(memoryview(stored), header.algorithm).ljust(32, b"\0")
    if found != row.digest:
        corrupt("section digest differs", "section-digest", at, row.digest.hex(), found.hex())
    if row.encoding == PLAIN:
        return stored
    return memoryview(decode(stored, (("zstd",),), row.raw_nbytes, at))


def parse_about(data: bytes | memoryview, algorithm: str) -> About:
    """Check and take the `about` section.

    Raises:
        CorruptError: An entry is missing or of another type.
        UnsupportedError: kind `unsupported-requires`.
    """
    table, where = parse_map(data, "$.about"), "$.about"
    requires = get_list(table, "requires", str, where)
    unknown = [entry for entry in requires if entry not in KNOWN_REQUIRES]
    if unknown:
        raise UnsupportedError(
            "checkpoint needs what this version does not have",
            reason="requires",
            where="$.about.requires",
            found=", ".join(map(repr, unknown)),
            do="upgrade ckptfmt",
        )
    if get_scalar(table, "digest", str, where) != algorithm:
        corrupt("digest algorithm differs from the header's", "section-entry", f"{where}.digest")
    step = table.get("step")
    if step is not None and (type(step) is not int or not 0 <= step < 1 << 53):
        corrupt("step", "section-entry", f"{where}.step", "nil or 0 to 2^53", repr(step))
    metrics = get_map(table, "metrics", where)
    if not all(type(value) in (float, int) for value in metrics.values()):
        corrupt("metric is no number", "section-entry", f"{where}.metrics")
    tree_digest = get_scalar(table, "tree_digest", bytes, where)
    txn = get_scalar(table, "txn", bytes, where)
    if len(tree_digest) != DIGEST_NBYTES[algorithm] or len(txn) != 16:
        corrupt("digest or txn of a wrong length", "section-entry", where)
    return About(
        name=_parse_name(get_scalar(table, "name", str, where), step),
        step=step,
        created=get_scalar(table, "created", str, where),
        txn=txn,
        parent=_parse_parent(table.get("parent")),
        writer=get_scalar(table, "writer", str, where),
        algorithm=algorithm,
        tree_digest=tree_digest,
        requires=tuple(requires),
        metrics={key: float(value) for key, value in metrics.items()},
        metadata=_parse_metadata(get_map(table, "metadata", where)),
        nbytes=_parse_total(table, "nbytes"),
        tensors=_parse_total(table, "tensors"),
    )


def _parse_name(name: str, step: int | None) -> str:
    """A name that no key can have would be joined to paths; one of another step would be chosen."""
    try:
        check_checkpoint_name(name)
    except UsageError as error:
        corrupt("checkpoint name", "name", "$.about.name", error.expected, ascii(name)[:200])
    if step_of(name) not in (None, step):
        corrupt("name and step disagree", "name", "$.about.name", f"of step {step}", repr(name))
    return name


def _parse_total(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, 0)
    if type(value) is not int or not 0 <= value <= INT63_MAX:
        corrupt("total", "section-entry", f"$.about.{key}", "0 to 2^63", repr(value))
    return value


def _parse_parent(value: object) -> tuple[str, bytes] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        name, tree_digest = value
        if type(name) is str and type(tree_digest) is bytes:
            return name, tree_digest
    corrupt("parent", "section-entry", "$.about.parent", "nil or [name, tree digest]")
    return None


def _parse_metadata(table: dict[str, Any]) -> Mapping[str, Any]:
    # The map holds tagged values: they are packed again to go through the one strict parser.
    made = parse_value(pack_map(table))
    assert isinstance(made, dict)
    return made


def pack_about(about: About) -> bytes:
    """The section's bytes."""
    head = {
        "name": about.name,
        "step": about.step,
        "created": about.created,
        "txn": about.txn,
        "parent": None if about.parent is None else list(about.parent),
        "writer": about.writer,
        "digest": about.algorithm,
        "tree_digest": about.tree_digest,
        "requires": list(about.requires),
        "nbytes": about.nbytes,
        "tensors": about.tensors,
        "metrics": {key: float(value) for key, value in about.metrics.items()},
    }
    # Metadata goes through the value encoding and is spliced in as the map's last entry.
    packed = pack_map(head)
    assert packed[0] == 0x80 | len(head)
    return (
        bytes([0x80 | (len(head) + 1)])
        + packed[1:]
        + b"\xa8metadata"
        + pack_value(dict(about.metadata))
    )
