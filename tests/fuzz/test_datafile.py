"""Any data file is a value or a FormatError, in bounded memory and time; and the package and the
reference reader agree which. Spec: 05-data-files, 09 §9.2 (M09-6)."""

from __future__ import annotations

import random
import time
import tracemalloc
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import FormatError
from ckptfmt.format import DataTable, gaps, pack_table, parse_footer, parse_head, parse_table

RANDOM = st.integers(0, 2**32 - 1).map(random.Random)


def read(data: bytes) -> DataTable | str:
    """What the package makes of a file: head, footer, table, gaps; chunks are another matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            if len(data) % 4096 or len(data) < 4096:
                parse_footer(data, len(data))
            algorithm = parse_head(data)
            footer = parse_footer(data[-64:], len(data))
            if footer.algorithm != algorithm:
                return "corrupt-algorithm"
            at = footer.table_offset
            table = parse_table(data[at : at + footer.table_nbytes], footer)
        except FormatError as error:
            return error.kind
    if any(any(data[start:stop]) for start, stop in gaps(table, footer, len(data))):
        return "corrupt-padding"
    return table


def mutated(documents: ModuleType, mutator: Any, rng: random.Random) -> bytes:
    file = documents.data_file(rng.choice(["xxh3-128", "xxh3-128", "sha256"]))
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        mutator(rng).mutate(file, ("table",))
    if rng.random() < 0.1:
        key, edge = rng.choice(["offset", "nbytes"]), rng.choice([0, 64, 4096, 2**63, 2**64 - 64])
        file.footer[key] = edge
    made: bytes = file.pack()
    return mutator(rng).damage(made) if rng.random() < 0.05 else made


def check(data: bytes, reference: ModuleType) -> bool:
    """Both readers take it, or both refuse it; True if they take it."""
    made = read(data)
    try:
        theirs = reference.parse_data_file(data, read_chunks=False)
    except reference.Refused as error:
        theirs = error.kind
    if isinstance(theirs, str):
        assert isinstance(made, str), f"the reference reader refuses with {theirs}"
        return False
    assert isinstance(made, DataTable), f"refused with {made}, the reference reader takes it"
    assert [region["name"] for region in theirs.regions] == made.region_names
    assert pack_table(made)
    return True


@settings(max_examples=400)
@given(RANDOM)
def test_a_mutated_table_is_a_value_or_a_format_error(
    documents: ModuleType, reference: ModuleType, mutator: Any, rng: random.Random
) -> None:
    check(mutated(documents, mutator, rng), reference)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.sampled_from([0, 4096, 8192]))
def test_any_bytes(data: bytes, nbytes: int) -> None:
    assert isinstance(read(data.ljust(nbytes, b"\0")), str)


@settings(max_examples=200)
@given(st.binary(min_size=64, max_size=64), st.integers(0, 2**40))
def test_any_footer(data: bytes, nbytes: int) -> None:
    for tail in (data, data[:-8] + bytes.fromhex("89434B440D0A1A00")):
        try:
            footer = parse_footer(tail, nbytes)
        except FormatError:
            continue
        assert 64 <= footer.table_offset <= nbytes - 64 - footer.table_nbytes


@pytest.mark.slow
def test_twenty_thousand_mutations(
    documents: ModuleType, reference: ModuleType, mutator: Any, seed: int
) -> None:
    taken = 0
    for number in range(20_000):
        rng = random.Random(seed + number)
        data = mutated(documents, mutator, rng)
        try:
            taken += check(data, reference)
        except Exception as error:
            error.add_note(f"random.Random({seed + number})")
            raise
    assert 500 < taken < 15_000


def table_of(documents: ModuleType, count: int, **columns: Any) -> Any:
    """A table of `count` regions of one chunk of 64 bytes, with some columns replaced."""
    file = documents.data_file()
    ones, zeros = np.ones(count, "<u8"), np.zeros(count, "<u8")
    file.chunks = {64: bytes(64 * count)}
    file.table |= {
        "dtypes": {"name": ["uint8"], "bits": np.array([8], "<u4")},
        "regions": {
            "name": [""] * count, "dtype": bytes(2 * count), "ndim": ones.astype("u1"),
            "shape": 64 * ones, "origin": zeros, "extent": 64 * ones,
            "nchunks": ones.astype("<u4"),
        },
        "chunks": {
            "start": zeros, "offset": 64 + 64 * np.arange(count, dtype="<u8"),
            "stored": (64 * ones).astype("<u4"), "raw": (64 * ones).astype("<u4"),
            "codec": bytes(count), "digest": bytes(16 * count),
        },
    }  # fmt: skip
    for path, value in columns.items():
        file.set("table/" + path.replace("__", "/"), value)
    return file


N = 50_000
NASTY: dict[str, tuple[dict[str, Any], str]] = {
    "many regions": ({}, ""),
    "dims overflow": ({"regions__shape": np.full(N, 2**63, "<u8")}, "dims-overflow"),
    "ndim without dims": ({"regions__ndim": b"\x40" * N}, "column-length"),
    "nchunks": ({"regions__nchunks": b"\xff" * 4 * N}, "column-length"),
    "extents": ({"regions__extent": np.full(N, 2**63 - 1, "<u8")}, "regions"),
    "origins": ({"regions__origin": b"\xff" * 8 * N}, "regions"),
    "all one range": ({"chunks__offset": np.full(N, 64, "<u8")}, "chunk-range"),
    "offsets at the top": ({"chunks__offset": np.full(N, 2**63 - 1, "<u8")}, "chunk-range"),
    "offsets beyond": ({"chunks__offset": b"\xff" * 8 * N}, "chunk-range"),
    "raw": ({"chunks__raw": b"\xff" * 4 * N}, "chunk-length"),
    "codec rows": ({"chunks__codec": b"\xff" * N}, "chunk-length"),
}


@pytest.mark.parametrize("what", NASTY)
def test_the_nastiest_is_judged_in_bounded_time_and_memory(
    documents: ModuleType, what: str
) -> None:
    columns, kind = NASTY[what]
    data = table_of(documents, N, **columns).pack()
    before = time.process_time()
    made = read(data)
    assert time.process_time() - before < 3
    if what == "codec rows":
        assert made in ("corrupt-column-range", "corrupt-section-entry")
    else:
        assert made == f"corrupt-{kind}" if kind else isinstance(made, DataTable)
    tracemalloc.start()
    try:
        read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(data) + (16 << 20)


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a" + (b"\xdd" + (1_000_000).to_bytes(4, "big")) * 1000 + bytes(995_000),
        b"\x81\xa1a" + b"\x91" * 1_000_000,
    ],
    ids=["header", "headers", "deep"],
)
def test_a_table_that_claims_too_much_is_refused(documents: ModuleType, data: bytes) -> None:
    file = documents.data_file()
    file.table = data
    packed = file.pack()
    tracemalloc.start()
    try:
        assert read(packed) == "corrupt-msgpack"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(packed) + (16 << 20)
