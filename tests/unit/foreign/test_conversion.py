"""A foreign file becomes a checkpoint bit for bit, or an error and no checkpoint."""

from __future__ import annotations

import itertools
import json
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import CorruptError, ExistsError, UnsupportedError
from ckptfmt.events import Event
from ckptfmt.foreign import conversion

FILES = Path(__file__).resolve().parents[2] / "compat/import/safetensors"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write({name: (dtype, shape, bytes)}) -> path of a safetensors file."""

    def write(
        tensors: dict[str, tuple[str, list[int], bytes]], name: str = "x.safetensors"
    ) -> Path:
        header: dict[str, Any] = {}
        data = b""
        for key, (dtype, shape, raw) in tensors.items():
            offsets = [len(data), len(data) + len(raw)]
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += raw
        text = json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    return write


def test_every_dtype_comes_through_bit_for_bit(tmp_path: Path) -> None:
    expected = json.loads((FILES / "expected.json").read_text())
    report = ckptfmt.convert(
        FILES / "every-dtype.safetensors", tmp_path / "s", step=3, durable=False
    )
    assert report.format == "safetensors"
    assert report.info is not None
    assert report.info.step == 3
    assert report.info.metadata == expected["metadata"]
    assert len(report.loaded) == len(expected["tensors"])
    assert report.renamed == {"a/slash~tilde": "a~1slash~0tilde"}
    assert not report.skipped
    loaded = ckptfmt.load(tmp_path / "s")
    assert loaded.keys() == expected["tensors"].keys()
    for name, want in expected["tensors"].items():
        array = loaded[name]
        assert (array.dtype.name, list(array.shape)) == (want["dtype"], want["shape"])
        raw = bytes.fromhex(want["hex"])
        if want["dtype"] == "float4_e2m1fn":
            low_first = [half for byte in raw for half in (byte & 15, byte >> 4)]
            assert array.view(np.uint8).ravel().tolist() == low_first
        else:
            assert array.tobytes() == raw


def test_the_callers_metadata_wins_and_the_files_stays(tmp_path: Path) -> None:
    report = ckptfmt.convert(
        FILES / "every-dtype.safetensors",
        tmp_path / "s",
        metadata={"format": "np", "x": 1},
        durable=False,
    )
    assert report.info is not None
    assert report.info.metadata["format"] == "np"
    assert report.info.metadata["x"] == 1
    assert "note" in report.info.metadata


def test_a_folder_of_shards_is_carried_and_stale_files_are_listed(tmp_path: Path) -> None:
    report = ckptfmt.convert(FILES / "sharded", tmp_path / "s", codec="zstd", durable=False)
    assert len(report.loaded) == 6
    loaded = ckptfmt.load(tmp_path / "s")
    assert (loaded["layer.2.b"] == 2.0).all()


def test_what_cannot_be_carried_is_refused_before_anything_is_written(
    write: Write, tmp_path: Path
) -> None:
    path = write({"ok": ("U8", [1], b"\1"), "bad": ("F6_E3M2", [4], bytes(3))})
    with pytest.raises(UnsupportedError, match="tensor 'bad'"):
        ckptfmt.convert(path, tmp_path / "s", durable=False)
    assert not (tmp_path / "s").exists()


def test_a_conversion_says_how_far_it_is(write: Write, tmp_path: Path) -> None:
    path = write({str(n): ("U8", [1000], bytes([n]) * 1000) for n in range(20)})
    events: list[Event] = []
    ckptfmt.convert(path, tmp_path / "s", durable=False, progress=events.append)
    checks = [event for event in events if event.kind == "check"]
    assert checks[-1].nbytes == checks[-1].total_nbytes == 20_000
    assert len({event.kind for event in events}) > 1


def test_a_source_that_changes_meanwhile_costs_the_checkpoint(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write({"w": ("U8", [4], b"abcd")})
    ckptfmt.save({"old": 1}, tmp_path / "s", step=1, durable=False)
    compare = conversion._Comparison.before_commit

    def change_and_compare(*args: Any) -> None:
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"X")
        compare(*args)

    monkeypatch.setattr(conversion._Comparison, "before_commit", change_and_compare)
    with pytest.raises(CorruptError, match="source changed while it was converted"):
        ckptfmt.convert(path, tmp_path / "s", step=2, durable=False)
    assert ckptfmt.Store(tmp_path / "s").steps() == [1]


def test_what_a_changed_source_would_have_replaced_stays(write: Write, tmp_path: Path) -> None:
    path = write({"w": ("U8", [4], b"abcd")})
    ckptfmt.save({"old": 1}, tmp_path / "s", step=1, durable=False)

    other = itertools.count(1)

    def change(event: Event) -> None:
        if event.kind != "check":
            with open(path, "r+b") as file:
                file.seek(-1, 2)
                file.write(bytes([next(other)]))

    with pytest.raises(CorruptError, match="nothing was committed"):
        ckptfmt.convert(
            path, tmp_path / "s", step=1, if_exists="replace", durable=False, progress=change
        )
    assert ckptfmt.load(tmp_path / "s", step=1) == {"old": 1}


def test_converting_again_succeeds_and_another_file_under_the_name_is_refused(
    write: Write, tmp_path: Path
) -> None:
    one, two = write({"w": ("U8", [1], b"a")}, "1.safetensors"), write({"w": ("U8", [1], b"b")})
    first = ckptfmt.convert(one, tmp_path / "s", name="base", durable=False).info
    again = ckptfmt.convert(one, tmp_path / "s", name="base", durable=False).info
    assert first is not None
    assert again is not None
    assert again.digest == first.digest
    with pytest.raises(ExistsError):
        ckptfmt.convert(two, tmp_path / "s", name="base", durable=False)
    with pytest.raises(ExistsError, match="was kept holds another tree"):
        ckptfmt.convert(two, tmp_path / "s", name="base", if_exists="keep", durable=False)
    assert ckptfmt.load(tmp_path / "s", at="base")["w"].tobytes() == b"a"
    kept = ckptfmt.convert(one, tmp_path / "s", name="base", if_exists="keep", durable=False)
    assert kept.loaded == ["w"]


def test_a_conversion_never_holds_the_file_in_memory(write: Write, tmp_path: Path) -> None:
    block = np.random.default_rng(0).bytes(8 << 20)
    path = write({str(n): ("U8", [8 << 20], block[n:] + block[:n]) for n in range(12)})
    del block
    before = set(threading.enumerate())
    tracemalloc.start()
    ckptfmt.convert(path, tmp_path / "s", durable=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20
    assert set(threading.enumerate()) <= before


def test_a_file_does_not_speak_for_the_format(tmp_path: Path) -> None:
    """A hub file whose __metadata__ says "quarantined" is carried, and says it under another key."""
    about = {"ckptfmt.quarantine": "no", "format": "pt"}
    header: dict[str, Any] = {"__metadata__": about}
    header["w"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\x07")
    info = ckptfmt.convert(path, tmp_path / "s", durable=False).info
    assert info is not None
    assert info.metadata == {"source.ckptfmt.quarantine": "no", "format": "pt"}
