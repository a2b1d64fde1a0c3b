"""`ckptfmt convert` with rules: one list in the order of the line, a plan, a report."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt

Run = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tree = {"model": {"fc.weight": np.ones((2, 3), np.float32), "fc.bias": np.zeros(2, np.float32)}}
    ckptfmt.save({**tree, "epoch": 3}, tmp_path / "old", step=4, durable=False)
    return tmp_path / "old"


def test_rules_are_applied_in_the_order_of_the_line(run: Run, source: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nrename = '^net/'\nto = 'last/'\n")
    done = run(
        *("convert", source, tmp_path / "new", "--rename", "^model/=net/"),
        *("--map", rules, "--rename", r"(?=fc)=", "--preset", "torch-to-keras", "--json"),
    )
    assert done.code == 0
    names = [rule["rule"] for rule in done.json["rules"]]
    assert names == [
        "rename '^model/' -> 'net/'",
        "rename '^net/' -> 'last/'",
        "rename '(?=fc)' -> ''",
        "preset torch-to-keras",
    ]
    assert done.json["renamed"] == {
        "model/fc.weight": "last/fc/kernel",
        "model/fc.bias": "last/fc/bias",
    }
    assert list(done.json["transformed"]) == ["last/fc/kernel"]
    assert done.json["checkpoint"]["step"] == 4
    assert ckptfmt.load(tmp_path / "new")["last"]["fc"]["kernel"].shape == (3, 2)


def test_a_plan_writes_nothing_and_fits_the_screen(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run(
        "convert",
        source,
        "--plan",
        "--rename",
        "^model/=" + "long/" * 20,
        "--preset",
        "torch-to-keras",
    )
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
    assert "float32 [3, 2]" in done.out
    assert "2 rules would touch 4 leaves" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


def test_the_report_is_a_table(run: Run, source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "new", "--rename", "fc=head", "-v")
    lines = [line.split() for line in done.out.splitlines()]
    assert ["loaded", "2", "model/head.weight,", "model/head.bias"] in lines
    assert ["renamed", "model/fc.bias", "model/head.bias"] in lines
    assert ["1", "rename", "'fc'", "->", "'head'", "2"] in lines


def test_a_file_of_another_format_is_written_through_rules(
    run: Run, source: Path, tmp_path: Path
) -> None:
    file = tmp_path / "new.safetensors"
    done = run("convert", source, file, "--rename", "^model/=", "--rename", "^epoch=step")
    assert done.code == 0
    opened = ckptfmt.open_foreign(file)
    assert (sorted(opened), opened["step"]) == (["fc.bias", "fc.weight", "step"], 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rename", "fc"], "REGEX=TEMPLATE"),
        (["--rename", "fcc=x"], "a rule touches nothing"),
        (["--layer", "fc=Linear"], "--layer is for --preset"),
        (["--preset", "torch-to-keras", "--layer", "fc"], "--layer is not understood"),
        (["--preset", "torch-to-keras", "--layer", "fc=Lineer"], "not a kind of layer"),
        (["--preset", "nothing"], "no such preset"),
    ],
)
def test_rules_that_make_no_sense_are_usage_errors(
    run: Run, source: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = run("convert", source, tmp_path / "new", *arguments)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "new").exists()


def test_list_of_a_store_says_what_to_call(run: Run, source: Path) -> None:
    done = run("convert", source, "--list")
    assert (done.code, "ckptfmt show" in done.err) == (2, True)


def test_a_store_or_checkpoint_that_is_open_is_a_source(source: Path, tmp_path: Path) -> None:
    rules = [{"rename": "^model/", "to": "m/"}]
    sources: list[Any] = [ckptfmt.Store(source), ckptfmt.open(source)]
    for number, given in enumerate(sources):
        ckptfmt.convert(given, tmp_path / str(number), rules=rules, durable=False)
        assert "m/fc.bias" in ckptfmt.open(tmp_path / str(number))
        assert "m/fc.bias" in ckptfmt.open_foreign(given, rules=rules)
    with pytest.raises(ckptfmt.UsageError, match="no foreign format"):
        ckptfmt.convert(ckptfmt.Store(source), tmp_path / "x", source_format="pytorch")


def test_what_rules_cannot_carry_is_not_left_out_of_an_export_in_silence(
    run: Run, tmp_path: Path
) -> None:
    one = np.ones(3, np.float32)
    state = dict.fromkeys(("momentum", "velocity"), one)
    tree = {
        "model": {"d": {"kernel": np.ones((2, 3), np.float32), "bias": one}},
        "optimizer": {
            "iterations": np.array(1),
            "learning_rate": np.array(0.1, np.float32),
            "state": {"d": {"bias": state}},
        },
    }
    ckptfmt.save(tree, tmp_path / "k", durable=False)
    words = ("convert", tmp_path / "k", tmp_path / "t.pt", "--preset", "keras-to-torch")
    done = run(*words)
    assert done.code == 12
    assert "optimizer: Adam or RMSprop: say which" in done.err
    assert not (tmp_path / "t.pt").exists()
    done = run(*words, "--allow-partial", "--json")
    assert done.code == 3
    assert list(done.json["skipped"]) == ["optimizer"]
    done = run(*words, "--layer", "^optimizer$=Adam", "--if-exists", "replace")
    assert done.code == 0
    saved = ckptfmt.open_foreign(tmp_path / "t.pt")
    assert saved["optimizer/param_groups"][0]["params"] == ["d.bias"]


def test_a_store_is_not_called_like_a_file_that_cannot_be_written(
    run: Run, source: Path, tmp_path: Path
) -> None:
    for name in ("m.h5", "m.gguf", "m.onnx"):
        done = run("convert", source, tmp_path / name, "--rename", "^model/=net/")
        assert done.code == 2
        assert "no format that can be written has this suffix" in done.err
        assert not (tmp_path / name).exists()


def test_the_json_of_convert_has_the_keys_that_are_documented(
    run: Run, source: Path, tmp_path: Path
) -> None:
    table = (Path(__file__).parents[3] / "docs/cli.md").read_text()

    def documented(command: str) -> set[str]:
        (row,) = (line for line in table.splitlines() if line.startswith(f"| `{command}"))
        outer = re.sub(r"\([^()]*\)", "", row.split("|")[2])
        return {"schema", "command", *re.findall(r"`(\w+)`", outer)}

    pt = tmp_path / "m.pt"
    rules = ("--rename", "^model/=net/")
    for command, words in (
        ("convert` to a file", ("convert", source, pt)),
        ("convert` | `source", ("convert", source, tmp_path / "new", *rules)),
        ("convert` | `source", ("convert", source, "--plan", *rules)),
        ("convert SRC --list`", ("convert", pt, "--list")),
        ("convert --list`", ("convert", "--list")),
    ):
        found = run(*words, "--json").json
        assert set(found) == documented(command), command
    (rule,) = run("convert", source, "--plan", *rules, "--json").json["rules"]
    assert set(rule) == {"rule", "touched", "changes"}
    assert set(rule["changes"][0]) == {"before", "after", "what"}
