"""HDF5, by our own reader: what h5py reads, bit for bit; damage never hangs, nothing leads out."""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.foreign import mapping, read_foreign, streaming

FILES = Path(__file__).parents[2] / "compat/import/hdf5"
Unpacked = Callable[[Path], Path]


@pytest.mark.parametrize("stem", ["earliest", "v108"])
def test_every_dtype_and_layout_is_read_as_h5py_reads_it(
    stem: str, unpacked: Unpacked, same_as_expected: Any
) -> None:
    path = unpacked(FILES / f"{stem}.h5.xz")
    tree = same_as_expected(path, FILES / f"expected-{stem}.json")
    if stem == "earliest":
        assert not tree.tensors["plain/int32"].fetch().flags.owndata
        assert tree.tensors["chunked/gzip"].box is not None
        assert ["scalar", "tied"] in [sorted(n) for n in ckptfmt.open_foreign(path).ties()]


def test_chunks_and_the_other_byte_order_stream(
    unpacked: Unpacked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpacked(FILES / "earliest.h5.xz")
    want = ckptfmt.open_foreign(path).load()
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 100)
    ckptfmt.convert(path, tmp_path / "s", durable=False, allow_partial=True)
    found = ckptfmt.load(tmp_path / "s")
    for group in ("chunked", "big"):
        for name, array in want[group].items():
            assert found[group][name].tobytes() == array.tobytes(), name


def test_a_chunk_that_differs_from_its_checksum_is_damaged(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    cases = [
        (kind, nbytes)
        for kind in ("noise", "zeros", "ones")
        for nbytes in (1, 2, 3, 720, 721, 131_072, 131_075, 200_001)
    ]
    rng, places = np.random.default_rng(0), []
    with h5py.File(path, "w") as file:
        for kind, nbytes in cases:
            fill = {"zeros": 0, "ones": 255}
            data = np.full(nbytes, fill[kind], "u1") if kind in fill else rng.bytes(nbytes)
            made = file.create_dataset(
                f"{kind}{nbytes}", data=np.frombuffer(data, "u1"), chunks=(nbytes,), fletcher32=True
            )
            places.append((made.name[1:], made.id.get_chunk_info(0).byte_offset, nbytes))
        want = {name: file[name][()].tobytes() for name, _, _ in places}
    whole = path.read_bytes()
    tree = read_foreign(str(path))
    assert {name: bytes(tree.tensors[name].fetch()) for name in want} == want
    swapped, flipped = bytearray(whole), bytearray(whole)
    for _, at, nbytes in places:
        end = at + nbytes
        swapped[end : end + 4] = [whole[end + i] for i in (1, 0, 3, 2)]
        flipped[at + nbytes // 2] ^= 0x10
    path.write_bytes(swapped)  # as HDF5 before 1.6.3 wrote it
    tree = read_foreign(str(path))
    assert {name: bytes(tree.tensors[name].fetch()) for name in want} == want
    path.write_bytes(flipped)
    tree = read_foreign(str(path))
    for name in want:
        with pytest.raises(
            CorruptError, match=rf"a chunk is damaged[\s\S]*{name}[\s\S]*Fletcher-32"
        ):
            tree.tensors[name].fetch()


def test_a_file_that_leads_to_others_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "secret.raw").write_bytes(b"secret" * 4)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.arange(3)
    layout = h5py.VirtualLayout((3,), "i8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (3,))
    cases: dict[str, Callable[[Any], Any]] = {
        "elsewhere": lambda f: f.__setitem__("x", h5py.ExternalLink("other.h5", "/x")),
        "leads else": lambda f: f.__setitem__("x", h5py.SoftLink("/etc/passwd")),
        "other files": lambda f: f.create_dataset(
            "x", (24,), "u1", external=[(str(tmp_path / "secret.raw"), 0, 24)]
        ),
        "virtual|new form": lambda f: f.create_virtual_dataset("x", layout),
    }
    for text, make in cases.items():
        for libver in ("earliest", "latest"):
            path = tmp_path / "x.h5"
            with h5py.File(path, "w", libver=libver) as file:
                make(file)
            with pytest.raises(UnsupportedError, match=text) as caught:
                ckptfmt.open_foreign(path)
            assert "x.h5" in str(caught.value)


def test_what_only_new_files_have_is_refused_by_name(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        for number in range(20):
            file[f"g/{number}"] = number
    with pytest.raises(UnsupportedError, match="many members in the new form"):
        ckptfmt.open_foreign(tmp_path / "x.h5")
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file.create_dataset("x", data=np.arange(9), chunks=(3,), compression="lzf")
    with pytest.raises(UnsupportedError, match="a filter other than"):
        ckptfmt.open_foreign(tmp_path / "y.h5")


def sample() -> bytes:
    h5py = pytest.importorskip("h5py")
    made = io.BytesIO()
    with h5py.File(made, "w") as file:
        file["layers/dense/vars/0"] = np.arange(6.0).reshape(2, 3)
        file["layers/dense/vars"].attrs["name"] = "dense"
        file.create_dataset(
            "layers/dense/vars/1", data=np.arange(60), compression="gzip", chunks=(25,)
        )
        file["text"] = np.array([b"a", b"bc"], object)
        file["flags"] = np.array([True, False])
        file.attrs["layers"] = ["a", "b"]
    return made.getvalue()


def test_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    for options in ({"chunks": (1 << 20,)}, {"chunks": (1 << 20,), "compression": "gzip"}, {}):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (1 << 50,), "f8", **options)  # declared, never written
        with pytest.raises(CorruptError, match=r"never written|more chunks|missing"):
            ckptfmt.open_foreign(path)
    with h5py.File(path, "w") as file:
        file["a/b"] = 1
        file["a/loop"] = file["a"]
    with pytest.raises(CorruptError, match="within itself"):
        ckptfmt.open_foreign(path)


def test_a_filtered_chunk_beyond_the_memory_allowed_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4096.0), chunks=(4096,), compression="gzip")
        file.create_dataset("raw", data=np.arange(4096.0), chunks=(4096,))
    monkeypatch.setattr(mapping, "WHOLE_CHUNKS_NBYTES_FREE", 1)
    refused = pytest.raises(UnsupportedError, match=r"decoded whole .* CKPTFMT_STAGING_BYTES")
    with ckptfmt.configure(staging_nbytes=65_535), refused:
        ckptfmt.open_foreign(tmp_path / "x.h5")
    with ckptfmt.configure(staging_nbytes=65_536):
        found = ckptfmt.open_foreign(tmp_path / "x.h5").load()
    assert found["x"].tolist() == found["raw"].tolist() == list(range(4096))


def test_a_chunk_that_inflates_beyond_its_shape_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        item = file.create_dataset("x", (8,), "u1", chunks=(8,), compression="gzip")
        item.id.write_direct_chunk((0,), zlib.compress(bytes(1 << 20)))
    with pytest.raises(CorruptError, match="longer than its shape"):
        ckptfmt.convert(path, tmp_path / "s", durable=False)
    assert not ckptfmt.Store(tmp_path / "s").names()


def test_datasets_over_the_same_bytes_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["a"], file["b"] = np.arange(50.0), np.arange(50.0)
        first, second = file["a"].id.get_offset(), file["b"].id.get_offset()
    data = path.read_bytes()
    path.write_bytes(data.replace(second.to_bytes(8, "little"), first.to_bytes(8, "little")))
    with pytest.raises(CorruptError, match="overlap"):
        ckptfmt.open_foreign(path)


def test_mutated_files_give_values_or_a_typed_error(
    hostile: Any, mutations: Callable[[bytes, int, int], list[bytes]], seed: int
) -> None:
    good = sample()
    assert hostile("keras", ".h5", mutations(good, seed, 240)) > 20
    # And where it hurts: addresses and lengths of structures.
    rng = random.Random(seed)
    marks = [good.find(mark) for mark in (b"TREE", b"HEAP", b"SNOD", b"GCOL")]
    files = []
    for number in range(200):
        spoiled = bytearray(good)
        at = max(marks[number % 4] + rng.randrange(64), 8)
        spoiled[at : at + 1 + number % 8] = rng.randbytes(1 + number % 8)
        files.append(bytes(spoiled))
    assert hostile("keras", ".h5", files) > 60


@pytest.mark.slow
def test_thousands_of_mutated_files_give_values_or_a_typed_error(
    hostile: Any, mutations: Callable[[bytes, int, int], list[bytes]], seed: int
) -> None:
    assert hostile("keras", ".h5", mutations(sample(), seed, 6000)) > 500


def test_read_foreign_says_which_file(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(sample()[:900])
    with pytest.raises(CorruptError, match=r"x\.h5.*truncated|truncated.*x\.h5"):
        read_foreign(tmp_path / "x.h5")


def test_structures_that_many_objects_share_cost_no_more_than_the_file(tmp_path: Path) -> None:
    """Each of 400 groups claims one heap of names of 1 MB: 400 MB of copies otherwise."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["pad"] = np.zeros(1 << 20, np.uint8)
        for number in range(400):
            file.create_group(f"g{number}")
    data = bytearray(path.read_bytes())
    at = data.find(b"HEAP", data.find(b"HEAP") + 1)  # the root's own stays
    while at >= 0:
        data[at + 8 : at + 16] = (1 << 20).to_bytes(8, "little")
        data[at + 24 : at + 32] = (0).to_bytes(8, "little")
        at = data.find(b"HEAP", at + 1)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="over and over"):
        ckptfmt.open_foreign(path)
