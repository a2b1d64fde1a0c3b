"""Each command on a small store: what it says to people, to programs, and by its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt

Run = Callable[..., Any]
COMMANDS = [
    ("ls", "{s}"),
    ("show", "{s}"),
    ("cat", "{s}", "model/embed.weight"),
    ("cat", "{s}", "model/embed.weight", "--stats"),
    ("diff", "{s}@1", "{s}@2"),
    ("verify", "{s}"),
    ("gc", "{s}", "--dry-run"),
    ("rm", "{s}@1", "--dry-run"),
    ("tag", "{s}"),
    ("convert", "--list"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c))
def test_every_command_speaks_one_json_document_and_nothing_else(
    run: Run, store: Path, command: tuple[str, ...]
) -> None:
    result = run(*(part.format(s=store) for part in command), "--json")
    document = result.json
    assert document["schema"] == 1
    assert document["command"] == command[0]
    assert "\x1b" not in result.out
    assert result.err == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c))
def test_every_command_in_a_pipe_is_plain_text_without_control_characters(
    run: Run, store: Path, command: tuple[str, ...]
) -> None:
    result = run(*(part.format(s=store) for part in command))
    assert result.out
    for line in result.out.splitlines():
        assert line.isprintable()
        assert line == line.rstrip()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c))
def test_every_command_fits_the_columns_it_is_given(
    run: Run, store: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    result = run(*(part.format(s=store) for part in command))
    assert max(map(len, result.out.splitlines())) <= 50


def test_the_options_may_stand_before_the_command(run: Run, store: Path) -> None:
    assert run("--json", "ls", store).json["command"] == "ls"


# ls


def test_ls_shows_steps_with_tags_and_metrics(run: Run, store: Path) -> None:
    result = run("ls", store)
    assert result.code == 0
    head, one, two = result.out.splitlines()
    assert head.split() == ["CHECKPOINT", "CREATED", "TENSORS", "SIZE", "TAGS", "METRICS"]
    assert one.startswith("1 ")
    assert "loss=0.5" in one
    assert "latest, prod" in two


def test_ls_as_json_has_numbers_and_names(run: Run, store: Path) -> None:
    document = run("ls", store, "--json").json
    one, two = document["checkpoints"]
    assert document["latest"] == two["name"] == "step-0000000000000002"
    assert (one["step"], one["metrics"], one["tags"]) == (1, {"loss": 0.5}, [])
    assert two["tags"] == ["prod"]
    assert isinstance(two["nbytes"], int)


def test_ls_of_a_store_without_checkpoints_is_an_empty_list_and_a_note(
    run: Run, tmp_path: Path
) -> None:
    ckptfmt.save({"x": 1}, tmp_path / "empty", step=1)
    ckptfmt.Store(tmp_path / "empty").delete(1)
    result = run("ls", tmp_path / "empty")
    assert (result.code, result.out) == (0, "")
    assert "no checkpoint in" in result.err
    assert run("ls", tmp_path / "empty", "--json").json["checkpoints"] == []


@pytest.mark.parametrize(
    "command",
    ["ls", "gc", "prune --keep-last 1", "report", "watch --once", "watch --json", "tag", "verify"],
)
def test_a_mistyped_path_is_not_found_and_nothing_is_made_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ckptfmt.save({"x": 1}, tmp_path / "runs" / "a", step=1)
    before = sorted(tmp_path.rglob("*"))
    name, *options = command.split()
    for path, found in (("run", "nothing"), ("runs", "stores below it: a")):
        result = run(name, tmp_path / path, *options)
        assert (result.code, result.out) == (10, "")
        assert "there is no " in result.err
        assert found in result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_copy_without_its_marker_is_a_store(run: Run, store: Path) -> None:
    (store / "ckptfmt.json").unlink()
    assert run("ls", store).code == 0
    assert run("report", store, "-o", store.parent / "page.html").code == 0


def test_ls_leaves_a_damaged_checkpoint_out_and_says_partial(run: Run, store: Path) -> None:
    index = store / "checkpoints" / "step-0000000000000001~0.index"
    data = bytearray(index.read_bytes())
    data[300] ^= 1
    index.write_bytes(data)
    result = run("ls", store)
    assert result.code == 3
    assert len(result.out.splitlines()) == 2
    assert result.err.startswith("ckptfmt: warning: ")
    document = run("ls", store, "--json").json
    assert len(document["checkpoints"]) == 1
    assert document["warnings"]


# show


def test_show_groups_layers_and_sums_them(run: Run, store: Path) -> None:
    result = run("show", store)
    assert result.code == 0
    assert "step-0000000000000002" in result.out.splitlines()[0]
    assert "layer.[0-2]" in result.out
    assert "= model/embed.weight" in result.out
    assert "a\\x1b[31mb" in result.out


def test_show_all_lists_every_leaf_once(run: Run, store: Path) -> None:
    result = run("show", store, "--all")
    rows = result.out.split("NAME")[1].splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(ckptfmt.open(store))


def test_show_takes_part_by_name(run: Run, store: Path) -> None:
    document = run(
        "show", store, "--names", "model/layer.*.bias", "--names", "counts", "--json"
    ).json
    names = [leaf["name"] for leaf in document["leaves"]]
    assert names == [f"model/layer.{n}.bias" for n in range(3)] + ["counts"]
    assert document["totals"]["nbytes"] == 3 * 12 + 16


def test_show_as_json_is_exact(run: Run, store: Path) -> None:
    document = run("show", f"{store}@1", "--json").json
    leaves = {leaf["name"]: leaf for leaf in document["leaves"]}
    assert leaves["model/out.weight"]["tied_to"] == "model/embed.weight"
    assert leaves["model/layer.0.weight"] == {
        "name": "model/layer.0.weight",
        "kind": "tensor",
        "dtype": "bfloat16",
        "shape": [3, 3],
        "nbytes": 18,
    }
    assert leaves["lr"]["value"] == "NaN"
    assert leaves["note"]["value"] == "a\x1b[31mb"
    assert leaves["shape"]["value"] == [1, [2, 3]]
    assert document["totals"]["tensors"] == 9
    assert document["checkpoint"]["nbytes"] == document["totals"]["nbytes"]


def test_show_depth_zero_is_the_totals(run: Run, store: Path) -> None:
    result = run("show", store, "--depth", "0")
    assert "in 9 tensors and 4 values" in result.out
    assert "NAME" not in result.out


def test_show_of_a_name_that_is_not_there_names_the_nearest(run: Run, store: Path) -> None:
    result = run("show", store, "--names", "model/embed.wieght")
    assert result.code == 10
    assert "model/embed.weight" in result.err
    assert "<Checkpoint" not in result.err
    assert len(result.err.splitlines()) == 1


def test_show_of_a_foreign_file(run: Run, foreign: Path) -> None:
    result = run("show", foreign)
    assert result.code == 0
    assert "layer.[0-2]" in result.out


# cat


def test_cat_prints_values_and_slices(run: Run, store: Path) -> None:
    assert run("cat", store, "model/embed.weight[1:3,0]").out == "[3., 6.]\n"
    assert run("cat", store, "model/embed.weight[-1, -1]").out == "11.0\n"
    assert run("cat", store, "step").out == "2\n"
    assert run("cat", store, "note").out == "'a\\x1b[31mb'\n"
    document = run("cat", store, "model/embed.weight[1:3,0]", "--json").json
    assert document["values"] == [3.0, 6.0]
    assert (document["shape"], document["slice"]) == ([4, 3], "[1:3,0]")


def test_cat_of_a_value_is_plain_and_fits_the_columns(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [{"lr": np.float32(0.5), "params": [f"layer.{n}.weight" for n in range(30)]}]
    ckptfmt.save({"scale": np.float32(0.5), "groups": groups}, tmp_path / "s", durable=False)
    assert run("cat", tmp_path / "s", "scale").out == "0.5\n"
    assert run("cat", tmp_path / "s", "scale", "--json").json["value"] == 0.5
    assert "0.5" in run("show", tmp_path / "s", "--all").out.split("scale")[1].splitlines()[0]
    assert len(run("cat", tmp_path / "s", "groups").out.splitlines()) == 1
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("cat", tmp_path / "s", "groups").out.splitlines()
    assert lines[0] == "[{'lr': 0.5,"
    assert max(map(len, lines)) <= 80


def test_cat_statistics(run: Run, store: Path) -> None:
    document = run("cat", store, "model/embed.weight", "--stats", "--json").json
    found = document["statistics"]
    assert (found["count"], found["min"], found["max"], found["mean"]) == (12, 0.0, 11.0, 5.5)
    part = run("cat", store, "model/embed.weight[0]", "--stats", "--json").json
    assert part["statistics"]["mean"] == 1.0


def test_cat_of_much_is_shown_in_part_unless_all(run: Run, tmp_path: Path) -> None:
    ckptfmt.save({"w": np.arange(5000)}, tmp_path / "s", durable=False)
    result = run("cat", tmp_path / "s", "w")
    assert "..." in result.out
    assert "5,000 elements" in result.err
    everything = run("cat", tmp_path / "s", "w", "--all")
    assert "2500," in everything.out
    assert everything.err == ""


def test_cat_of_a_wrong_name_slice_or_kind_is_told(run: Run, store: Path) -> None:
    assert run("cat", store, "nothing").code == 10
    assert run("cat", store, "model/embed.weight[9]").code == 2
    assert run("cat", store, "step", "--stats").code == 2


def test_cat_of_a_damaged_chunk_is_corrupt(run: Run, store: Path) -> None:
    for file in (store / "data").iterdir():
        data = bytearray(file.read_bytes())
        data[64] ^= 1
        file.write_bytes(data)
    first = next(iter(ckptfmt.open(f"{store}@1")))
    assert run("cat", f"{store}@1", first).code == 4


# diff


def test_diff_of_the_same_is_zero(run: Run, store: Path) -> None:
    result = run("diff", f"{store}@2", f"{store}@prod")
    assert result.code == 0
    assert result.out.splitlines()[-1].startswith("the same: 14 leaves")


def test_diff_names_what_changed_and_reads_no_data(run: Run, store: Path) -> None:
    for file in (store / "data").iterdir():
        file.unlink()
    document = run("diff", f"{store}@1", f"{store}@2", "--json").json
    changed = {leaf["name"]: leaf for leaf in document["changed"]["leaves"]}
    assert changed.keys() == {"model/head.weight", "step"}
    assert changed["model/head.weight"]["changed_nbytes"] == 24
    assert changed["step"]["what"] == "1 -> 2"
    assert document["same"]["leaves"] == 12
    assert document["equal"] is False
    assert run("diff", f"{store}@1", f"{store}@2").code == 1


def test_diff_tells_added_removed_dtype_and_shape(run: Run, tmp_path: Path) -> None:
    x = np.zeros(4, np.float32)
    a, b = tmp_path / "a", tmp_path / "b"
    ckptfmt.save({"gone": x + 3, "d": x, "s": x + 1, "k": x + 2}, a, durable=False)
    new = {"d": x.astype(np.float64), "s": np.ones((2, 2), np.float32), "k": 1, "new": x}
    ckptfmt.save(new, b, durable=False)
    document = run("diff", a, b, "--json").json
    whats = {leaf["name"]: leaf["what"] for leaf in document["changed"]["leaves"]}
    assert whats == {
        "d": "dtype float32 -> float64",
        "s": "shape [4] -> [2, 2]",
        "k": "tensor -> value",
    }
    assert [leaf["name"] for leaf in document["added"]["leaves"]] == ["new"]
    assert [leaf["name"] for leaf in document["removed"]["leaves"]] == ["gone"]
    assert document["removed"]["nbytes"] == 16


def test_diff_of_another_cut_or_digest_is_unknown_until_it_is_read(
    run: Run, tmp_path: Path
) -> None:
    tree = {"w": np.arange(4096, dtype=np.float32), "v": np.zeros(3)}
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    ckptfmt.save(tree, a, durable=False)
    ckptfmt.save(tree, b, chunk_nbytes=4096, durable=False)
    ckptfmt.save({**tree, "w": tree["w"] + np.eye(1, 4096)[0]}, c, digest="sha256", durable=False)
    result = run("diff", a, b, "--json")
    assert result.code == 3
    assert result.json["equal"] is None
    assert result.json["unknown"]["leaves"][0]["what"] == "cut differently"
    read = run("diff", a, b, "--read", "--json")
    assert (read.code, read.json["equal"]) == (0, True)


def test_diff_of_another_digest_reads_which_bytes_differ(run: Run, tmp_path: Path) -> None:
    tree = {"w": np.arange(4096, dtype=np.float32)}
    a, c = tmp_path / "a", tmp_path / "c"
    ckptfmt.save(tree, a, durable=False)
    tree["w"][7] = -1
    ckptfmt.save(tree, c, digest="sha256", durable=False)
    document = run("diff", a, c, "--json").json
    assert document["unknown"]["leaves"][0]["what"] == "digests xxh3-128 and sha256"
    read = run("diff", a, c, "--read", "--json")
    assert read.code == 1
    assert read.json["changed"]["nbytes"] == 4


def test_diff_sees_order_containers_and_ties(run: Run, tmp_path: Path) -> None:
    x, y = np.zeros(3), np.zeros(3)
    a, b = tmp_path / "a", tmp_path / "b"
    ckptfmt.save({"p": x, "q": x, "r": [y, 1], "s": y}, a, durable=False)
    ckptfmt.save({"q": x, "p": y, "r": (y, 1), "s": x}, b, durable=False)
    result = run("diff", a, b, "--json")
    assert result.code == 1
    structure = " ".join(result.json["structure"])
    assert "another order" in structure
    assert "r: list -> tuple" in structure
    assert "tied to" in structure
    assert not result.json["changed"]["leaves"]


def test_diff_with_a_foreign_file_reads_it_if_asked(
    run: Run, foreign: Path, tmp_path: Path
) -> None:
    ckptfmt.convert(foreign, tmp_path / "s", durable=False)
    unknown = run("diff", tmp_path / "s", foreign)
    assert unknown.code == 3
    assert "--read" in unknown.err
    read = run("diff", tmp_path / "s", foreign, "--read")
    assert (read.code, read.err) == (0, "")


def test_diff_of_part_needs_a_match_on_one_side_only(run: Run, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    ckptfmt.save({"x": 1}, a, durable=False)
    ckptfmt.save({"x": 1, "y": 2}, b, durable=False)
    assert run("diff", a, b, "--names", "x").code == 0
    document = run("diff", a, b, "--names", "y", "--json").json
    assert [leaf["name"] for leaf in document["added"]["leaves"]] == ["y"]
    assert run("diff", a, b, "--names", "z").code == 10


# verify


def test_verify_of_a_sound_store_is_ok(run: Run, store: Path) -> None:
    result = run("verify", store)
    assert result.code == 0
    assert result.out.startswith("ok: 2 checkpoints")


def test_verify_of_nothing_is_not_ok(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "typo", tmp_path / "file"):
        result = run("verify", path)
        assert (result.code, result.out) == (10, "")
        assert "there is no checkpoint" in result.err
        assert run("gc", path).code == 10


def test_verify_names_file_range_checkpoint_and_tensor_and_says_no(run: Run, store: Path) -> None:
    stored = ckptfmt.open(f"{store}@1")
    data_file = next((store / "data").iterdir())
    data = bytearray(data_file.read_bytes())
    data[64] ^= 1
    data_file.write_bytes(data)
    result = run("verify", store, "--json")
    assert result.code == 1
    (problem, *_) = result.json["problems"]
    assert data_file.name in problem["file"]
    assert problem["start"] <= 64 < problem["stop"]
    assert problem["tensor"] in stored
    text = run("verify", store).out
    assert "DAMAGED" in text
    assert problem["tensor"] in text


# gc, rm, tag


def test_rm_then_gc_gives_the_space_back(run: Run, store: Path) -> None:
    before = {file.name for file in (store / "data").iterdir()}
    result = run("rm", f"{store}@2", "--force")
    assert result.code == 0
    assert result.out.startswith("step-0000000000000002 deleted")
    assert "ckptfmt gc" in result.err
    assert {file.name for file in (store / "data").iterdir()} == before
    dry = run("gc", store, "--grace", "0", "--dry-run", "--json").json
    assert dry["dry_run"] is True
    assert {file.name for file in (store / "data").iterdir()} == before
    document = run("gc", store, "--grace", "0", "--json").json
    assert document["freed_nbytes"] > 0
    assert {file.name for file in (store / "data").iterdir()} == before - set(document["deleted"])
    assert run("verify", store).code == 0


def test_rm_wants_a_name_and_respects_tags(run: Run, store: Path) -> None:
    assert run("rm", store).code == 2
    refused = run("rm", f"{store}@2")
    assert refused.code == 2
    assert "prod" in refused.err
    assert run("rm", f"{store}@2", "--dry-run", "--force").out.startswith(
        "step-0000000000000002 would"
    )
    assert ckptfmt.Store(store).steps() == [1, 2]
    assert run("rm", f"{store}@2", "--force").code == 0
    assert ckptfmt.Store(store).steps() == [1]


def test_tags_are_set_listed_moved_and_deleted(run: Run, store: Path) -> None:
    assert run("tag", f"{store}@1", "best").code == 0
    assert run("tag", store, "--json").json["tags"] == {
        "best": "step-0000000000000001",
        "prod": "step-0000000000000002",
    }
    assert run("show", f"{store}@best", "--json").json["checkpoint"]["step"] == 1
    assert run("tag", f"{store}@2", "best").code == 0
    assert ckptfmt.open(f"{store}@best").info.step == 2
    assert run("tag", store, "best", "--delete").code == 0
    assert "best" not in ckptfmt.Store(store).tags()
    assert run("tag", store, "Best").code == 2


# errors


def test_an_error_is_one_line_and_with_json_one_object_more(run: Run, store: Path) -> None:
    result = run("show", f"{store}@77", "--json")
    assert result.code == 10
    assert result.out == ""
    line, form = result.err.splitlines()
    assert line.startswith("ckptfmt: error: ")
    error = json.loads(form)["error"]
    assert error["exit_code"] == 10
    assert error["class"] == "NotFoundError"
    assert error["kind"].startswith("not-found-")


def test_a_hostile_name_cannot_forge_a_line_of_the_error(run: Run, store: Path) -> None:
    result = run("cat", store, "x\nckptfmt: error: \x1b[2J")
    assert len(result.err.splitlines()) == 1
    assert "\x1b" not in result.err


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nothing",),
        ("ls",),
        ("ls", "a", "b"),
        ("show", "x", "--depth", "many"),
        ("show", "x", "--depth", "-1"),
        ("gc", "x", "--grace", "soon"),
        ("ls", "x", "--storage-option", "novalue"),
        ("convert", "x"),
        ("convert", "--list", "x", "y"),
    ],
)
def test_wrong_arguments_are_usage_errors(run: Run, args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("ckptfmt: error: ")


def test_an_interrupt_is_told_and_130(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ckptfmt.Store, "verify", interrupt)
    result = run("verify", store)
    assert (result.code, result.err) == (130, "ckptfmt: error: interrupted\n")


def test_what_nobody_foresaw_is_a_bug_without_a_traceback(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("x")

    monkeypatch.setattr(ckptfmt.Store, "verify", fail)
    result = run("verify", store)
    assert result.code == 70
    assert "this is a bug" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in run("verify", store, "-vv").err


# convert


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A safetensors file written by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for layer in range(3):
        header[f"layer.{layer}.weight"] = {
            "dtype": "BF16",
            "shape": [2, 2],
            "data_offsets": [len(data), len(data) + 8],
        }
        data += bytes(range(layer, layer + 8))
    header["a/b"] = {"dtype": "U8", "shape": [], "data_offsets": [len(data), len(data) + 1]}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data + b"\7")
    return path


def test_convert_carries_everything_and_says_so(run: Run, foreign: Path, tmp_path: Path) -> None:
    result = run("convert", foreign, tmp_path / "s", "--json")
    assert result.code == 0
    document = result.json
    assert document["loaded"] == [f"layer.{n}.weight" for n in range(3)] + ["a~1b"]
    assert document["renamed"] == {"a/b": "a~1b"}
    assert document["nbytes"] == 25
    loaded = ckptfmt.load(tmp_path / "s")
    assert loaded["a/b"] == 7
    assert loaded["layer.2.weight"].tobytes() == bytes(range(2, 10))
    assert ckptfmt.open(tmp_path / "s").info.metadata == {"format": "pt"}


def test_convert_to_a_step_or_a_name(run: Run, foreign: Path, tmp_path: Path) -> None:
    assert run("convert", foreign, tmp_path / "s", "--step", "3").code == 0
    assert run("convert", foreign, f"{tmp_path / 's'}@base").code == 0
    assert {i.name for i in ckptfmt.Store(tmp_path / "s").checkpoints()} == {
        "base",
        "step-0000000000000003",
    }
    assert run("convert", foreign, f"{tmp_path / 's'}@base", "--step", "4").code == 2


def test_convert_list_writes_nothing(run: Run, foreign: Path, tmp_path: Path) -> None:
    document = run("convert", foreign, "--list", "--json").json
    assert [t["foreign_name"] for t in document["tensors"]][-1] == "a/b"
    assert "safetensors" in run("convert", "--list").out


def test_convert_of_what_is_damaged_writes_nothing(run: Run, foreign: Path, tmp_path: Path) -> None:
    foreign.write_bytes(foreign.read_bytes()[:-1])
    result = run("convert", foreign, tmp_path / "s")
    assert result.code == 4
    assert "truncated" in result.err
    assert not (tmp_path / "s").exists()


def test_convert_of_an_unknown_file_or_format_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.dat").write_bytes(b"hello world, no header")
    assert run("convert", tmp_path / "x.dat", tmp_path / "s").code == 12
    assert run("convert", tmp_path / "none", tmp_path / "s").code == 10
    assert run("convert", tmp_path / "x.dat", tmp_path / "s", "--from", "nope").code == 2


def test_a_tag_of_what_is_set_aside_says_why_and_how_to_get_it_back(run: Run, store: Path) -> None:
    """It leads to nothing (M02-11), and must not lead to another; nothing deletes what it names."""
    ours = ckptfmt.Store(store)
    ours.tag("best", 1)
    ours.quarantine(1, "the loss was wrong")
    why = "it is set aside (the loss was wrong); to take it back: "
    why += "Store(...).readmit('step-0000000000000001')"
    for command in ("show", "verify"):
        shown = run(command, f"{store}@best")
        assert (shown.code, why in shown.err) == (10, True)
    with ckptfmt.Manager(store) as manager:
        with pytest.raises(ckptfmt.NotFoundError) as caught:
            manager.restore({}, at="best")
        assert why in str(caught.value)
        with pytest.raises(ckptfmt.NotFoundError) as caught:
            manager.restore({}, at=1)
        assert why in str(caught.value)
    listed = run("tag", store)
    assert "best does not hold" in listed.err
    pruned = run("prune", store, "--keep-quarantined", 0)
    assert pruned.code == 0
    ours.readmit("step-0000000000000001")
    assert run("show", f"{store}@best").code == 0
