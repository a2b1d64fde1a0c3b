"""ZIP archives from strangers: what the directory claims is checked before it is believed."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfmt import CorruptError, UnsupportedError
from ckptfmt.foreign.inflating import Inflater
from ckptfmt.foreign.zip_archive import ZipArchive

Pack = Callable[..., Path]


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """pack({name: bytes}, deflated=False) -> path."""

    def pack(entries: dict[str, bytes], *, deflated: bool = False) -> Path:
        path = tmp_path / "x.zip"
        method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        return path

    return pack


def opened(path: Path) -> ZipArchive:
    return ZipArchive(str(path), path.name, "test")


def patched(path: Path, old: bytes, new: bytes, *, last: bool = True) -> Path:
    data = path.read_bytes()
    at = data.rfind(old) if last else data.find(old)
    assert at >= 0
    assert len(old) == len(new)
    path.write_bytes(data[:at] + new + data[at + len(new) :])
    return path


@pytest.mark.parametrize("deflated", [False, True])
def test_entries_are_read(pack: Pack, deflated: bool) -> None:
    entries = {"a/b": b"x" * 1000, "c": b"", "é": b"1"}
    archive = opened(pack(entries, deflated=deflated))
    assert {name: archive.read(entry) for name, entry in archive.entries.items()} == entries


def test_zip64_sizes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive, archive.open("a", "w", force_zip64=True) as file:
        file.write(b"abc")
    made = opened(path)
    assert made.read(made.entries["a"]) == b"abc"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "c:/x", "a\\x"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("?" * len(name))
        info.filename = name
        archive.writestr(info, b"x")
    with pytest.raises(CorruptError, match="leads out of the archive"):
        opened(path)


def test_a_name_with_a_nul_is_refused(pack: Pack) -> None:
    path = pack({"abc": b"x"})
    patched(patched(path, b"abc", b"a\0c"), b"abc", b"a\0c", last=False)
    with pytest.raises(CorruptError, match="leads out of the archive"):
        opened(path)


def test_a_name_that_stands_twice_is_refused(pack: Pack) -> None:
    path = pack({"abc": b"x", "abd": b"y"})
    with pytest.raises(CorruptError, match="a name stands twice"):
        opened(patched(path, b"abd", b"abc"))


def test_a_local_header_that_says_otherwise_is_refused(pack: Pack) -> None:
    archive = opened(patched(pack({"abc": b"x"}), b"abc", b"abd", last=False))
    with pytest.raises(CorruptError, match="a local header differs"):
        archive.read(archive.entries["abc"])


def test_entries_that_overlap_are_refused(pack: Pack) -> None:
    path = pack({"a": b"x" * 100, "b": b"y" * 100})
    data = bytearray(path.read_bytes())
    second = data.rfind(b"PK\1\2")
    struct.pack_into("<L", data, second + 42, 0)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="two entries overlap"):
        opened(path)


def test_a_bomb_is_refused(pack: Pack) -> None:
    path = pack({"a": bytes(50 << 20)}, deflated=True)
    archive = opened(path)
    with pytest.raises(CorruptError, match="an entry is too long"):
        archive.read(archive.entries["a"], 1 << 20)
    data = bytearray(path.read_bytes())
    struct.pack_into("<L", data, data.rfind(b"PK\1\2") + 24, 4_000_000_000)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="impossible size"):
        opened(path)


def test_a_deflated_entry_is_as_long_as_it_says(pack: Pack) -> None:
    path = pack({"a": b"x" * 5000}, deflated=True)
    for size in (4999, 5001):
        data = bytearray(path.read_bytes())
        struct.pack_into("<L", data, data.rfind(b"PK\1\2") + 24, size)
        struct.pack_into("<L", data, 22, size)
        (path.parent / "y.zip").write_bytes(data)
        archive = opened(path.parent / "y.zip")
        with pytest.raises(CorruptError, match="not what its header says"):
            archive.read(archive.entries["a"])


def test_a_damaged_deflate_stream_is_corrupt(pack: Pack) -> None:
    path = pack({"a": bytes(range(256)) * 20}, deflated=True)
    data = bytearray(path.read_bytes())
    data[40:60] = b"\xff" * 20
    path.write_bytes(data)
    archive = opened(path)
    with pytest.raises(CorruptError, match="deflated entry"):
        archive.read(archive.entries["a"])


def test_encryption_and_other_methods_are_unsupported(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "y.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a", b"x" * 100)
    with pytest.raises(UnsupportedError, match="method 14"):
        opened(path)
    data = bytearray(pack({"a": b"x"}).read_bytes())
    data[data.rfind(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match="encrypted"):
        opened(path)


def test_a_file_that_is_cut_off_or_no_archive_is_corrupt(pack: Pack, tmp_path: Path) -> None:
    data = pack({"a": b"x" * 100, "b": b"y"}).read_bytes()
    path = tmp_path / "cut.zip"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptError):
            opened(path)


def test_a_directory_of_too_many_entries_is_refused(pack: Pack) -> None:
    path = pack({"a": b"x"})
    data = bytearray(path.read_bytes())
    struct.pack_into("<HH", data, len(data) - 14, 60000, 60000)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="too many entries"):
        opened(path)


@pytest.mark.parametrize("nbytes", [0, 1000, 4 << 20])
def test_the_checksum_is_compared_when_a_stream_has_given_all_its_bytes(
    pack: Pack, nbytes: int
) -> None:
    """Also where they all come before the stream's end is read."""
    archive = opened(pack({"a": bytes(nbytes)}, deflated=True))
    entry = archive.entries["a"]
    assert Inflater(archive, entry).read(0, nbytes).size == nbytes
    with pytest.raises(CorruptError, match="not what its header says"):
        Inflater(archive, replace(entry, crc=entry.crc ^ 1)).read(0, nbytes)
