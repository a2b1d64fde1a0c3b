"""Every MUST of the spec has an id, and a test or a vector that names it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ID = re.compile(r"\bM\d\d-\d+\b")
STATED = re.compile(r"^\s*(?:[-*]|\|)?\s*\**(M\d\d-\d+)\**\s*[:|]", re.M)
NORMATIVE = re.compile(r"\b(MUST|MUST NOT)\b")


def chapters(root: Path) -> list[Path]:
    """Spec text in force: not its changelog, not its introduction, which define the words."""
    return [
        p
        for p in sorted((root / "spec").rglob("*.md"))
        if p.name[0].isdigit() or p.parent.name == "codecs"
    ]


def stated_in(texts: Iterable[str]) -> Counter[str]:
    return Counter(found for text in texts for found in STATED.findall(text))


@pytest.fixture(scope="module")
def stated(root: Path) -> Counter[str]:
    return stated_in(path.read_text() for path in chapters(root))


def test_spec_states_requirements_once(stated: Counter[str]) -> None:
    assert len(stated) > 50
    assert [found for found, n in stated.items() if n > 1] == []


def test_each_id_belongs_to_its_chapter(root: Path) -> None:
    for path in chapters(root):
        if path.name[0].isdigit():
            wrong = [i for i in stated_in([path.read_text()]) if i[1:3] != path.name[:2]]
            assert wrong == [], path.name


def test_each_must_has_an_id(root: Path) -> None:
    bare = [
        f"{path.relative_to(root)}:{n}"
        for path in chapters(root)
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if NORMATIVE.search(line) and not ID.search(line) and "words MUST" not in line
    ]
    assert bare == []


def test_each_id_is_named_by_a_test_or_a_vector(root: Path, stated: Counter[str]) -> None:
    named: set[str] = set()
    for folder, pattern in (("tests", "*.py"), ("spec/vectors", "*.json")):
        for path in (root / folder).rglob(pattern):
            if path != Path(__file__):
                named |= set(ID.findall(path.read_text()))
    assert sorted(set(stated) - named) == [], "stated in spec/, held by nothing"
    assert sorted(named - set(stated)) == [], "named by a test, stated nowhere"


def test_ids_are_found_where_they_stand() -> None:
    text = "- M04-12: A reader MUST x.\n| M05-3 | MUST | y |\nsee M01-2 for more\n- **M06-1**: z"
    assert sorted(stated_in([text])) == ["M04-12", "M05-3", "M06-1"]
