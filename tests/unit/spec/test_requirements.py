"""The specification is complete in itself, and says the same as the code and the tests."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "spec"
PAGES = [*sorted(SPEC.glob("0*.md")), *sorted((SPEC / "codecs").glob("*.md"))]
ENTRY = re.compile(r"^- (M\d\d-\d+): (.*)$", re.M)
ROW = re.compile(r"^\| (`(?:corrupt|unsupported)-.*)$", re.M)
KIND = re.compile(r"`((?:corrupt|unsupported)-[a-z-]+)`")
PREFIX = {"CorruptError": "corrupt", "UnsupportedError": "unsupported"}


def requirements() -> dict[str, str]:
    return {name: text for page in PAGES for name, text in ENTRY.findall(page.read_text())}


def test_every_requirement_has_one_id_and_one_must() -> None:
    found = Counter(name for page in PAGES for name, _ in ENTRY.findall(page.read_text()))
    assert [name for name, count in found.items() if count > 1] == []
    wrong = [
        name for name, text in requirements().items() if len(re.findall(r"\bMUST\b", text)) != 1
    ]
    assert wrong == []


ELSEWHERE = {
    "M02-2": "tests/unit/engine/test_gc.py::test_files_that_are_no_indexes_are_not_read_nor_deleted",
    "M02-19": "tests/unit/engine/test_gc.py::test_a_quarantined_checkpoint_keeps_its_files",
    "M05-4": "tests/unit/storage/test_local.py::test_a_symbolic_link_is_not_followed",
    "M08-3": "tests/unit/engine/test_coordinate.py::test_the_lists_are_read_before_any_size",
    "M08-5": "tests/unit/storage/test_local.py::test_several_processes_race_and_one_wins",
    "M08-6": "tests/unit/storage/test_local.py::test_a_link_whose_reply_was_lost_is_won",
    "M08-7": "tests/unit/storage/test_local.py::test_a_file_whose_fsync_failed_is_abandoned",
    "M08-8": "tests/unit/storage/test_local.py"
    "::test_put_if_absent_syncs_links_unlinks_and_syncs_every_folder_up_to_one_that_existed",
    "M08-11": "tests/unit/engine/test_gc.py"
    "::test_while_a_base_of_an_open_save_is_gone_nothing_is_listed",
    "M08-12": "tests/unit/engine/test_gc.py::test_data_younger_than_a_save_in_flight_is_its_own",
    "M08-13": "tests/unit/engine/test_gc.py"
    "::test_what_dead_and_committed_saves_left_is_removed_and_what_others_need_is_not",
    "M08-15": "tests/unit/engine/test_gc.py"
    "::test_our_own_list_stands_before_the_look_and_until_all_is_deleted",
    "M08-16": "tests/unit/engine/test_gc.py::test_what_is_referred_to_again_is_spared",
    "M08-17": "tests/unit/engine/test_gc.py::test_an_index_that_cannot_be_read_stops_gc",
    "M08-18": "tests/unit/engine/test_gc.py::test_data_younger_than_a_save_in_flight_is_its_own",
    "M08-19": "tests/unit/engine/test_gc.py"
    "::test_a_store_without_times_allows_no_grace_and_no_save_in_flight",
    "M08-20": "tests/unit/engine/test_gc.py::test_a_folder_that_is_no_store_is_left_alone",
    "M09-4": "tests/unit/engine/test_coordinate.py"
    "::test_a_writer_refuses_a_store_that_asks_for_more",
}
"""Requirements that a test of another folder holds: which one."""


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_the_test_that_holds_a_requirement_is_there(name: str) -> None:
    path, _, function = ELSEWHERE[name].partition("::")
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert function in found


def reasons(path: Path) -> set[str]:
    """Kinds of the FormatErrors that a module raises, as far as they are written out."""
    found: set[str] = set()

    def take(prefix: str, value: ast.expr | None) -> None:
        for node in ast.walk(value) if value is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(f"{prefix}-{node.value}")

    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        keywords = {word.arg: word.value for word in node.keywords}
        if called in PREFIX and "reason" in keywords:
            value = keywords["reason"]
            take(PREFIX[called], value.body if isinstance(value, ast.IfExp) else value)
            take(PREFIX[called], value.orelse if isinstance(value, ast.IfExp) else None)
        position = {"corrupt": 1, "check_all": 2}.get(called)
        if called == "_corrupt":  # the values' own: what, reason; unflatten's: what, where, reason
            position = 2 if path.name == "unflatten.py" else 1
        if position is not None and len(node.args) > position:
            value = node.args[position]
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"[a-z]+(-[a-z]+)*", text):
                take("corrupt", value)
    if path.name == "unflatten.py":
        found.add("corrupt-structure")  # the default of its `_corrupt`
    return found


def table(part: slice = slice(None), *, raised: bool = False) -> set[str]:
    """Kinds of 9.4: of both tables, or of the part before or after the second heading row."""
    page = (SPEC / "09-versions-and-errors.md").read_text().partition("## 9.4")[2]
    rows = [
        row
        for half in page.split("These belong to operations")[part]
        for row in ROW.findall(half)
        if not (raised and "found by verification" in row)
    ]
    return {kind for row in rows for kind in KIND.findall(row.partition(" | ")[0])}


DOCUMENTS = slice(0, 1)


def raised_in(layer: str) -> dict[str, str]:
    paths = (ROOT / "ckptfmt" / layer).rglob("*.py")
    return {kind: path.name for path in paths for kind in reasons(path)}


@pytest.mark.parametrize("layer", ["format", "engine"])
def test_kinds_that_the_code_raises_are_in_the_table(layer: str) -> None:
    found = raised_in(layer)
    assert found
    assert {kind: name for kind, name in found.items() if kind not in table()} == {}


def test_kinds_of_the_table_are_raised_somewhere() -> None:
    found = raised_in("format") | raised_in("engine")
    computed = {"corrupt-unreadable-index", "unsupported-unreadable-index"}
    assert sorted(table(raised=True) - set(found) - computed) == []


def kinds_of_vectors(*, fragments: bool) -> set[str]:
    twins = (SPEC / "vectors" / "reject").glob("*.json")
    chosen = (path for path in twins if path.name.startswith("fragment") == fragments)
    return {json.loads(path.read_text())["kind"] for path in chosen}


def test_every_kind_of_a_set_of_fragments_is_in_the_table_of_operations() -> None:
    page = (
        (SPEC / "09-versions-and-errors.md").read_text().partition("These belong to operations")[2]
    )
    kinds = kinds_of_vectors(fragments=True)
    assert kinds
    assert sorted(kind for kind in kinds - table(DOCUMENTS) if f"`{kind}`" not in page) == []


def test_every_kind_of_a_document_has_a_vector_or_a_test_that_names_it() -> None:
    kinds = kinds_of_vectors(fragments=False)
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    rest = table(DOCUMENTS) - kinds
    assert sorted(kind for kind in rest if kind not in text) == []
    assert sorted(kinds - table(DOCUMENTS)) == []
