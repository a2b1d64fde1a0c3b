"""Rules of a conversion: what they match, what they make, and that none is in vain."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import MismatchError, NotFoundError, UsageError


def tree() -> dict[str, Any]:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    model: dict[str, Any] = OrderedDict()
    model["module.fc.weight"] = w
    model["module.fc.bias"] = np.array([1, 2], np.float32)
    model["module.head.weight"] = w
    blocks = [np.full(2, n, np.float32) for n in range(3)]
    return {"model": model, "blocks": blocks, "epoch": 3, "name": ("a", 1)}


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "s")
    metadata = {"by": "test"}
    ckptfmt.save(tree(), path, step=7, metadata=metadata, metrics={"loss": 1.5}, durable=False)
    return path


def converted(store: str, rules: list[dict[str, Any]], **options: Any) -> tuple[Any, Any]:
    target = f"{store}-new"
    report = ckptfmt.convert(store, target, rules=rules, durable=False, **options)
    return report, ckptfmt.load(target)


def test_a_store_is_carried_into_a_store_as_it_is(store: str) -> None:
    report, loaded = converted(store, [])
    assert report.format == "ckptfmt"
    assert report.info.digest == ckptfmt.open(store).info.digest
    assert (report.info.step, report.info.metrics) == (7, {"loss": 1.5})
    assert report.info.metadata == {"by": "test"}
    assert loaded["name"] == ("a", 1)


def test_names_change_and_all_else_stays(store: str) -> None:
    report, loaded = converted(store, [{"rename": r"^model/module\.", "to": "model/"}], step=1)
    assert list(loaded["model"]) == ["fc.weight", "fc.bias", "head.weight"]
    assert type(loaded["model"]) is OrderedDict
    assert loaded["model"]["fc.weight"] is loaded["model"]["head.weight"]
    assert report.renamed["model/module.fc.bias"] == "model/fc.bias"
    assert report.rules[0].touched == 3
    assert report.info.step == 1
    assert len(report.loaded) == 6


def test_containers_go_with_their_leaves(store: str) -> None:
    rules = [{"rename": "^model/", "to": "net/inner/"}, {"rename": "^blocks/", "to": "net/blocks/"}]
    _, loaded = converted(store, rules)
    assert type(loaded["net"]["inner"]) is OrderedDict
    assert [block[0] for block in loaded["net"]["blocks"]] == [0, 1, 2]
    assert loaded["epoch"] == 3


def test_a_list_whose_items_part_is_no_list_any_more(store: str) -> None:
    _, loaded = converted(store, [{"rename": "^blocks/1$", "to": "other"}, {"drop": "name|epoch"}])
    assert {key: item[0] for key, item in loaded["blocks"].items()} == {"0": 0, "2": 2}
    assert loaded["other"][0] == 1
    assert "epoch" not in loaded


def test_what_is_dropped_is_told_by_its_name_in_the_source(store: str) -> None:
    rules = [{"rename": "^epoch$", "to": "era"}, {"drop": "^era$"}]
    report, _ = converted(store, rules)
    assert report.dropped == {"epoch": "drop '^era$'"}


def test_a_list_that_loses_an_item_is_a_dict_of_positions(store: str) -> None:
    _, loaded = converted(store, [{"drop": "^blocks/1$"}])
    assert {key: item[0] for key, item in loaded["blocks"].items()} == {0: 0, 2: 2}


def test_each_rule_sees_what_the_one_before_made(store: str) -> None:
    rules: list[dict[str, Any]] = [
        {"drop": "^(blocks|epoch|name)"},
        {"transpose": r"fc\.weight$", "to": "fc.kernel"},
        {"reorder": "kernel$", "axis": 0, "order": [2, 0, 1]},
        {"cast": "kernel$", "dtype": "float16"},
        {"reshape": r"head\.weight$", "shape": [-1]},
        {"split": r"head\.weight$", "to": ["head.a", "head.b"], "sizes": [2, 4]},
        {"concat": [r"\.a$", r"\.b$"], "to": ".ab", "axis": 0},
    ]
    report, loaded = converted(store, rules)
    want = np.arange(6, dtype=np.float32).reshape(2, 3).T[[2, 0, 1]].astype(np.float16)
    kernel = loaded["model"]["module.fc.kernel"]
    assert (kernel.dtype, kernel.tolist()) == (np.float16, want.tolist())
    assert loaded["model"]["module.head.ab"].tolist() == [0, 1, 2, 3, 4, 5]
    assert set(report.dropped) == {"blocks/0", "blocks/1", "blocks/2", "epoch", "name"}
    steps = report.transformed["model/module.fc.kernel"]
    assert steps.startswith("transpose float32 [2, 3] -> float32 [3, 2]; reorder [2, 0, 1]")
    assert [rule.touched for rule in report.rules] == [5, 1, 1, 1, 1, 1, 2]


def test_a_rule_in_vain_is_an_error_that_names_it_and_what_is_near(store: str) -> None:
    with pytest.raises(UsageError, match="touches nothing") as caught:
        converted(store, [{"rename": r"^model/modul\.fc\.bias$", "to": "x"}])
    assert "rename" in caught.value.where
    assert "model/module.fc.bias" in caught.value.do
    with pytest.raises(UsageError, match="touches nothing"):
        converted(store, [{"cast": "^epoch$", "dtype": "float32"}])  # a value is no tensor
    assert not Path(f"{store}-new").exists()


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ([{"rename": r"fc\.\w+$", "to": "x"}], "two leaves get one name"),
        ([{"rename": "^epoch$", "to": "blocks"}], "no tree has the names"),
        ([{"rename": "^epoch$", "to": "a~9"}], "no tree has the names"),
        ([{"rename": "^epoch$", "to": "a//b"}], "no tree has the names"),
        ([{"rename": "(", "to": "x"}], "no regular expression"),
        ([{"rename": "^epoch$", "to": r"\3"}], "template does not fit"),
        ([{"rename": "^epoch$"}], "not understood"),
        ([{"rename": "^epoch$", "to": 3}], "not understood"),
        ([{"rename": "^epoch$", "to": "x", "axis": 1}], "not understood"),
        ([{"drop": "^epoch$", "rename": "^epoch$", "to": "x"}], "not understood"),
        ([{"dorp": "^epoch$"}], "not understood"),
        (["drop"], "not understood"),
        ({"drop": "epoch"}, "rules are no list"),
        ([{"drop": ""}], "leave nothing"),
        ([{"cast": "weight", "dtype": "flaot16"}], "not understood"),
        ([{"transpose": "weight", "axes": [0, True]}], "not understood"),
        ([{"reorder": "weight", "axis": 0, "order": [0, 1, 2]}], "cannot be split"),
        ([{"reorder": "weight", "axis": 0, "order": [0, 0]}], r"order \[0, 0\] of a rule does not"),
        ([{"split": "weight", "to": ["x", "x"]}], "parts of a tensor get one name"),
        ([{"split": "weight", "to": ["x", "y"], "sizes": [-1, 10**9]}], "cannot be split"),
        ([{"reshape": "weight", "shape": [-1, 0, 1 << 70]}], "another number of elements"),
        ([{"split": "weight", "to": "x"}], "expected to = a list of texts"),
        ([{"rename": "^epoch$", "to": "x", "axs": 1}], "no key but rename, to, found axs"),
        ([{"cast": "^epoch$", "dtype": "float32"}], "a tensor .* found plain values: epoch"),
        ([{"preset": "torch-to-keras", "layers": {"none": "Lineer"}}], "not a kind of layer"),
        ([{"concat": [r"fc\.weight", r"fc\.bias"], "to": "x"}], "do not fit"),
        ([{"concat": [r"weight$", r"bias$"], "to": "x"}], "cannot be joined"),
        ([{"preset": "keras-to-pytorch"}], "no such preset"),
        ([{"preset": "bert-tf1-to-hf", "root": "x"}], "knows its layers"),
    ],
)
def test_rules_that_make_no_sense_are_refused_and_nothing_is_written(
    store: str, rules: Any, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        converted(store, rules)
    assert not Path(f"{store}-new").exists()


def test_a_cast_that_overflows_commits_nothing(tmp_path: Path) -> None:
    ckptfmt.save({"w": np.array([1e30], np.float32)}, tmp_path / "s", durable=False)
    with pytest.raises(MismatchError, match=r"overflow.* let the rule's pattern match fewer"):
        converted(str(tmp_path / "s"), [{"cast": "w", "dtype": "float16"}])
    assert ckptfmt.Store(f"{tmp_path / 's'}-new").names() == []


def test_a_dry_run_writes_nothing_and_says_what_would_match(store: str) -> None:
    rules = [{"transpose": r"fc\.weight$"}]
    report = ckptfmt.convert(store, f"{store}-new", rules=rules, dry_run=True)
    assert report.info is None
    (change,) = report.rules[0].changes
    assert (change.was, change.now) == (("float32 [2, 3]",), ("float32 [3, 2]",))
    assert not Path(f"{store}-new").exists()


def test_rules_come_from_a_file_too(store: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text("[[rule]]\nrename = '^model/module\\.'\nto = ''\n[[rule]]\ndrop = '^blocks'\n")
    report, loaded = converted(store, [{"map": str(file)}])
    assert "fc.weight" in loaded
    assert len(report.rules) == 2
    file.write_text("[[rule]]\ndrop = '^bloks'\n[other]\n")
    with pytest.raises(UsageError, match="nothing else"):
        converted(store, [{"map": str(file)}])
    file.write_text("[[rule]]\ndrop = bloks\n")
    with pytest.raises(UsageError, match="no TOML"):
        converted(store, [{"map": str(file)}])
    file.write_text(f"[[rule]]\nmap = '{file}'\n")
    with pytest.raises(UsageError, match="not understood"):
        converted(store, [{"map": str(file)}])
    with pytest.raises(NotFoundError, match="no such file of rules"):
        converted(store, [{"map": str(tmp_path / "none.toml")}])


def test_a_foreign_file_opens_through_rules(store: str) -> None:
    rules = [{"rename": r"^model/module\.", "to": ""}, {"transpose": r"fc\.weight$"}]
    with ckptfmt.open_foreign(store, rules=rules) as opened:
        assert opened["fc.weight"].shape == (3, 2)
        assert opened["fc.weight"].read(np.s_[1:]).tolist() == [[1, 4], [2, 5]]
        assert opened["epoch"] == 3
        assert opened.info.step == 7
        assert opened.ties() == []
        target = {"fc.weight": np.zeros((3, 2), np.float32)}
        assert ckptfmt.restore(target, opened, names="fc.weight").matched == ("fc.weight",)
        assert target["fc.weight"][2].tolist() == [2, 5]


def test_a_large_transposed_tensor_streams_from_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfmt.foreign import streaming

    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1 << 16)
    w = np.random.default_rng(0).standard_normal((300, 500)).astype(np.float32)
    ckptfmt.save({"w": w}, tmp_path / "s", chunk_nbytes=1 << 16, codec="zstd", durable=False)
    _, loaded = converted(str(tmp_path / "s"), [{"transpose": "w"}], chunk_nbytes=1 << 14)
    assert loaded["w"].tobytes() == np.ascontiguousarray(w.T).tobytes()


def test_values_of_frameworks_and_registered_types_survive(tmp_path: Path) -> None:
    import pathlib

    state = {"p": pathlib.PurePosixPath("a/b"), "long": list(range(5000)), "w": np.ones(2)}
    ckptfmt.save(state, tmp_path / "s", durable=False)
    report, loaded = converted(
        str(tmp_path / "s"), [{"rename": "^w$", "to": "v"}, {"rename": "^p$", "to": "path"}]
    )
    assert loaded["path"] == state["p"]
    assert loaded["long"] == state["long"]
    assert loaded["v"].tolist() == [1, 1]
    assert report.renamed == {"w": "v", "p": "path"}


def test_text_and_packed_types_go_through_rules_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ml_dtypes

    from ckptfmt.foreign import streaming

    monkeypatch.setattr(streaming, "STREAMED_NBYTES_MIN", 1)
    text = np.array([["a", "bb", ""], ["dd", "e", "fff"]], dtype=np.dtypes.StringDType())
    half = np.arange(-3, 3).reshape(2, 3).astype(ml_dtypes.int4)
    ckptfmt.save({"t": text, "h": half}, tmp_path / "s", durable=False)
    rules: list[dict[str, Any]] = [
        {"transpose": "."},
        {"split": "t", "to": ["t0", "t1"], "axis": 1},
    ]
    _, loaded = converted(str(tmp_path / "s"), rules)
    assert loaded["t1"].tolist() == [["dd"], ["e"], ["fff"]]
    assert loaded["h"].dtype == half.dtype
    assert loaded["h"].astype(int).tolist() == half.T.astype(int).tolist()


def test_the_digests_are_compared_through_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that changes while it is written costs the checkpoint, transposed or not."""
    from ckptfmt.foreign import conversion

    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 4), np.float32))
    compare = conversion._Comparison.before_commit

    def change_and_compare(*args: Any) -> None:
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"X")
        compare(*args)

    monkeypatch.setattr(conversion._Comparison, "before_commit", change_and_compare)
    with pytest.raises(ckptfmt.CorruptError, match="source changed"):
        ckptfmt.convert(path, tmp_path / "s", rules=[{"transpose": "^"}], durable=False)
    assert ckptfmt.Store(tmp_path / "s").names() == []
