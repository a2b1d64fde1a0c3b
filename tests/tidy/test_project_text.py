"""What the repository's text must not hold, and that its folders hold what they say."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

TEXT = {".py", ".md", ".toml", ".yaml", ".txt", ".json", ".cfg", ""}
# A path that exists on one machine only, or a package index that only some can reach. The tests'
# own examples of paths use /tmp or a relative one.
FORBIDDEN = {
    "path of one machine": re.compile(r"(?<![\w.$}/])/(?:home|root|Users|work|mnt|opt|srv)/\w"),
    "host of a package index": re.compile(
        r"\b(?:pypi\.org|pythonhosted|download\.pytorch|files\.python|conda\.anaconda|npmjs)\b"
    ),
}
FRAGMENT = re.compile(r"^[a-z0-9]+(?:-[a-z0-9]+)*\.(?:added|changed|fixed|removed|format)\.md$")
FOLDERS = ("ckptfmt", "spec", "tests", "benchmarks", "docs")


def project_files(root: Path) -> list[Path]:
    """The files that git knows, or would, were they added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=False)
    if listed.returncode == 0:
        names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
        return [root / name for name in names if (root / name).is_file()]
    # A source archive has no git: everything in the folders that are ours.
    return [p for folder in FOLDERS for p in (root / folder).rglob("*") if p.is_file()]


def offences(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: {what}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def test_no_text_names_one_machine_or_a_package_index(root: Path) -> None:
    found = []
    for path in project_files(root):
        if path.suffix in TEXT and path != Path(__file__):
            found += offences(str(path.relative_to(root)), path.read_text(errors="replace"))
    assert found == []


@pytest.mark.parametrize(
    "text", ["see /home/me/x", "-f https://download.pytorch.org/whl", "(/work/a)"]
)
def test_forbidden_text_is_seen(text: str) -> None:
    assert len(offences("x", text)) == 1
    assert offences("x", "s3://bucket/home/me, ./work/a, a/root/b, $ROOT/opt/x") == []


def test_paths_that_the_pages_name_exist(root: Path) -> None:
    """In backquotes or as a link's target; a path with a placeholder or a pattern is not one."""
    named = re.compile(
        r"`((?:ckptfmt|tests|spec|docs|benchmarks)/[\w./-]*)`"
        r"|\]\(((?:ckptfmt|tests|spec|docs|benchmarks)/[\w./-]+)\)"
    )
    for page in (root / "README.md", root / "CHANGELOG.md"):
        found = {a or b for a, b in named.findall(page.read_text())}
        assert found
        assert [path for path in sorted(found) if not (root / path).exists()] == [], page.name


def test_news_fragments_have_a_kind(root: Path) -> None:
    names = {p.name for p in (root / "docs/changes").iterdir()} - {"README.md"}
    assert [name for name in names if not FRAGMENT.match(name)] == []


def test_ci_run_can_be_executed(root: Path) -> None:
    assert (root / ".ci/run").stat().st_mode & stat.S_IXUSR


def test_no_file_is_big(root: Path) -> None:
    big = {str(p.relative_to(root)): p.stat().st_size for p in project_files(root)}
    assert {name: n for name, n in big.items() if n > 1 << 20} == {}


def test_no_python_file_can_execute_a_pickle(root: Path) -> None:
    """Nothing of the package imports pickle, marshal or shelve, or evaluates text."""
    pattern = re.compile(
        r"^\s*(?:import|from) (?:pickle|marshal|shelve|dill|cloudpickle)\b|\beval\(|\bexec\(", re.M
    )
    found = [str(p) for p in (root / "ckptfmt").rglob("*.py") if pattern.search(p.read_text())]
    assert found == []
