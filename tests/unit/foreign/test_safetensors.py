"""Single files and folders of shards, read bit for bit, and nothing outside the folder opened."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfmt.errors import CorruptError, NotFoundError, UsageError
from ckptfmt.foreign.base import ForeignTree
from ckptfmt.foreign.safetensors import SafetensorsImporter
from ckptfmt.format import pack_array

FILES = Path(__file__).resolve().parents[2] / "compat/import/safetensors"
INDEX = "model.safetensors.index.json"


def read(path: Path) -> ForeignTree:
    return SafetensorsImporter().read(str(path))


def by_foreign_name(tree: ForeignTree) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor.foreign_name: tensor.fetch() for tensor in tree.tensors.values()}


def test_every_dtype_is_read_bit_for_bit() -> None:
    expected = json.loads((FILES / "expected.json").read_text())
    tree = read(FILES / "every-dtype.safetensors")
    assert tree.metadata == expected["metadata"]
    found = {tensor.foreign_name: tensor for tensor in tree.tensors.values()}
    assert found.keys() == expected["tensors"].keys()
    for name, want in expected["tensors"].items():
        tensor = found[name]
        array = tensor.fetch()
        assert tensor.dtype == array.dtype.name == want["dtype"]
        assert list(tensor.shape) == list(array.shape) == want["shape"]
        assert bytes(pack_array(array)).hex() == want["hex"]
        assert tensor.nbytes == len(want["hex"]) // 2


def test_names_are_one_key_each_escaped_by_the_rules_of_names() -> None:
    tree = read(FILES / "every-dtype.safetensors")
    assert tree.tensors["a~1slash~0tilde"].foreign_name == "a/slash~tilde"
    assert tree.keys["a~1slash~0tilde"] == ("a/slash~tilde",)
    assert "every.float32" in tree.tensors


def test_nothing_is_copied_before_it_is_used() -> None:
    tree = read(FILES / "every-dtype.safetensors")
    array = tree.tensors["every.float32"].fetch()
    assert not array.flags.writeable
    assert not array.flags.owndata


def test_shards_are_joined_as_the_index_says() -> None:
    tree = read(FILES / "sharded")
    assert list(tree.tensors) == [f"layer.{n}.{key}" for n in range(3) for key in "ab"]
    for name, array in by_foreign_name(tree).items():
        assert (array == float(name.split(".")[1])).all()
    assert tree.metadata == {"format": "pt", "index": {"total_size": 96}}
    assert not tree.skipped
    assert not tree.ignored
    assert read(FILES / "sharded" / INDEX).tensors.keys() == tree.tensors.keys()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the sharded folder, to be spoiled."""
    return Path(shutil.copytree(FILES / "sharded", tmp_path / "in" / "model"))


def change_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name, file in changes.items():
        index["weight_map"][name.replace("_", ".")] = file
    (folder / INDEX).write_text(json.dumps(index))


def test_all_missing_shards_are_named_in_one_error(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").unlink()
    (folder / "more/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(NotFoundError) as caught:
        read(folder)
    assert "2 of 3 shards are missing" in str(caught.value)
    assert "model-00001-of-00003.safetensors" in str(caught.value)
    assert "more/model-00002-of-00003.safetensors" in str(caught.value)


def test_a_stale_shard_is_ignored_and_listed(folder: Path) -> None:
    shutil.copy(
        folder / "model-00001-of-00003.safetensors", folder / "model-00004-of-00004.safetensors"
    )
    tree = read(folder)
    assert len(tree.tensors) == 6
    assert tree.ignored == {"model-00004-of-00004.safetensors": f"file that {INDEX} does not name"}


def test_a_tensor_that_its_shard_lacks_is_an_error_that_names_it(folder: Path) -> None:
    change_index(folder, layer_9_z="model-00001-of-00003.safetensors")
    with pytest.raises(CorruptError, match=r"layer\.9\.z' in model-00001") as caught:
        read(folder)
    assert caught.value.kind == "corrupt-safetensors-absent-tensor"


def test_a_tensor_in_another_shard_than_the_index_says_is_an_error(folder: Path) -> None:
    change_index(folder, layer_0_a="model-00003-of-00003.safetensors")
    with pytest.raises(CorruptError, match=r"layer\.0\.a' in model-00003"):
        read(folder)


def test_a_tensor_in_two_shards_is_an_error_that_names_both(folder: Path) -> None:
    shutil.copy(
        folder / "model-00001-of-00003.safetensors", folder / "model-00003-of-00003.safetensors"
    )
    with pytest.raises(CorruptError, match=r"duplicate tensor 'layer\.0\.a'.*00001.* and .*00003"):
        read(folder)


def test_a_tensor_that_the_index_does_not_name_is_listed_not_carried(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["layer.2.b"]
    (folder / INDEX).write_text(json.dumps(index))
    tree = read(folder)
    assert "layer.2.b" not in tree.tensors
    assert tree.skipped.keys() == {"layer.2.b"}


def test_a_truncated_shard_is_an_error_that_names_it(folder: Path) -> None:
    shard = folder / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"truncated.*model-00003-of-00003"):
        read(folder)


def test_a_duplicate_name_in_the_index_is_an_error(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"layer.0.b"', '"layer.0.a"'))
    with pytest.raises(CorruptError, match=r"duplicate name 'layer\.0\.a'"):
        read(folder)


def test_a_deep_index_is_refused(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CorruptError, match="nested too deep"):
        read(folder)


def test_several_files_without_an_index_are_not_guessed_at(folder: Path) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(UsageError, match="does not say what to read"):
        read(folder)


def test_a_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    shutil.copy(FILES / "every-dtype.safetensors", tmp_path / "model.safetensors")
    assert "scalar" in read(tmp_path).tensors


# Paths that lead out (case 28). The audit hook sees every open of the process.

_opened: list[str] = []
_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[0], (str, bytes)):
        _opened.append(os.fsdecode(args[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Paths opened while the test runs. A hook cannot be removed, so it is set once."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _opened.clear()
    yield _opened
    _opened.clear()


@pytest.fixture
def secret(folder: Path) -> Path:
    """A file outside the folder that would make a perfectly good shard."""
    return Path(
        shutil.copy(
            folder / "model-00001-of-00003.safetensors", folder.parent / "secret.safetensors"
        )
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret.safetensors", "step up"),
        ("more/../../secret.safetensors", "step up"),
        ("ABSOLUTE", "absolute path"),
        ("C:/secret.safetensors", "absolute path"),
        ("..\\secret.safetensors", "backslash"),
        ("more\\x.safetensors", "backslash"),
        ("x\0.safetensors", "NUL"),
        ("", "empty part"),
        ("./x.safetensors", "empty part"),
        ("more//x.safetensors", "empty part"),
        (".", "empty part"),
    ],
)
def test_a_file_name_that_leads_out_is_refused_before_anything_but_the_index_is_opened(
    folder: Path, secret: Path, opened: list[str], name: str, words: str
) -> None:
    name = str(secret) if name == "ABSOLUTE" else name
    change_index(folder, layer_0_a=name)
    opened.clear()
    with pytest.raises(CorruptError, match=words) as caught:
        read(folder)
    assert caught.value.kind == "corrupt-foreign-path"
    assert ascii(name)[1:-1] in str(caught.value)
    assert opened == [str((folder / INDEX).resolve())]


@pytest.mark.parametrize("where", ["file", "folder", "index"])
def test_a_link_that_leads_out_is_refused_before_it_is_opened(
    folder: Path, secret: Path, opened: list[str], where: str
) -> None:
    if where == "file":
        shard = folder / "model-00001-of-00003.safetensors"
        shard.unlink()
        shard.symlink_to("../secret.safetensors")
    elif where == "folder":
        shutil.move(folder / "more", folder.parent / "more")
        (folder / "more").symlink_to("../more")
    else:
        shutil.move(folder / INDEX, folder.parent / INDEX)
        (folder / INDEX).symlink_to(f"../{INDEX}")
    opened.clear()
    with pytest.raises(CorruptError, match="link leads out") as caught:
        read(folder)
    assert caught.value.kind == "corrupt-foreign-path"
    assert not [path for path in opened if not path.startswith(str(folder.resolve()))]


def test_a_link_that_stays_inside_is_followed(folder: Path) -> None:
    shard = folder / "model-00001-of-00003.safetensors"
    shard.rename(folder / "more" / "moved.safetensors")
    shard.symlink_to("more/moved.safetensors")
    assert len(read(folder).tensors) == 6


def test_the_links_of_a_hub_cache_are_followed_and_no_others(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123abc"
    shutil.copytree(FILES / "sharded", snapshot)
    blobs = cache / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.rglob("*"))):
        if path.is_file():
            path.rename(blobs / str(number))
            path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    assert len(read(snapshot).tensors) == 6

    shard = snapshot / "model-00001-of-00003.safetensors"
    outside = tmp_path / "outside.safetensors"
    shutil.copy(shard, outside)
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(CorruptError, match="link leads out"):
        read(snapshot)
