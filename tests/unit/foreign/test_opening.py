"""A foreign file as a lazy mapping: it looks like a checkpoint and feeds a restore."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, MismatchError, NotFoundError, UnsupportedError, UsageError

FILES = Path(__file__).resolve().parents[2] / "compat/import/safetensors"


def test_it_is_a_mapping_of_lazy_tensors() -> None:
    with ckptfmt.open_foreign(FILES / "sharded") as foreign:
        assert len(foreign) == 6
        assert list(foreign) == [f"layer.{n}.{key}" for n in range(3) for key in "ab"]
        tensor = foreign["layer.1.a"]
        assert (tensor.shape, tensor.dtype.name, tensor.nbytes) == ((2, 2), "float32", 16)
        assert (tensor.dtype_name, tensor.codec, tensor.ndim) == ("float32", "raw", 2)
        assert foreign.names("layer.*.b") == ["layer.0.b", "layer.1.b", "layer.2.b"]
        assert foreign.names("nothing") == []
        assert foreign.ties() == []
        assert foreign.info.metadata["format"] == "pt"
        assert foreign.info.tensors == 6


def test_the_dtype_is_known_without_reading() -> None:
    foreign = ckptfmt.open_foreign(FILES / "every-dtype.safetensors")
    for name, tensor in foreign.items():
        assert tensor.dtype == tensor.read().dtype, name


def test_what_is_read_is_the_callers_own() -> None:
    foreign = ckptfmt.open_foreign(FILES / "sharded")
    array = foreign["layer.2.a"].read()
    array[:] = 7
    assert (foreign["layer.2.a"].read() == 2.0).all()
    assert (np.asarray(foreign["layer.2.a"]) == 2.0).all()
    assert foreign["layer.2.a"].read(np.s_[0, 1:]).tolist() == [2.0]
    assert foreign.read({"layer.2.b": np.s_[0]})["layer.2.b"].tolist() == [2.0, 2.0]
    out = np.zeros((2, 2), np.float32)
    assert foreign["layer.1.a"].read(out=out) is out
    assert (out == 1.0).all()
    with pytest.raises(UsageError, match="out does not fit"):
        foreign["layer.1.a"].read(out=np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        foreign["layer.1.a"].mmap()[:] = 1


def test_load_gives_the_tree_or_part_of_it() -> None:
    foreign = ckptfmt.open_foreign(FILES / "every-dtype.safetensors")
    assert "a/slash~tilde" in foreign.load()
    assert foreign.load(names="scalar").keys() == {"scalar"}
    assert np.signbit(foreign.load(names="scalar")["scalar"])
    with pytest.raises(NotFoundError, match="scalar"):
        foreign.load(names="scalor")


def test_it_is_a_source_for_restore_and_plan() -> None:
    target = {f"layer.{n}.{key}": np.full((2, 2), -1, np.float32) for n in range(3) for key in "ab"}
    foreign = ckptfmt.open_foreign(FILES / "sharded")
    assert ckptfmt.plan(target, foreign).clean
    report = ckptfmt.restore(target, foreign)
    assert len(report.matched) == 6
    assert (target["layer.2.b"] == 2.0).all()

    part = {"w": np.zeros((2, 2), np.float32)}
    ckptfmt.restore(part, foreign, names="layer.1.a", rename={"layer.1.a": "w"})
    assert (part["w"] == 1.0).all()

    wrong = {"layer.1.a": np.zeros((2, 3), np.float32)}
    with pytest.raises(MismatchError):
        ckptfmt.restore(wrong, foreign, names="layer.1.a")
    assert not wrong["layer.1.a"].any()


def test_it_is_a_tree_for_save(tmp_path: Path) -> None:
    foreign = ckptfmt.open_foreign(FILES / "sharded")
    ckptfmt.save({"base": foreign.tree(), "step": 1}, tmp_path / "s", durable=False)
    assert (ckptfmt.load(tmp_path / "s")["base"]["layer.1.a"] == 1.0).all()


def test_a_name_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(NotFoundError, match=r"layer\.1\.a"):
        ckptfmt.open_foreign(FILES / "sharded")["layer.1.A"]


def test_what_is_no_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        ckptfmt.open_foreign(tmp_path / "none")
    (tmp_path / "x").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(UnsupportedError, match="no importer recognises this"):
        ckptfmt.open_foreign(tmp_path / "x")


@pytest.mark.parametrize("name", ["x.pt", "x.npz", "x.keras"])
def test_a_file_that_was_cut_off_says_so(tmp_path: Path, name: str) -> None:
    """Nothing in it says what it is; its suffix does."""
    with zipfile.ZipFile(tmp_path / "whole", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    (tmp_path / name).write_bytes((tmp_path / "whole").read_bytes()[:-30])
    with pytest.raises(CorruptError, match="cut off"):
        ckptfmt.open_foreign(tmp_path / name)


def test_verify_finds_what_cannot_be_valid(tmp_path: Path) -> None:
    assert ckptfmt.open_foreign(FILES / "every-dtype.safetensors").verify().ok
    data = bytearray((FILES / "every-dtype.safetensors").read_bytes())
    data[-3:] = b"\1\2\1"
    (tmp_path / "x.safetensors").write_bytes(data)
    report = ckptfmt.open_foreign(tmp_path / "x.safetensors").verify()
    assert [damage.tensor for damage in report.problems] == ["every.bool"]
