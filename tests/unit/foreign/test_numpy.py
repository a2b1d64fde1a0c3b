"""NumPy's files: every dtype bit for bit, views where they can be, and no pickle ever."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CheckpointError, CorruptError, UnsupportedError
from ckptfmt.foreign import detect_format, read_foreign, streaming

FILES = Path(__file__).parents[2] / "compat/import/numpy"


@pytest.mark.parametrize("stem", ["every-dtype", "deflated"])
def test_every_dtype_is_read_as_numpy_reads_it(stem: str, same_as_expected: Any) -> None:
    assert detect_format(str(FILES / f"{stem}.npz")) == "numpy"
    same_as_expected(FILES / f"{stem}.npz", FILES / f"expected-{stem}.json")


def test_what_is_not_carried_is_named() -> None:
    with pytest.raises(UnsupportedError, match="2 items cannot be carried") as caught:
        ckptfmt.convert(FILES / "deflated.npz", "memory://npz")
    assert "objects: an array of Python objects, which would be a pickle" in str(caught.value)
    assert "rows: a structured array" in str(caught.value)


def test_a_single_array_is_the_root(tmp_path: Path) -> None:
    for name in ("fortran.npy", "version-3.npy"):
        want = np.load(FILES / name)
        foreign = ckptfmt.open_foreign(FILES / name)
        assert list(foreign) == [""]
        assert foreign.load().tobytes() == want.tobytes()
        ckptfmt.convert(FILES / name, tmp_path / name, durable=False)
        found = ckptfmt.load(tmp_path / name)
        assert (found.dtype, found.tobytes()) == (want.dtype, want.tobytes())


def test_stored_arrays_are_views_of_the_file() -> None:
    tree = read_foreign(FILES / "every-dtype.npz")
    array = tree.tensors["every~1int32"].fetch()
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_objects_alone_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([print], object))
    with pytest.raises(UnsupportedError, match="would be a pickle") as caught:
        ckptfmt.open_foreign(tmp_path / "o.npy")
    assert caught.value.kind == "unsupported-numpy-dtype"
    np.save(tmp_path / "l.npy", np.zeros(2, np.longdouble))
    with pytest.raises(UnsupportedError, match="no checkpoint has"):
        ckptfmt.open_foreign(tmp_path / "l.npy")


def test_deflated_and_fortran_arrays_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    monkeypatch.setattr(streaming, "_PIECE_NBYTES", 1 << 10)
    rng = np.random.default_rng(0)
    arrays = {
        "c": rng.integers(0, 9, (70, 50), np.int32),
        "f": np.asfortranarray(rng.integers(0, 9, (70, 50), np.int32)),
        "be": rng.integers(0, 9, (70, 50)).astype(">i4"),
    }
    for save, name in ((np.savez_compressed, "d.npz"), (np.savez, "s.npz")):
        save(tmp_path / name, **arrays)  # type: ignore[arg-type]
        ckptfmt.convert(tmp_path / name, tmp_path / f"{name}-s", durable=False)
        found = ckptfmt.load(tmp_path / f"{name}-s")
        for key, array in arrays.items():
            assert np.array_equal(found[key], array), (name, key)


def npy(text: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """A file with any header."""
    head = text.encode()
    width = "<H" if version[0] == 1 else "<I"
    return b"\x93NUMPY" + version + struct.pack(width, len(head)) + head + data


def header(descr: str = "'<f4'", order: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


def test_a_header_of_our_own_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(header(shape="(2L,)"), b"\0\0\x80\x3f" * 2))
    assert ckptfmt.open_foreign(tmp_path / "a.npy").load().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (npy(header(), b"\0" * 7), "truncated"),
        (npy(header(), b"\0" * 9), "truncated"),
        (npy(header(shape="(1 << 62,)")), "parsed"),
        (npy(header(shape="(-2,)")), "not a shape"),
        (npy(header(shape="(True,)")), "not a shape"),
        (npy(header(shape="[2]")), "other types"),
        (npy(header(shape=str((1,) * 65))), "not a shape"),
        (npy(header(shape=f"({1 << 61},)")), "without end"),
        (npy(header(shape=f"({1 << 61}, 0)")), "without end"),
        (npy(header(order="1")), "other types"),
        (npy(header("'<f16'")), "no checkpoint"),
        (npy(header("'|O'")), "pickle"),
        (npy(header("[('a', '<f4')]")), "structured"),
        (npy(header("'<M8[xx]'")), "no checkpoint"),
        (npy(header("'<M8[ns'")), "no checkpoint"),
        (npy(header("__import__('os')")), "parsed"),
        (npy("(" * 9000), "parsed"),
        (npy("{'descr': '<f4'}"), "other keys"),
        (npy(""), "parsed"),
        (b"\x93NUMPY\1\0\xff\xff{", "too long"),
        (b"\x93NUMPY\1", "no NumPy array"),
        (npy(header(), version=b"\4\0"), "unknown version"),
        (npy(header("'|b1'"), b"\1\2"), "neither 0 nor 1"),
        (npy(header("'<U1'"), b"\xff" * 8), "character"),
    ],
)
def test_a_header_that_does_not_hold_is_refused(data: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises((CorruptError, UnsupportedError), match=text):
        ckptfmt.convert(tmp_path / "x.npy", tmp_path / "s", durable=False)
    assert not (tmp_path / "s").exists()


def archive(*entries: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries:
            file.writestr(name, data)
    return made.getvalue()


def test_a_bomb_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    """The directory claims what no deflate stream can hold; or the stream ends elsewhere."""
    bomb = npy(header(shape="(1048576,)"), bytes(4 << 20))
    good = archive(("a.npy", bomb))
    claimed = good.replace(struct.pack("<I", len(bomb)), struct.pack("<I", 1 << 30))
    assert claimed != good
    (tmp_path / "x.npz").write_bytes(claimed)
    with pytest.raises(CorruptError, match="impossible size"):
        read_foreign(tmp_path / "x.npz", source_format="numpy")
    shorter = good.replace(struct.pack("<I", len(bomb)), struct.pack("<I", len(bomb) - 4))
    (tmp_path / "x.npz").write_bytes(shorter)
    with pytest.raises(CorruptError):
        ckptfmt.convert(tmp_path / "x.npz", tmp_path / "s", durable=False)
    assert not ckptfmt.Store(tmp_path / "s").names()


def test_damage_in_the_middle_of_a_stream_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = bytearray(archive(("a.npy", npy(header(shape="(2000,)"), rng.bytes(8000)))))
    data[4000] ^= 16
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(CorruptError, match="deflated entry"):
        ckptfmt.convert(tmp_path / "x.npz", tmp_path / "s", durable=False)


def test_damage_in_a_stored_array_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    """As `numpy.load` finds it, though the array is a view of the mapped file."""
    np.savez(tmp_path / "x.npz", a=np.arange(5000), b=np.arange(3), c=np.ones(4000, bool))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    for text in (b"\x00\x01\x00\x00\x00\x00", b"\1" * 100):
        data[data.index(text) + 1] ^= 4 if text[0] == 0 else 1
    (tmp_path / "x.npz").write_bytes(data)
    found = ckptfmt.open_foreign(tmp_path / "x.npz")
    assert found["b"].read().tolist() == [0, 1, 2]
    with np.load(tmp_path / "x.npz") as numpys:
        for name in ("a", "c"):
            with pytest.raises(zipfile.BadZipFile, match="CRC"):
                numpys[name]
            with pytest.raises(CorruptError, match=f"an entry is damaged.*{name}.npy.*CRC-32"):
                found[name].read()
            with pytest.raises(CorruptError, match="CRC-32"):  # a part, too
                found[name].read(np.s_[:2])
    with pytest.raises(CorruptError, match="CRC-32"):
        ckptfmt.convert(tmp_path / "x.npz", tmp_path / "s", durable=False)
    assert not ckptfmt.Store(tmp_path / "s").names()


def test_names_that_lead_out_are_refused(hostile: Any) -> None:
    good = npy(header(), b"\0" * 8)
    files = [archive((name, good)) for name in ("../a.npy", "/a.npy", "C:/a.npy", "a\\b.npy")]
    assert hostile("numpy", ".npz", files) == 4


def test_mutated_files_give_values_or_a_typed_error(
    hostile: Any, mutations: Callable[[bytes, int, int], list[bytes]], seed: int
) -> None:
    small = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(["x", "yz"])}
    stored, deflated = io.BytesIO(), io.BytesIO()
    np.savez(stored, **small)  # type: ignore[arg-type]
    np.savez_compressed(deflated, **small)  # type: ignore[arg-type]
    single = npy(header(), b"\0" * 8)
    assert hostile("numpy", ".npz", mutations(stored.getvalue(), seed, 80)) > 20
    assert hostile("numpy", ".npz", mutations(deflated.getvalue(), seed, 80)) > 30
    assert hostile("numpy", ".npy", mutations(single, seed, 60)) > 20


def test_other_archives_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(archive(("config.json", b"{}"), ("a.npy", b"")))
    assert detect_format(str(tmp_path / "x.npz")) is None
    with pytest.raises(CheckpointError):
        ckptfmt.open_foreign(tmp_path / "x.npz")
