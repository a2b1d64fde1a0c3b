"""Cases 28 and 29: a hostile store opens nothing outside itself and costs no memory or time."""

from __future__ import annotations

import os
import struct
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard

import ckptfmt
from ckptfmt.testing import difference

SECTIONS = ("about", "files", "tree", "placement")

# An audit hook cannot be taken away again: one for the whole module, which looks only when asked.
_seen: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in ("open", "os.open", "os.listdir", "os.scandir"):
        _seen.append(str(arguments[0]))


sys.addaudithook(_hook)


@contextmanager
def opened() -> Iterator[list[str]]:
    """Every path that is opened meanwhile."""
    global _seen
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def outside(seen: list[str], store: Path) -> list[str]:
    """Of these, paths outside a store: but for descriptors, what the kernel tells of this machine
    and process, the folders above the store, which are synced, and Python's own modules."""
    above = {str(folder) for folder in store.parents}
    modules = tuple(folder for folder in sys.path if folder)
    return [
        path
        for path in seen
        if not path.startswith((f"{store}/", "/proc/", "/sys/kernel/", *modules))
        and not path.isdigit()
        and path not in {*above, str(store)}
    ]


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def index_of(path: Path) -> Path:
    [found] = (path / "checkpoints").iterdir()
    return found


def sections_of(data: bytes) -> dict[str, bytes]:
    made, offset = {}, 288
    for number, name in enumerate(SECTIONS):
        encoding, _, stored, raw = struct.unpack_from("<B7sQQ", data, 32 + 56 * number)
        body = data[offset : offset + stored]
        made[name] = zstandard.ZstdDecompressor().decompress(body, raw) if encoding else body
        offset += stored
    return made


def sealed(sections: dict[str, bytes], *, claim: dict[str, tuple[int, int]] | None = None) -> bytes:
    """A document whose digests are all right; `claim` overrides stored and raw lengths."""
    head = struct.pack("<8sHHB3s16s", bytes.fromhex("89434B490D0A1A00"), 1, 0, 1, b"", b"c" * 16)
    for name in SECTIONS:
        body = sections[name]
        stored, raw = (claim or {}).get(name, (len(body), len(body)))
        head += struct.pack("<B7sQQ32s", 0, b"", stored, raw, digest(body))
    return head + digest(head).ljust(32, b"\0") + b"".join(sections[n] for n in SECTIONS)


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Unpack the index of a store, change it, and put it back with every digest right."""
    file = index_of(path)
    sections = sections_of(file.read_bytes())
    tables = {name: msgpack.unpackb(body, strict_map_key=False) for name, body in sections.items()}
    change(tables)
    packed = {
        name: table if isinstance(table, bytes) else msgpack.packb(table)
        for name, table in tables.items()
    }
    about = msgpack.unpackb(packed["about"], strict_map_key=False)
    about["tree_digest"] = digest(packed["tree"])
    packed["about"] = msgpack.packb(about)
    file.write_bytes(sealed(packed))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    tree = {"a": np.arange(600, dtype=np.float32), "b": np.arange(50, dtype=np.int16), "v": 1}
    ckptfmt.save(tree, path)
    return path


def u(width: int, *numbers: int) -> bytes:
    return b"".join(n.to_bytes(width, "little") for n in numbers)


# -- case 28 ------------------------------------------------------------------------------------

NAMES = [
    *("../x", "a/../../x", "..", ".", "/etc/passwd", "..\\x", "C:\\x", "\\\\host\\x", "a\0b", ""),
    *("data/../../x", "main/../x", "x" * 200, "main\n", "~root", "file:///x", "CON", "é"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_name_that_leads_out_is_refused_before_anything_is_opened(
    tmp_path: Path, store: Path, name: str
) -> None:
    """Case 28: in an index, in a tag, as an argument."""
    secret = tmp_path / "x"
    secret.write_text("secret")
    forge(store, lambda t: t["about"].update(name=name))
    with opened() as seen, pytest.raises(ckptfmt.CheckpointError):
        ckptfmt.load(store, at="main")
    assert outside(seen, store) == []
    with opened() as seen, pytest.raises(ckptfmt.CheckpointError):
        ckptfmt.load(store, at=name)
    assert outside(seen, store) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_tag_that_leads_out_is_refused(store: Path, name: str) -> None:
    """Case 28: what a tag names is looked up among the names listed, never joined to a path."""
    import json

    (store / "tags").mkdir()
    (store / "tags" / "evil").write_text(json.dumps({"name": name, "digest": "00" * 16}))
    with opened() as seen, pytest.raises(ckptfmt.CheckpointError):
        ckptfmt.load(store, at="evil")
    assert outside(seen, store) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckptfmt.CkptWarning)
        assert ckptfmt.Store(store).tags() == {}


def _set_ids(raw: bytes, tables: dict[str, Any]) -> None:
    tables["files"]["id"] = raw


def test_a_data_file_is_named_by_checked_hex_alone(tmp_path: Path, store: Path) -> None:
    """Case 28: an id is bytes in the index and becomes hex: no text of it reaches a path."""
    good = ckptfmt.load(store)
    real = index_of(store).read_bytes()
    for raw in (b"../../../../../x", b"/etc/passwd\0\0\0\0\0", b"\0" * 16, b"a" * 16):
        forge(store, partial(_set_ids, raw))
        with opened() as seen, pytest.raises(ckptfmt.CorruptError, match="data file is missing"):
            ckptfmt.load(store)
        assert {Path(p).parent.name for p in seen if "/data/" in p} <= {"data"}
        assert outside(seen, store) == []
        index_of(store).write_bytes(real)
    for raw in (b"short", b"", b"x" * 17, b"x" * 32):
        forge(store, partial(_set_ids, raw))
        with pytest.raises(ckptfmt.CorruptError):
            ckptfmt.load(store, at="main")
        index_of(store).write_bytes(real)
    assert not difference(ckptfmt.load(store), good)


@pytest.mark.parametrize("mode", ["auto", "read", "mmap"])
def test_a_link_in_place_of_a_data_file_is_not_followed(
    tmp_path: Path, store: Path, mode: Any
) -> None:
    """Case 28: a symlink inside the folder that leads out, or to a device or a pipe."""
    [file] = (store / "data").iterdir()
    file.rename(tmp_path / "outside")
    for target in (tmp_path / "outside", Path("/dev/zero"), tmp_path):
        file.symlink_to(target)
        with pytest.raises(ckptfmt.CheckpointError):
            ckptfmt.load(store, mode=mode)
        assert not ckptfmt.Store(store).verify().ok
        file.unlink()
    os.mkfifo(file)
    start = time.perf_counter()
    with pytest.raises(ckptfmt.CheckpointError):
        ckptfmt.load(store, mode=mode)
    assert time.perf_counter() - start < 5, "a pipe is not waited for"
    file.unlink()
    file.mkdir()
    with pytest.raises(ckptfmt.CheckpointError):
        ckptfmt.load(store, mode=mode)


def test_a_link_in_place_of_an_index_is_not_followed(tmp_path: Path, store: Path) -> None:
    """Case 28: neither is one among the indexes."""
    index_of(store).rename(tmp_path / "outside.index")
    (store / "checkpoints" / "main~0.index").symlink_to(tmp_path / "outside.index")
    with pytest.raises(ckptfmt.CheckpointError):
        ckptfmt.load(store, at="main")


@pytest.mark.parametrize(
    "name", ["../x", "/abs", "a/../b", "..", "C:\\x", "a\0b", "x" * 5000, "a\\b"]
)
def test_leaf_names_are_no_paths(tmp_path: Path, name: str) -> None:
    """Case 28: any text is an ordinary key of a tree; nothing is ever written or read by it."""
    tree = {name: np.arange(5), "v": {name: 1}}
    with opened() as seen:
        ckptfmt.save(tree, tmp_path / "s")
        assert not difference(ckptfmt.load(tmp_path / "s"), tree)
    assert outside(seen, tmp_path / "s") == []
    assert os.listdir(tmp_path) == ["s"]


def test_a_notes_file_of_another_pattern_is_ignored(store: Path) -> None:
    """Case 28: only our own patterns are looked at; ordinary subfolders do no harm."""
    (store / "notes").mkdir()
    for name in ("..~0.index", "x~0.index", "a" * 32 + "~x.index"):
        (store / "notes" / name).write_text("junk")
    (store / "checkpoints" / "sub").mkdir()
    (store / "data" / "sub").mkdir()
    assert ckptfmt.load(store)["v"] == 1
    assert ckptfmt.Store(store).verify().ok


# -- case 29 ------------------------------------------------------------------------------------

HUGE = (1 << 63) - 1
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "duplicate name": (
        lambda t: t["tree"]["leaves"].update(name=["a", "a", "v"]),
        "duplicate name",
    ),
    "overlap": (
        lambda t: t["placement"].update(offset=u(8, 64, 128)),
        "overlap",
    ),
    "one range under two names, not tied, other content": (
        lambda t: (
            t["placement"].update(offset=u(8, 64, 64)),
            t["tree"]["tensors"].update(dims=u(8, 600, 1200)),
            t["tree"]["regions"].update(extent=u(8, 600, 1200)),
            t["tree"]["chunks"].update(raw=u(4, 2400, 2400)),
            t["placement"].update(stored=u(4, 2400, 2400)),
        ),
        "share a range and differ",
    ),
    "offset beyond the file": (
        lambda t: t["placement"].update(offset=u(8, 64, 1 << 40)),
        "outside its file",
    ),
    "offset of 2^64 - 1": (
        lambda t: t["placement"].update(offset=u(8, 64, (1 << 64) - 1)),
        "offset|outside",
    ),
    "offset in the head": (
        lambda t: t["placement"].update(offset=u(8, 0, 2496)),
        "outside its file",
    ),
    "bytes are not shape times itemsize": (
        lambda t: t["tree"]["tensors"].update(dims=u(8, 601, 50)),
        "tile",
    ),
    "shape product overflows": (
        lambda t: (
            t["tree"]["tensors"].update(
                ndim=u(1, 4, 1), dims=u(8, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 50)
            ),
            t["tree"]["regions"].update(
                origin=u(8, 0, 0, 0, 0, 0), extent=u(8, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 50)
            ),
        ),
        "overflow",
    ),
    "dims of 2^63": (
        lambda t: (
            t["tree"]["tensors"].update(dims=u(8, 1 << 63, 50)),
            t["tree"]["regions"].update(extent=u(8, 1 << 63, 50)),
        ),
        "dim|overflow|large",
    ),
    "a huge tensor in two bytes": (
        lambda t: (
            t["tree"]["tensors"].update(dims=u(8, 1 << 50, 50)),
            t["tree"]["regions"].update(extent=u(8, 1 << 50, 50)),
        ),
        "sum to the region",
    ),
    "unknown dtype of other bits": (
        lambda t: t["tree"]["dtypes"].update(name=["float32", "int16"], bits=u(4, 64, 16)),
        "bits|width|dtype",
    ),
    "a dtype row out of range": (
        lambda t: t["tree"]["tensors"].update(dtype=u(2, 0, 9)),
        "out of range|dtype rows",
    ),
    "a tensor row out of range": (
        lambda t: t["tree"]["leaves"].update(row=u(4, 0, 7, 0)),
        "rows",
    ),
    "a region of no tensor": (
        lambda t: t["tree"]["regions"].update(tensor=u(4, 0, 8)),
        "region rows",
    ),
    "a region that reaches out": (
        lambda t: t["tree"]["regions"].update(origin=u(8, 5, 0)),
        "outside its tensor",
    ),
    "fewer chunks than said": (
        lambda t: t["tree"]["regions"].update(nchunks=u(4, 1, 5)),
        "number|chunk",
    ),
    "a chunk of nothing": (
        lambda t: t["tree"]["chunks"].update(raw=u(4, 2400, 0)),
        "chunk of a wrong length",
    ),
    "a column cut short": (
        lambda t: t["tree"]["leaves"].update(row=b"\0" * 11),
        "whole number of rows",
    ),
    "a column of another type": (
        lambda t: t["tree"]["leaves"].update(row=[0, 1, 0]),
        "missing or wrong column",
    ),
    "a missing table": (lambda t: t["tree"].pop("regions"), "missing or wrong entry"),
    "a file row out of range": (
        lambda t: t["placement"].update(file=u(4, 0, 1)),
        "file row",
    ),
    "a file of a wrong size": (
        lambda t: t["files"].update(nbytes=u(8, 4095)),
        "file of a wrong size",
    ),
    "a codec row out of range": (
        lambda t: t["placement"].update(codec=u(1, 0, 3), digest=t["tree"]["chunks"]["digest"]),
        "codec row",
    ),
    "a pipeline of a thousand stages": (
        lambda t: t["placement"].update(pipelines=[[], [["zstd"]] * 1000]),
        "codec pipeline",
    ),
    "names that stand above each other": (
        lambda t: t["tree"]["leaves"].update(name=["a", "a/b", "v"]),
        "a leaf stands above another leaf",
    ),
    "a value that is no value": (lambda t: t["tree"].update(values=[b"\xc1"]), "value|msgpack"),
    "a value that nests deeply": (
        lambda t: t["tree"].update(values=[b"\x91" * 4000 + b"\xc0"]),
        "deep|nest|level|StackError",
    ),
    "an array of 4 billion items": (
        lambda t: t["tree"].update(values=[b"\xdd\xff\xff\xff\xff"]),
        "value|msgpack|truncated|cut",
    ),
    "a section that is an array of 4 billion items": (
        lambda t: t.update(tree=b"\xdd\xff\xff\xff\xff"),
        "not a msgpack map",
    ),
    "a section that is a map of 4 billion entries": (
        lambda t: t.update(tree=b"\xdf\xff\xff\xff\xff"),
        "not a msgpack map",
    ),
    "a section that nests deeply": (
        lambda t: t.update(tree=b"\x81\xa1a" * 100_000 + b"\xc0"),
        "not a msgpack map",
    ),
    "a bin of 4 GiB": (
        lambda t: t.update(tree=b"\x81\xa1a\xc6\xff\xff\xff\xff"),
        "not a msgpack map",
    ),
    "a key twice": (
        lambda t: t.update(placement=b"\x82\xa4file\xc4\x00\xa4file\xc4\x00"),
        "duplicate key",
    ),
    "a name that is no UTF-8": (
        lambda t: t.update(
            tree=msgpack.packb(t["tree"]).replace(b"\xa1a\xa1b\xa1v", b"\xa1\xff\xa1b\xa1v")
        ),
        "not a msgpack map",
    ),
    "an unknown requirement": (lambda t: t["about"].update(requires=["quantum"]), "quantum"),
    "a step beyond 2^53": (lambda t: t["about"].update(step=1 << 60), "step"),
    "metadata that is no map": (
        lambda t: t["about"].update(metadata=[1]),
        "missing or wrong entry",
    ),
}


# What a leaf's value and place in the tree mean is looked at when a tree is made of them.
FOUND_BY_A_LOAD = {
    "names that stand above each other",
    "a value that is no value",
    "a value that nests deeply",
    "an array of 4 billion items",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_is_refused_in_moments_and_little_memory_with_its_real_cause(
    store: Path, name: str
) -> None:
    """Case 29: under 1 s (of a quiet machine), under 64 MiB, and no data file is opened."""
    import re

    change, cause = HOSTILE[name]
    forge(store, change)
    ckptfmt.Store(store)
    tracemalloc.start()
    start = time.process_time()
    try:
        with opened() as seen, pytest.raises(ckptfmt.FormatError) as caught:
            ckptfmt.load(store, at="main")
        took_s = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value) + str(caught.value.__cause__ or "")
    assert re.search(cause, text), text
    assert took_s < 5
    assert peak < 64 << 20
    if name not in FOUND_BY_A_LOAD:
        assert not [p for p in seen if "/data/" in p]
        assert not ckptfmt.Store(store).verify().ok


CLAIMS: dict[str, dict[str, tuple[int, int]]] = {
    "2^63 - 1": {"tree": (HUGE, HUGE)},
    "2^64 - 1": {"about": ((1 << 64) - 1, (1 << 64) - 1)},
    "beyond the file": {"placement": (1 << 29, 1 << 29)},
    "sum beyond the limit": dict.fromkeys(SECTIONS, (1 << 29, 1 << 29)),
    "a bomb": {"tree": (100, 1 << 30)},
    "nothing": {"files": (0, 0)},
}


@pytest.mark.parametrize("name", CLAIMS)
def test_lengths_beyond_the_file_or_belief_are_refused(store: Path, name: str) -> None:
    """Case 29: a length prefix never sizes an allocation."""
    file = index_of(store)
    file.write_bytes(sealed(sections_of(file.read_bytes()), claim=CLAIMS[name]))
    tracemalloc.start()
    try:
        with pytest.raises(ckptfmt.FormatError):
            ckptfmt.load(store, at="main")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    with pytest.warns(ckptfmt.CkptWarning), pytest.raises(ckptfmt.NotFoundError):
        ckptfmt.load(store)


def test_a_zstd_bomb_in_a_section_is_not_expanded(store: Path) -> None:
    """Case 29: a declared size is compared before a byte is decompressed."""
    file = index_of(store)
    sections = sections_of(file.read_bytes())
    bomb = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    head = struct.pack("<8sHHB3s16s", bytes.fromhex("89434B490D0A1A00"), 1, 0, 1, b"", b"c" * 16)
    for name in SECTIONS:
        body = bomb if name == "tree" else sections[name]
        raw = len(sections["tree"]) if name == "tree" else len(body)
        head += struct.pack("<B7sQQ32s", int(name == "tree"), b"", len(body), raw, digest(body))
    sections["tree"] = bomb
    data = head + digest(head).ljust(32, b"\0") + b"".join(sections[n] for n in SECTIONS)
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ckptfmt.FormatError, match="size"):
            ckptfmt.load(store, at="main")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_checkpoint_that_claims_more_than_memory_holds_is_refused_before_allocation(
    store: Path,
) -> None:
    """Case 29: a legal index over a tiny file may claim terabytes by naming one chunk again and
    again; the total is compared with max_nbytes, or with this machine's memory, first."""

    def claim(t: dict[str, Any]) -> None:
        count = 1 << 14
        raw = int.from_bytes(t["tree"]["chunks"]["raw"][:4], "little")
        assert raw == 2400
        one = t["tree"]["chunks"]["digest"][:16]
        names = [f"a{i}" for i in range(count)]
        t["tree"]["leaves"] = {
            "name": [*names, "v"],
            "kind": u(1, *[0] * count, 1),
            "row": u(4, *range(count), 0),
        }
        t["tree"]["dtypes"] = {"name": ["float32"], "bits": u(4, 32)}
        t["tree"]["tensors"] = {
            "dtype": u(2, *[0] * count),
            "ndim": u(1, *[1] * count),
            "dims": u(8, *[600] * count),
        }
        t["tree"]["regions"] = {
            "tensor": u(4, *range(count)),
            "origin": u(8, *[0] * count),
            "extent": u(8, *[600] * count),
            "nchunks": u(4, *[1] * count),
        }
        t["tree"]["chunks"] = {"raw": u(4, *[2400] * count), "digest": one * count}
        t["placement"].update(
            file=u(4, *[0] * count),
            offset=u(8, *[64] * count),
            stored=u(4, *[2400] * count),
            codec=bytes(count),
        )

    forge(store, claim)
    with pytest.raises(ckptfmt.UsageError, match="larger than allowed"):
        ckptfmt.load(store, max_nbytes=1 << 20)
    assert ckptfmt.load(store, names="a77", max_nbytes=1 << 20)["a77"][599] == 599
    # Declared ties of content: each its own memory, none aliased.
    two = ckptfmt.load(store, names=["a1", "a2"])
    two["a1"][:] = 0
    assert two["a2"][5] == 5


def test_the_same_range_under_two_names_is_one_tensor_only_if_it_was_declared(store: Path) -> None:
    """Case 29: shared bytes with equal content are legal and come back independent; only equal
    tensor rows are a tie."""
    weight = np.arange(9.0)
    ckptfmt.save({"a": weight, "b": weight, "c": weight.copy()}, store)
    index = ckptfmt.open(store).index
    assert index.placement.offsets.tolist() == [64, 64]
    assert ckptfmt.open(store).ties() == [["a", "b"]]
    loaded = ckptfmt.load(store)
    assert loaded["a"] is loaded["b"]
    loaded["a"][:] = 0
    assert loaded["c"][8] == 8


def test_nothing_in_a_store_runs_code(tmp_path: Path) -> None:
    """G5: pickles, classes by name and registered types in a file are data."""
    ckptfmt.save({"v": b"cos\nsystem\n(S'false'\ntR."}, tmp_path)
    with opened() as seen:
        loaded = ckptfmt.load(tmp_path)
    assert loaded["v"] == b"cos\nsystem\n(S'false'\ntR."
    assert outside(seen, tmp_path) == []

    def claim(t: dict[str, Any]) -> None:
        # A value of a registered type that names a module's function.
        t["tree"]["values"] = [
            msgpack.packb(msgpack.ExtType(1, msgpack.packb(["type", ["os.system", "false"]])))
        ]

    forge(tmp_path, claim)
    with pytest.warns(ckptfmt.CkptWarning, match=r"os\.system"):
        assert ckptfmt.load(tmp_path)["v"] == "false"
