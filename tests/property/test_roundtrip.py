"""Any tree of any arrays comes back bit for bit, from any store, in any mode."""

from __future__ import annotations

import collections
import math
import tempfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.testing import difference

Point = collections.namedtuple("Point", ["x", "y"])
NUMPY = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("U1", "U3", "S1", "S5", "V3", "M8[ns]", "M8[7D]", "m8[us]", "m8"),
]
EXTENSION = [
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
]
BITS = {name: ml_dtypes.iinfo(getattr(ml_dtypes, name)).bits for name in EXTENSION if "int" in name}
BITS |= {
    name: ml_dtypes.finfo(getattr(ml_dtypes, name)).bits for name in EXTENSION if "float" in name
}


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Random bits of any dtype in any layout."""
    name = draw(st.sampled_from([*NUMPY, *EXTENSION]))
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17]), max_size=4)))
    count = math.prod(shape)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    raw = random.integers(0, 256, count * dtype.itemsize, np.uint8)
    if name == "bool" or BITS.get(name, 8) < 8:
        raw &= (1 << (1 if name == "bool" else BITS[name])) - 1
    if dtype.kind == "U":
        raw = np.frombuffer(
            random.integers(0, 0xD7FF, raw.size // 4, np.uint32).tobytes(), np.uint8
        )
    array = np.ndarray(shape, dtype, raw.tobytes() or b"")
    layout = draw(st.sampled_from(["c", "fortran", "negative", "strided", "broadcast", "swapped"]))
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "negative" and array.ndim:
        return array[::-1]
    if layout == "strided" and array.ndim:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "broadcast":
        return np.broadcast_to(array, (2, *shape))
    if layout == "swapped" and dtype.kind in "iufcUMm" and dtype.itemsize > 1:
        return array.astype(dtype.newbyteorder(">"))
    return array


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text("~/.", max_size=3)
STRINGS = st.lists(TEXT.filter(lambda s: "\0" not in s), max_size=5).map(
    lambda items: np.array(items, object) if items else np.array(["x"], object)
)
KEYS: Any = (
    TEXT | st.integers(-2, 99) | st.booleans() | st.none() | st.tuples(st.integers(0, 3), TEXT)
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | TEXT
    | st.binary(max_size=5)
    | st.sampled_from(
        [
            *(np.float32(1.5), np.float64(-0.0), np.int64(-3), np.bool_(True), np.str_("é")),
            *(np.datetime64("2020-02-02", "ns"), np.complex64(1j), np.bytes_(b"x\1"), 2**80),
            *("long" * 2000, b"\0" * 5000, frozenset([1, 2]), range(3)),
        ]
    ).filter(lambda value: not isinstance(value, range))
)


def containers(inner: Any) -> Any:
    dicts = st.dictionaries(KEYS, inner, max_size=4)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
        | dicts
        | dicts.map(collections.OrderedDict)
        | dicts.map(lambda d: collections.defaultdict(list, d))
    )


TREES = st.recursive(arrays() | STRINGS | VALUES, containers, max_leaves=15)
OPTIONS = st.fixed_dictionaries(
    {
        "codec": st.sampled_from(["raw", "zstd", "zstd:-5"]),
        "chunk_nbytes": st.sampled_from([4096, 8192, 4 << 20]),
        "digest": st.sampled_from(["xxh3-128", "sha256"]),
    }
)


def normal(tree: Any) -> Any:
    """A tree as it comes back: C order, little-endian, arrays of its own."""
    if isinstance(tree, np.ndarray):
        if tree.dtype.kind == "O":
            return tree
        return np.ascontiguousarray(tree).reshape(tree.shape).astype(tree.dtype.newbyteorder("<"))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(normal, tree))
    if isinstance(tree, collections.defaultdict):
        return collections.defaultdict(
            tree.default_factory, {k: normal(v) for k, v in tree.items()}
        )
    if isinstance(tree, dict):
        return type(tree)((k, normal(v)) for k, v in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(map(normal, tree))
    return tree


@settings(max_examples=120)
@given(TREES, OPTIONS, st.booleans())
def test_a_tree_comes_back_bit_for_bit(tree: Any, options: Any, late_key: bool) -> None:
    store = ckptfmt.Store("memory://", storage_options={"late_key": late_key})
    ckptfmt.save(tree, store, step=1, durable=False, **options)
    expected = normal(tree)
    assert not difference(ckptfmt.load(store), expected)
    assert not difference(ckptfmt.load(store, mode="read"), expected)
    assert store.verify().ok


@settings(max_examples=40)
@given(TREES, OPTIONS)
def test_a_tree_comes_back_from_a_disk_in_every_mode(tree: Any, options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ckptfmt.Store(folder + "/s")
        ckptfmt.save(tree, store, step=1, durable=False, **options)
        for mode in ("auto", "read", "mmap"):
            try:
                loaded = ckptfmt.load(store, mode=mode)
            except ckptfmt.UnsupportedError:
                assert mode == "mmap"
                assert options["codec"] != "raw"
                continue
            assert not difference(loaded, normal(tree))


@settings(max_examples=60)
@given(TREES)
def test_what_was_loaded_saves_to_the_same_digest(tree: Any) -> None:
    """Cycle after cycle: nothing is retyped, doubled or dropped."""
    store = ckptfmt.Store("memory://")
    digests = set()
    for step in range(3):
        digests.add(ckptfmt.save(tree, store, step=step, durable=False).digest)
        tree = ckptfmt.load(store, step=step)
    assert len(digests) == 1


@settings(max_examples=60)
@given(TREES)
def test_every_leaf_reads_alone_as_in_the_whole(tree: Any) -> None:
    store = ckptfmt.Store("memory://")
    ckptfmt.save(tree, store, durable=False)
    checkpoint = store.open()
    flat = dict(checkpoint.items())
    for name, leaf in flat.items():
        alone = leaf.read() if hasattr(leaf, "read") else leaf
        part = ckptfmt.load(store, names=lambda found, name=name: found == name)
        for _ in range(name.count("/") + 1 if name else 0):
            [part] = part.values() if isinstance(part, dict) else part
        assert not difference(part, alone), name


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_exactly_the_ties_come_back_tied(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    base = np.arange(24, dtype=np.int32)
    pool = [
        base,
        base[:],
        base[::2],
        base[::2],
        base[:12],
        base.reshape(4, 6),
        base.view(np.uint32),
    ]
    pool += [base.copy(), base[4:16], base.reshape(4, 6).T, np.arange(24, dtype=np.int32)]
    tree = {f"{i}": pool[int(at)] for i, at in enumerate(random.integers(0, len(pool), count))}
    store = ckptfmt.Store("memory://")
    ckptfmt.save(tree, store, durable=False)
    loaded = ckptfmt.load(store)

    def key(array: Any) -> Any:
        place = array.__array_interface__["data"][0]
        return place, array.shape, array.strides, array.dtype

    for a in tree:
        for b in tree:
            tied = key(tree[a]) == key(tree[b])
            assert (loaded[a] is loaded[b]) == tied, (a, b)
            assert not difference(loaded[a], normal(tree[a]))
    groups = {frozenset(g) for g in store.open().ties()}
    expected = {frozenset(b for b in tree if key(tree[a]) == key(tree[b])) for a in tree}
    assert groups == {g for g in expected if len(g) > 1}


@pytest.mark.slow
@settings(max_examples=1000)
@given(TREES, OPTIONS)
def test_a_thousand_trees_come_back(tree: Any, options: Any) -> None:
    store = ckptfmt.Store("memory://")
    ckptfmt.save(tree, store, durable=False, **options)
    assert not difference(ckptfmt.load(store), normal(tree))
