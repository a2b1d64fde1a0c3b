"""Formats are found by content; plugins add rows; what is missing is told."""

from __future__ import annotations

import os
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ckptfmt import MissingExtraError, UnsupportedError, UsageError
from ckptfmt.foreign import ForeignTree, Importer, detect_format, importer_names, registry
from ckptfmt.foreign.registry import ImporterRow, get_importer, read_foreign

FILES = Path(__file__).resolve().parents[2] / "compat/import/safetensors"


def test_content_decides_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes((FILES / "every-dtype.safetensors").read_bytes())
    assert detect_format(str(tmp_path / "weights.bin")) == "safetensors"
    (tmp_path / "fake.safetensors").write_bytes(b"no header at all")
    assert detect_format(str(tmp_path / "fake.safetensors")) is None
    assert detect_format(str(FILES / "sharded")) == "safetensors"
    assert detect_format(str(tmp_path)) == "safetensors"  # a file of that suffix is in it


@pytest.mark.parametrize("url", ["file:///tmp/x.pt", "memory://x", "https://h/x.safetensors"])
def test_a_url_is_no_file_of_another_format(url: str) -> None:
    with pytest.raises(UnsupportedError, match=r"from this machine only.*copy it here"):
        read_foreign(url)


def test_every_row_can_be_loaded() -> None:
    for name in importer_names():
        assert isinstance(get_importer(name), Importer)


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="expected one of safetensors"):
        get_importer("nope")


def test_what_no_importer_knows_is_described(tmp_path: Path) -> None:
    folder, empty, text = tmp_path / "folder", tmp_path / "empty", tmp_path / "text"
    packed, broken, pipe = tmp_path / "packed", tmp_path / "broken", tmp_path / "pipe"
    folder.mkdir()
    empty.write_bytes(b"")
    text.write_bytes(b"#!/bin/sh\necho a long program")
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(9):
            archive.writestr(f"doc/{number}.xml", b"x")
    broken.write_bytes(packed.read_bytes()[:-30])
    os.mkfifo(pipe)
    for path, found in (
        (folder, "found a folder with nothing in it"),
        (empty, "found an empty file"),
        (text, r"found a file of 29 bytes that begins with b'#!/bin/sh\necho a'"),
        (
            packed,
            "found a ZIP archive with doc/0.xml, doc/1.xml, doc/2.xml, doc/3.xml, doc/4.xml, doc/5.xml and 3 more",
        ),
        (broken, "found a ZIP archive: no end of a ZIP directory: cut off?"),
        (pipe, "found no regular file"),
    ):
        with pytest.raises(UnsupportedError, match="no importer recognises this") as caught:
            read_foreign(path)
        for words in (found, "expected one of safetensors, tensorbundle, pytorch,", "--from"):
            assert words in str(caught.value)
    (folder / "a.txt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"found a folder with a\.txt"):
        read_foreign(folder)


def test_a_missing_dependency_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ImporterRow("ckptfmt.foreign.not_there:X", "h5", (".h5",))
    monkeypatch.setitem(registry.IMPORTERS, "h5", row)
    with pytest.raises(MissingExtraError, match=r'pip install "ckptfmt\[h5\]"'):
        get_importer("h5")


class Always(Importer):
    def detect(self, path: str) -> bool:
        return path.endswith(".always")

    def read(self, path: str) -> ForeignTree:
        return ForeignTree("always", {})


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> str:
    """An entry point of another package, whose class is the one above."""

    class Point:
        Always = Always

    def entry_points(group: str) -> list[EntryPoint]:
        assert group == "ckptfmt.converters"
        return [EntryPoint("always", "some_plugin:Always", group)]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.setitem(sys.modules, "some_plugin", Point)
    return "always"


def test_an_entry_point_adds_a_format(plugin: str) -> None:
    assert importer_names() == [*registry.IMPORTERS, plugin]
    assert isinstance(get_importer(plugin), Always)
    assert detect_format("x.always") == plugin
