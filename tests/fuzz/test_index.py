"""Any index is a value or a FormatError, in bounded memory and time; and the package and the
reference reader agree which. Digests and lengths are made right after each change, so that the deep
checks are reached. Spec: 07-index, 09 §9.2 (M09-6)."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import CkptWarning, FormatError
from ckptfmt.format import Index, pack_tree, parse_index, parse_tree

# Seeds, not `st.randoms`: that draws each number by itself, most of them 0, and tries little.
RANDOM = st.integers(0, 2**32 - 1).map(random.Random)
SECTIONS = ("about", "files", "tree", "placement")


def judge(data: bytes, *, lazy: bool = False) -> Index | str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", CkptWarning)
        try:
            index = parse_index(data, lazy=lazy)
            assert index.tree.leaf_names is not None
            return index
        except FormatError as error:
            return error.kind


def mutated(documents: ModuleType, mutator: Any, rng: random.Random) -> bytes:
    document = documents.index(rng.choice(["xxh3-128", "xxh3-128", "sha256"]))
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        mutator(rng).mutate(document, SECTIONS)
    document.encodings = [0, 0, int(rng.random() < 0.1), int(rng.random() < 0.1)]
    made: bytes = document.pack()
    return made


def check(data: bytes, reference: ModuleType) -> bool:
    """Both readers take it, or both refuse it; True if they take it."""
    made = judge(data)
    assert isinstance(made, str) == isinstance(judge(data, lazy=True), str)
    try:
        theirs = reference.parse_index(data)
    except reference.Refused as error:
        theirs = error.kind
    if isinstance(theirs, str):
        assert isinstance(made, str), f"the reference reader refuses with {theirs}"
        return False
    assert isinstance(made, Index), f"refused with {made}, the reference reader takes it"
    assert [t.shape for t in theirs.tensors] == [
        made.tree.shape(row) for row in range(len(theirs.tensors))
    ]
    again = pack_tree(made.tree)
    assert pack_tree(parse_tree(again, made.header.algorithm)) == again
    return True


@settings(max_examples=400)
@given(RANDOM)
def test_a_mutated_index_is_a_value_or_a_format_error(
    documents: ModuleType, reference: ModuleType, mutator: Any, rng: random.Random
) -> None:
    check(mutated(documents, mutator, rng), reference)


@settings(max_examples=200)
@given(st.binary(max_size=700))
def test_any_bytes(data: bytes) -> None:
    assert isinstance(judge(data), str)


@settings(max_examples=200)
@given(RANDOM)
def test_any_bytes_in_a_section(documents: ModuleType, mutator: Any, rng: random.Random) -> None:
    document = documents.index()
    section = rng.choice(SECTIONS)
    data = documents.pack(document.get(section))
    for _ in range(rng.randrange(1, 6)):
        data = mutator(rng).damage(data)
    document.set(section, data)
    judge(document.pack())


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
    # Neither reader takes all, nor refuses all: the changes are neither idle nor too wild.
    assert 500 < taken < 15_000


# -- the nastiest ---------------------------------------------------------------------------------

MILLION = 1_000_000


def many_tensors(documents: ModuleType, count: int) -> Any:
    """`count` tensors of 64 bytes that share one stored range."""
    document = documents.index()
    ones, zeros = np.ones(count, "<u8"), np.zeros(count, "<u8")
    document.tree |= {
        "dtypes": {"name": ["uint8"], "bits": np.array([8], "<u4")},
        "leaves": {
            "name": [f"{i:x}" for i in range(count)], "kind": bytes(count),
            "row": np.arange(count, dtype="<u4"),
        },
        "values": [],
        "containers": {"name": [], "kind": [], "argument": []},
        "tensors": {"dtype": bytes(2 * count), "ndim": ones.astype("u1"), "dims": 64 * ones},
        "regions": {
            "tensor": np.arange(count, dtype="<u4"), "origin": zeros, "extent": 64 * ones,
            "nchunks": ones.astype("<u4"),
        },
        "chunks": {"raw": (64 * ones).astype("<u4"), "digest": bytes(16 * count)},
        "attributes": {},
    }  # fmt: skip
    document.files = {"id": bytes(16), "nbytes": np.array([4096], "<u8")}
    document.placement = {
        "file": bytes(4 * count), "offset": 64 * ones, "stored": (64 * ones).astype("<u4"),
        "codec": bytes(count), "pipelines": [[]],
    }  # fmt: skip
    return document


def many_boxes(documents: ModuleType, shape: tuple[int, ...], boxes: Any) -> Any:
    """One tensor of bytes, cut into boxes: an array of shape (count, 2, axes)."""
    count = len(boxes)
    document = many_tensors(documents, 1)
    volumes = boxes[:, 1].prod(axis=1).astype("<u4")
    document.tree["tensors"] |= {
        "ndim": bytes([len(shape)]), "dims": np.array(shape, "<u8"),
    }  # fmt: skip
    document.tree["regions"] = {
        "tensor": bytes(4 * count), "origin": boxes[:, 0].astype("<u8"),
        "extent": boxes[:, 1].astype("<u8"), "nchunks": np.ones(count, "<u4"),
    }  # fmt: skip
    document.tree["chunks"] = {"raw": volumes, "digest": bytes(16 * count)}
    offsets = 64 + np.cumsum(np.concatenate([[0], volumes[:-1]]))
    document.placement = {
        "file": bytes(4 * count), "offset": offsets.astype("<u8"), "stored": volumes,
        "codec": bytes(count), "pipelines": [[]],
    }  # fmt: skip
    document.files["nbytes"] = np.array([(int(offsets[-1]) // 4096 + 100) * 4096], "<u8")
    return document


def with_tree(documents: ModuleType, **columns: Any) -> Any:
    document = many_tensors(documents, 100_000)
    for path, value in columns.items():
        document.set("tree/" + path.replace("__", "/"), value)
    return document


def nasty(documents: ModuleType) -> Iterator[tuple[str, Callable[[], Any], str]]:
    """(what, how it is made, the kind expected or "" for a value)."""
    n = 100_000
    yield (
        "array header",
        lambda: raw_section(documents, b"\x81\xa1a\xdd\xff\xff\xff\xff"),
        "msgpack",
    )
    header = b"\xdd" + MILLION.to_bytes(4, "big")
    yield (
        "array headers",
        lambda: raw_section(documents, b"\x81\xa1a" + header * 1000 + bytes(MILLION - 1)),
        "msgpack",
    )
    header = b"\xdf" + (MILLION // 2).to_bytes(4, "big")
    yield (
        "map headers",
        lambda: raw_section(documents, b"\x81\xa1a" + header * 1000 + bytes(MILLION)),
        "msgpack",
    )
    yield "deep", lambda: raw_section(documents, b"\x81\xa1a" + b"\x91" * MILLION), "msgpack"
    yield "empty arrays", lambda: raw_section(documents, b"\x81\xa1a\xdd\0\x0f\x42\x40" + b"\x90" * MILLION), "section-entry"  # fmt: skip
    yield "tied range", lambda: many_tensors(documents, n), ""
    yield "dims overflow", lambda: with_tree(documents, tensors__dims=np.full(n, 2**63 - 1, "<u8")), "dims-overflow"  # fmt: skip
    yield (
        "dims just below",
        lambda: with_tree(documents, tensors__dims=np.full(n, 2**62 - 1, "<u8")),
        "regions",
    )
    yield "ndim 64, no dims", lambda: with_tree(documents, tensors__ndim=b"\x40" * n, tensors__dims=b""), "column-length"  # fmt: skip
    yield "ndim 255", lambda: with_tree(documents, tensors__ndim=b"\xff" * n), "dims"
    yield "nchunks", lambda: with_tree(documents, regions__nchunks=b"\xff" * 4 * n), "column-length"
    yield "kinds", lambda: with_tree(documents, leaves__kind=b"\xff" * n), "column-range"
    yield "rows", lambda: with_tree(documents, leaves__row=b"\xff" * 4 * n), "order"
    yield "one name", lambda: with_tree(documents, leaves__name=["x"] * n), "duplicate-name"
    yield "owners", lambda: with_tree(documents, regions__tensor=b"\xff" * 4 * n), "column-range"
    yield (
        "regions of 64 axes without boxes",
        lambda: with_tree(
            documents, tensors__ndim=b"\x40" + b"\x01" * (n - 1),
            tensors__dims=np.ones(n + 63, "<u8"), regions__tensor=bytes(4 * n),
        ),
        "column-length",
    )  # fmt: skip
    yield "attributes", lambda: with_tree(documents, attributes={"leaves": {str(i): {"rows": bytes(4), "values": [b""]} for i in range(n // 10)}}), ""  # fmt: skip
    yield "attribute rows", lambda: with_tree(documents, attributes={"leaves": {"a.b": {"rows": b"\xff" * 4 * n, "values": [b""] * n}}}), "column-range"  # fmt: skip

    side = 300
    grid = np.stack(np.unravel_index(np.arange(side * side), (side, side)), axis=1) * 2
    cells = np.stack([grid, np.full_like(grid, 2)], axis=1)
    yield "grid", lambda: many_boxes(documents, (2 * side, 2 * side), cells), ""
    wrong = cells.copy()
    wrong[40_000, 0, 1] -= 1
    yield "grid, one moved", lambda: many_boxes(documents, (2 * side, 2 * side), wrong), "regions"
    steps = np.arange(30_000)[:, None]
    stairs = np.stack([steps, 30_000 - steps], axis=1)
    yield "stairs that overlap", lambda: many_boxes(documents, (30_000,), stairs), "regions"
    corner = np.stack(np.unravel_index(np.arange(2**14), (2,) * 14), axis=1)
    cubes = np.stack([corner, np.ones_like(corner)], axis=1)
    yield "cut along 14 axes", lambda: many_boxes(documents, (2,) * 14, cubes), ""
    yield "bomb", lambda: bomb(documents, 16 << 20), "msgpack"
    yield "bomb over the limit", lambda: bomb(documents, 64 << 20), "limit"


def raw_section(documents: ModuleType, data: bytes) -> Any:
    document = documents.index()
    document.tree = data
    return document


def bomb(documents: ModuleType, nbytes: int) -> Any:
    document = documents.index()
    stored = zstandard.ZstdCompressor(level=19).compress(bytes(nbytes))
    document.tree = bytes(nbytes)
    document.rows[2] = {
        "encoding": 1, "stored": len(stored), "raw": nbytes,
        "digest": documents.digest(stored, "xxh3-128"), "data": stored,
    }  # fmt: skip
    return document


NASTY = [what for what, _, _ in nasty(ModuleType("names only"))]


@pytest.mark.parametrize("what", NASTY)
def test_the_nastiest_is_judged_in_bounded_time_and_memory(
    documents: ModuleType, what: str
) -> None:
    make, kind = next((make, kind) for w, make, kind in nasty(documents) if w == what)
    data = make().pack()
    before = time.process_time()
    made = judge(data)
    seconds = time.process_time() - before
    assert made == f"corrupt-{kind}" if kind else isinstance(made, Index)
    # One second of a machine that is not busy; caches shared with other tests cost a factor.
    assert seconds < 3
    tracemalloc.start()
    try:
        judge(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80 * len(data) + (64 << 20)


PROGRAM = """
import resource, sys
from ckptfmt.errors import FormatError
from ckptfmt.format import decode, parse_index
import numpy, zstandard
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (192 << 20), -1))
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        data = file.read()
    try:
        parse_index(data)
    except FormatError as error:
        print(error.kind)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_bombs_and_long_headers_fit_a_process_with_little_memory(
    documents: ModuleType, tmp_path: Path
) -> None:
    # tracemalloc does not see what a decompressor takes for itself.
    names, kinds = [], []
    for what, make, kind in nasty(documents):
        if what in ("array header", "array headers", "map headers", "deep", "bomb", "bomb over the limit", "cut along 14 axes"):  # fmt: skip
            path = tmp_path / what.replace(" ", "-")
            path.write_bytes(make().pack())
            names.append(str(path))
            kinds += [f"corrupt-{kind}"] if kind else []
    window = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    )
    document = documents.index()
    stream = window.compressobj(size=len(documents.pack(document.tree)))
    stored = stream.compress(documents.pack(document.tree)) + stream.flush()
    document.rows[2] = {
        "encoding": 1, "stored": len(stored), "raw": len(documents.pack(document.tree)),
        "digest": documents.digest(stored, "xxh3-128"), "data": stored,
    }  # fmt: skip
    path = tmp_path / "window"
    path.write_bytes(document.pack())
    names.append(str(path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == kinds


def test_metadata_is_bounded_like_any_value(documents: ModuleType) -> None:
    for nested in (b"\x91" * 900 + b"\0", b"\xdd\0\x01\0\0" * 200 + bytes(70_000)):
        document = documents.index()
        about = documents.pack({**document.about, "tree_digest": bytes(16), "metadata": 0})
        document.about = about.replace(b"\xa8metadata\0", b"\xa8metadata\x81\xa1a" + nested)
        assert judge(document.pack()) in ("corrupt-msgpack", "corrupt-value-depth")
    document = documents.index()
    document.about["metadata"] = {
        "a": msgpack.ExtType(1, b"\x92\xa5tuple" + b"\xdd\xff\xff\xff\xff")
    }
    assert judge(document.pack()) == "corrupt-msgpack"
