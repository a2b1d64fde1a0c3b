"""Mutated documents, sealed again so that no digest stops them: the package and the reference reader
agree on what is refused, and refuse with an error of the format's, in bounded time."""

from __future__ import annotations

import json
import random
import struct
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptfmt.errors import FormatError
from ckptfmt.format import (
    Index,
    digest,
    gaps,
    pack_value,
    parse_footer,
    parse_index,
    parse_table,
    parse_value,
)

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "accept"
ROUNDS = 40


def names(form: str) -> list[str]:
    found = []
    for path in sorted(VECTORS.glob("*.json")):
        if json.loads(path.read_text())["format"] == form:
            found.append(path.stem)
    return found


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled or moved; numbers become edges of their range."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(made)) if made else 0
        match rng.randrange(6):
            case 0:
                made[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                made[at : at + 1] = bytes([made[at] ^ 1 << rng.randrange(8)]) if made else b""
            case 2:
                edge = rng.choice([0, 1, 0x7F, 0x80, 0xFF, 0xC0, 0xC1, 0xDD, 0xDF, 0xC9])
                made[at : at + 1] = bytes([edge])
            case 3:
                width = rng.choice([2, 4, 8])
                made[at : at + width] = rng.choice([b"\0", b"\xff", b"\x7f"]) * width
            case 4:
                del made[at : at + rng.choice([1, 4, 8, 16])]
            case 5:
                piece = made[at : at + rng.choice([1, 4, 8, 16])]
                made[at:at] = piece
    return bytes(made)


def sealed(data: bytes, rng: random.Random) -> bytes:
    """One section of an index mutated, and every digest and length made right again."""
    code = data[12]
    algorithm = {1: "xxh3-128", 2: "sha256"}[code]
    sections, at = [], 288
    rows = [list(struct.unpack_from("<B7sQQ32s", data, 32 + 56 * i)) for i in range(4)]
    for row in rows:
        sections.append(data[at : at + row[2]])
        at += row[2]
    which = rng.choice([0, 1, 2, 2, 2, 2, 3, 3])
    before = sections[2]
    sections[which] = mutated(rng, sections[which])
    if which == 2 and rows[2][0] == 0:
        old, new = digest(before, algorithm), digest(sections[2], algorithm)
        sections[0] = sections[0].replace(old, new)
    made = data[:32]
    for row, section in zip(rows, sections):
        raw = len(section) if row[0] == 0 else row[3]
        made += struct.pack("<B7sQQ", row[0], row[1], len(section), raw)
        made += digest(section, algorithm).ljust(32, b"\0")
    return made + digest(made, algorithm).ljust(32, b"\0") + b"".join(sections)


def kind_of(error: type[Exception], call: Any) -> str | None:
    """None where it is accepted; the kind of the refusal else. Anything else is raised."""
    started = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except error as refusal:
        kind: str = refusal.kind  # type: ignore[attr-defined]
        return kind
    finally:
        assert time.process_time() - started < 5
    return None


@pytest.mark.parametrize("name", names("index"))
def test_both_readers_agree_on_a_mutated_index(name: str, reference: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    data = (VECTORS / f"{name}.bin").read_bytes()
    for _ in range(ROUNDS):
        bad = sealed(data, rng)
        found: list[Index] = []
        mine = kind_of(FormatError, lambda: found.append(parse_index(bad)))  # noqa: B023
        other = kind_of(reference.Refused, lambda: reference.parse_index(bad))  # noqa: B023
        assert (mine is None) == (other is None), (mine, other, bad.hex())


@pytest.mark.parametrize("name", names("value"))
def test_both_readers_agree_on_a_mutated_value(name: str, reference: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    data = (VECTORS / f"{name}.bin").read_bytes()
    for _ in range(ROUNDS):
        bad = mutated(rng, data)
        found: list[Any] = []
        mine = kind_of(FormatError, lambda: found.append(parse_value(bad)))  # noqa: B023
        other = kind_of(reference.Refused, lambda: reference.parse_value(bad))  # noqa: B023
        assert (mine is None) == (other is None), (mine, other, bad.hex())
        if mine is None and "." not in name:
            pack_value(found[0])


@pytest.mark.parametrize("name", names("data-file"))
def test_both_readers_agree_on_a_mutated_table(name: str, reference: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    data = (VECTORS / f"{name}.bin").read_bytes()
    at, length = struct.unpack_from("<QQ", data, len(data) - 64)
    algorithm = {1: "xxh3-128", 2: "sha256"}[data[12]]
    for _ in range(ROUNDS):
        table = mutated(rng, data[at : at + length])
        body = data[:at] + table
        body += bytes(-(len(body) + 64) % 4096)
        own = digest(table, algorithm).ljust(32, b"\0")
        bad = body + struct.pack("<QQB7s", at, len(table), data[12], b"") + own + data[:8]

        def package(bad: bytes = bad) -> None:
            footer = parse_footer(bad[-64:], len(bad))
            stop = footer.table_offset + footer.table_nbytes
            made = parse_table(bad[footer.table_offset : stop], footer)
            for start, end in gaps(made, footer, len(bad)):
                reference.need(not any(bad[start:end]), "corrupt-padding")

        mine = kind_of((FormatError, reference.Refused), package)  # type: ignore[arg-type]
        other = kind_of(
            reference.Refused,
            lambda: reference.parse_data_file(bad, read_chunks=False),  # noqa: B023
        )
        assert (mine is None) == (other is None), (mine, other, bad.hex())
