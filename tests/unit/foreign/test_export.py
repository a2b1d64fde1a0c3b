"""An export is there whole or not at all, and is what the source held."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import (
    CorruptError,
    Event,
    ExistsError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptfmt.cli import main
from ckptfmt.foreign import EXPORTERS
from ckptfmt.foreign.exporters import tree as tree_module


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A checkpoint of a model, an optimizer's state and a step."""
    rng = np.random.default_rng(0)
    tree = {
        "model": {"a.weight": rng.random((8, 4), np.float32), "a.bias": np.zeros(8, np.float16)},
        "optimizer": {"state": {0: {"m": np.arange(5)}}},
        "epoch": 3,
    }
    ckptfmt.save(tree, tmp_path / "s", step=1, durable=False)
    return tmp_path / "s"


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_suffix_says_which_format_and_the_longest_one_wins(store: Path, tmp_path: Path) -> None:
    report = ckptfmt.export(store, tmp_path / "x.safetensors", names="model")
    assert report.format == "safetensors"
    assert report.info is None
    assert report.renamed == {"model/a.weight": "model.a.weight", "model/a.bias": "model.a.bias"}
    with pytest.raises(UsageError, match="no format to export to") as caught:
        ckptfmt.export(store, tmp_path / "x.dat")
    assert all(name in str(caught.value) for name in EXPORTERS)
    assert "a URL, or has checkpoints, is a store" in str(caught.value)
    with pytest.raises(UsageError, match="no such format"):
        ckptfmt.export(store, tmp_path / "x.pt", target_format="nonsense")


def test_what_is_there_is_kept_unless_it_is_to_be_replaced(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.pt"
    target.write_bytes(b"precious")
    with pytest.raises(ExistsError, match=r"x\.pt"):
        ckptfmt.export(store, target)
    assert target.read_bytes() == b"precious"
    ckptfmt.export(store, target, if_exists="replace")
    assert ckptfmt.open_foreign(target)["epoch"] == 3
    with pytest.raises(UsageError, match="not a legal choice"):
        ckptfmt.export(store, target, if_exists="keep")  # type: ignore[arg-type]


def test_a_folder_of_something_else_is_never_replaced(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("precious")
    with pytest.raises(UsageError, match="no export of this format"):
        ckptfmt.export(store, folder, target_format="safetensors", if_exists="replace")
    assert names_in(folder) == ["chapter.tex"]


def test_a_destination_that_appears_meanwhile_is_not_overwritten(
    store: Path, tmp_path: Path
) -> None:
    target = tmp_path / "x.pt"

    def appear(event: Event) -> None:
        target.write_bytes(b"theirs")

    with pytest.raises(ExistsError):
        ckptfmt.export(store, target, progress=appear)
    assert target.read_bytes() == b"theirs"
    assert names_in(tmp_path) == ["s", "x.pt"]


def test_root_and_names_choose_a_part(store: Path, tmp_path: Path) -> None:
    report = ckptfmt.export(store, tmp_path / "x.safetensors", root="model")
    assert report.loaded == ["a.weight", "a.bias"]
    assert not report.renamed
    assert list(ckptfmt.open_foreign(tmp_path / "x.safetensors")) == ["a.weight", "a.bias"]
    with pytest.raises(NotFoundError, match="no container of this name"):
        ckptfmt.export(store, tmp_path / "y.safetensors", root="mode")
    with pytest.raises(NotFoundError, match="nothing"):
        ckptfmt.export(store, tmp_path / "y.safetensors", names="nothing")
    assert names_in(tmp_path) == ["s", "x.safetensors"]


def test_what_cannot_be_carried_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    ckptfmt.save(
        {"t": np.array(["a"], np.dtypes.StringDType()), "w": np.zeros(2)},
        tmp_path / "s",
        durable=False,
    )
    with pytest.raises(UnsupportedError, match="t: torch has no dtype string") as caught:
        ckptfmt.export(tmp_path / "s", tmp_path / "x.pt")
    assert caught.value.kind == "unsupported-export-partial"
    assert names_in(tmp_path) == ["s"]
    report = ckptfmt.export(tmp_path / "s", tmp_path / "x.pt", allow_partial=True)
    assert report.loaded == ["w"]
    assert report.skipped == {"t": "torch has no dtype string"}
    with pytest.raises(UnsupportedError, match="nothing is left"):
        ckptfmt.export(tmp_path / "s", tmp_path / "y.pt", names="t", allow_partial=True)


def test_a_foreign_file_becomes_another_foreign_file(store: Path, tmp_path: Path) -> None:
    ckptfmt.export(store, tmp_path / "x.pt")
    report = ckptfmt.export(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert "optimizer/state/~3i0/m" in report.loaded
    again = ckptfmt.open_foreign(tmp_path / "x.safetensors").load()
    before = ckptfmt.load(store)
    assert again["epoch"] == 3
    assert again["model"]["a.weight"].tobytes() == before["model"]["a.weight"].tobytes()
    assert again["optimizer"]["state"][0]["m"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="has no steps"):
        ckptfmt.export(tmp_path / "x.pt", tmp_path / "y.pt", step=3)


def test_progress_counts_up_and_an_error_in_it_leaves_nothing(store: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    ckptfmt.export(store, tmp_path / "x.pt", progress=events.append)
    assert {"export", "check"} <= {event.kind for event in events}
    for kind in ("export", "check"):
        last = [event for event in events if event.kind == kind][-1]
        assert last.nbytes == last.total_nbytes > 0

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptfmt.export(store, tmp_path / "y.pt", progress=stop)
    assert names_in(tmp_path) == ["s", "x.pt"]


def test_a_file_that_reads_back_otherwise_is_not_published(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tree_module.raw_bytes

    def wrong(piece: Any) -> Any:
        made = original(piece).copy()
        made[:1] ^= 1
        return made

    monkeypatch.setattr("ckptfmt.foreign.exporters.torch_layout.raw_bytes", wrong)
    with pytest.raises(CorruptError, match=r"reads back otherwise: model/a\.weight"):
        ckptfmt.export(store, tmp_path / "x.pt")
    assert names_in(tmp_path) == ["s"]


def test_damage_in_the_source_is_found_and_nothing_is_published(
    store: Path, tmp_path: Path
) -> None:
    (data,) = (store / "data").iterdir()
    raw = bytearray(data.read_bytes())
    raw[64] ^= 1
    data.chmod(0o644)
    data.write_bytes(raw)
    with pytest.raises(CorruptError, match="chunk digest differs"):
        ckptfmt.export(store, tmp_path / "x.pt")
    assert names_in(tmp_path) == ["s"]


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    tree = {
        "w": rng.random((7, 3, 50)),
        "row": rng.random((1, 3000)),
        "four": rng.integers(0, 16, (5, 7, 6), np.uint8).astype("float4_e2m1fn"),
    }
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    whole = {suffix: tmp_path / f"whole{suffix}" for suffix in (".pt", ".safetensors")}
    for path in whole.values():
        ckptfmt.export(tmp_path / "s", path)
    monkeypatch.setattr(tree_module, "PIECE_NBYTES", 37)
    for suffix, path in whole.items():
        ckptfmt.export(tmp_path / "s", tmp_path / f"x{suffix}")
        assert (tmp_path / f"x{suffix}").read_bytes().replace(b"x/", b"whole/") or path
        found = ckptfmt.open_foreign(tmp_path / f"x{suffix}").load()
        for name, array in tree.items():
            assert found[name].tobytes() == np.asarray(array).tobytes()
        ckptfmt.export(path, tmp_path / f"y{suffix}")
        assert ckptfmt.open_foreign(tmp_path / f"y{suffix}")["w"].read().tobytes() == (
            tree["w"].tobytes()
        )


def test_a_full_disk_is_an_error_and_leaves_nothing(store: Path, tmp_path: Path) -> None:
    ckptfmt.save({"w": np.zeros(1 << 20)}, tmp_path / "big", durable=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        for suffix in (".pt", ".safetensors"):
            with pytest.raises(StorageError):
                ckptfmt.export(tmp_path / "big", tmp_path / f"x{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == ["big", "s"]


def test_a_folder_that_cannot_be_written_to_is_said_to_be(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="is no folder"):
        ckptfmt.export(store, tmp_path / "file" / "x.pt")
    with pytest.raises(UsageError, match="this machine's file system"):
        ckptfmt.export(store, "s3://bucket/x.pt")


def test_a_killed_export_leaves_no_name_and_the_next_one_cleans_up(
    store: Path, tmp_path: Path
) -> None:
    code = """
        import os, signal, sys, ckptfmt
        def kill(event):
            if event.kind == sys.argv[3]:
                os.kill(os.getpid(), signal.SIGKILL)
        ckptfmt.export(sys.argv[1], sys.argv[2], progress=kill)
    """
    target = tmp_path / "out" / "x.safetensors"
    for kind in ("export", "check"):
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(store), str(target), kind],
            check=False,
        )
        assert run.returncode == -signal.SIGKILL
        left = names_in(target.parent)
        assert len(left) == 1
        assert left[0].startswith(".ckptfmt-")
    ckptfmt.export(store, target)
    assert names_in(target.parent) == ["x.safetensors"]


def test_the_command_line_finds_the_direction(
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "s@1", "x.pt", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "pytorch"
    assert document["destination"] == "x.pt"
    assert "epoch" in document["loaded"]
    assert main(["convert", "x.pt", "x.safetensors", "--root", "model"]) == 0
    assert main(["convert", "x.safetensors", "again"]) == 0
    assert set(ckptfmt.load("again")) == {"a.weight", "a.bias"}
    assert main(["convert", "s", "folder", "--to", "safetensors", "--names", "model"]) == 0
    assert names_in(tmp_path / "folder") == ["model.safetensors"]
    capsys.readouterr()
    assert main(["convert", "s", "x.pt"]) == 11
    assert main(["convert", "s", "y.pt", "--step", "3"]) == 2
    assert main(["convert", "s", "y.pt", "--if-exists", "keep"]) == 2
    assert main(["convert", "s", "y.pt", "--codec", "zstd"]) == 2
    assert main(["convert", "x.pt", "t", "--root", "model"]) == 2
    assert main(["convert", "x.pt", "z.pt", "--from", "pytorch", "--rename", "^epoch$=e"]) == 0
    assert ckptfmt.open_foreign("z.pt")["e"] == 3
    assert main(["convert", "s", "x.pt", "--if-exists", "replace"]) == 0
    assert main(["convert", "no-such-store", "y.pt"]) == 10
    capsys.readouterr()
    assert main(["convert", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["formats"]
    assert {row["format"] for row in rows if "out" in row["ways"]} == set(EXPORTERS)


def test_the_command_line_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckptfmt.save({"t": np.zeros(2, "M8[s]"), "w": np.zeros(2)}, tmp_path / "s", durable=False)
    store, target = str(tmp_path / "s"), str(tmp_path / "x.pt")
    assert main(["convert", store, target]) == 12
    assert "t: torch has no dtype datetime64[s]" in capsys.readouterr().err
    assert main(["convert", store, target, "--allow-partial"]) == 3
    assert "not carried: t" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["x.pt", "x.safetensors", "x.npz", "ck.index", "dcp", "orbax"])
def test_a_list_that_loses_an_item_is_a_dict_of_positions(tmp_path: Path, target: str) -> None:
    text = (
        np.array(["a"], np.dtypes.StringDType()) if target != "ck.index" else np.zeros(1, "M8[s]")
    )
    tree = {"l": [text, np.ones(2), {"t": (np.zeros(1), 5)}], "w": np.zeros(1)}
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    to = {"target_format": target} if "." not in target else {}
    for number, chosen in enumerate(({"names": ["l/1", "l/2/t/1"]}, {"allow_partial": True})):
        path = tmp_path / f"{number}-{target}"
        report = ckptfmt.export(tmp_path / "s", path, **chosen, **to)  # type: ignore[arg-type]
        assert "l/~3i1" in report.loaded
        assert set(report.skipped) == ({"l/0"} if number else set())
    if target in ("x.pt", "x.safetensors"):
        found = ckptfmt.open_foreign(tmp_path / f"0-{target}").load()
        assert found["l"][1].tolist() == [1, 1]
        assert found["l"][2]["t"] == {1: 5}
        assert list(found) == ["l"]


def test_sparse_tensors_are_parts_where_a_format_knows_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import ckptfmt.torch as ckt

    ckt.save({"s": torch.eye(3).to_sparse()}, tmp_path / "s", durable=False)
    report = ckptfmt.export(tmp_path / "s", tmp_path / "d", target_format="dcp")
    assert report.transformed["s"] == "its parts"
    ckptfmt.export(tmp_path / "s", tmp_path / "x.safetensors")
    ckptfmt.export(tmp_path / "x.safetensors", tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)["s"]
    assert torch.equal(loaded.to_dense(), torch.eye(3))


def test_an_open_checkpoint_stays_open_and_is_one_already(store: Path, tmp_path: Path) -> None:
    with ckptfmt.open(store) as checkpoint:
        ckptfmt.export(checkpoint, tmp_path / "x.pt")
        assert checkpoint["epoch"] == 3
        with pytest.raises(UsageError, match="one already"):
            ckptfmt.export(checkpoint, tmp_path / "y.pt", step=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["x.pt", "x.safetensors", "x.npz", "ck.index", "x.weights.h5", "dcp", "orbax"]
)
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, target: str) -> None:
    rng = np.random.default_rng(0)
    tree = {
        "dense": {"kernel": rng.integers(0, 9, (3, 50_000_000), np.int32), "bias": np.zeros(8)},
        "dense_1": {"kernel": rng.integers(0, 9, (40_000, 2_000), np.int32)},
    }
    ckptfmt.save(tree, tmp_path / "s", durable=False)
    code = """
        import sys, ckptfmt
        def anonymous():
            with open("/proc/self/status") as file:
                return next(int(l.split()[1]) >> 10 for l in file if l.startswith("RssAnon"))
        most = [anonymous()]
        ckptfmt.export(sys.argv[1], sys.argv[2], target_format=sys.argv[3] or None,
                       progress=lambda event: most.append(anonymous()))
        print(max(most))
    """
    to = target if "." not in target else ""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "s", tmp_path / target, to],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(run.stdout) < 512  # MiB, of 920
