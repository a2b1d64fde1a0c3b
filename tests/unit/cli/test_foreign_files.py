"""`show`, `cat`, `diff` and `ls` on files and folders of other formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt

Run = Callable[..., Any]
IMPORT = Path(__file__).parents[2] / "compat/import"


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[Path, str]]:
    """(path, name of a tensor [0, 1, 2]) in every format that can be written here."""
    tree = {"m": {"w": np.arange(3, dtype=np.float32)}}
    ckptfmt.save(tree, tmp_path / "store", durable=False)
    made = []
    for name, leaf in (("a.pt", "m/w"), ("a.safetensors", "m/w")):
        ckptfmt.export(tmp_path / "store", tmp_path / name)
        made.append((tmp_path / name, leaf))
    (tmp_path / "hf").mkdir()
    ckptfmt.export(tmp_path / "store", tmp_path / "hf/model-00001-of-00001.safetensors", root="m")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    np.savez(tmp_path / "a.npz", w=tree["m"]["w"])
    return [*made, (tmp_path / "hf", "w"), (tmp_path / "a.npz", "w")]


def test_a_foreign_file_is_shown_read_and_compared_in_place(
    run: Run, files: list[tuple[Path, str]]
) -> None:
    for path, leaf in files:
        shown = run("show", path, "--json")
        assert [row["name"] for row in shown.json["leaves"]] == [leaf], path
        assert run("cat", path, f"{leaf}[1:]").out.strip() == "[1., 2.]"
        assert run("diff", path, path, "--read").code == 0
        missing = run("cat", path, leaf + "w")
        assert (missing.code, f"did you mean {leaf!r}" in missing.err) == (10, True)
        listed = run("ls", path)
        assert listed.code == 10
        assert f'see "ckptfmt show {path}"' in listed.err


def test_a_file_of_no_known_format_is_unsupported_and_a_folder_without_a_store_is_not_found(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    done = run("show", tmp_path / "notes.txt")
    assert done.code == 12
    assert "neither a store nor of a format" in done.err
    assert "safetensors" in done.err
    assert run("show", tmp_path).code == 10
    assert run("show", tmp_path / "none.pt").code == 10


def test_every_fixture_of_every_format_is_shown_on_80_columns(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = ("*.npz", "*.npy", "*.gguf", "*.msgpack", "*.safetensors")
    files = [path for pattern in formats for path in sorted(IMPORT.glob(f"*/{pattern}"))]
    whole = [path for path in files if not path.name.startswith(("split-00002", "split-00003"))]
    assert len(whole) >= 8
    monkeypatch.setenv("COLUMNS", "80")
    for path in whole:
        done = run("show", path)
        assert done.code == 0, f"{path}: {done.err}"
        assert "np." not in done.out, path
        names = [row["name"] for row in run("show", path, "--json").json["leaves"]]
        for name in names[::5]:
            done = run("cat", path, name)
            assert done.code == 0, f"{path}: {name}: {done.err}"
            assert max(map(len, done.out.splitlines())) <= 80, f"{path}: {name}"
        assert run("cat", path, names[0], "--json").json["name"] == names[0]
        assert run("diff", path, path, "--read").code == 0, path


def test_blocks_of_quantized_values_are_hexadecimal_and_whole_if_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("cat", IMPORT / "gguf/every-type.gguf", "tensors/t.Q4_K")
    cut, whole = run(*words).out, run(*words, "--all").out
    values = run(*words, "--json").json["values"]
    assert all(value[0][:60] in cut and value[0] in whole for value in values)
    assert "…" in cut
    assert "…" not in whole


def test_a_file_that_was_cut_off_is_no_unknown_one(run: Run, files: list[tuple[Path, str]]) -> None:
    path = files[0][0]
    path.write_bytes(path.read_bytes()[:-30])
    for words in (["show", path], ["cat", path, "m/w"], ["convert", path, path.parent / "s"]):
        found = run(*words)
        assert found.code == 4
        assert "cut off" in found.err
