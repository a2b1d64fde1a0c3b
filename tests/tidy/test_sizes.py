"""Sizes and names: what a reader can hold in the head at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 80
POSITIONAL_MAX = 5
ABSTRACT_MAX = 7
VAGUE = re.compile(r"^_?(utils?|common|helpers?|misc)$")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Arguments that may be given by position, `self` and `cls` aside."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_modules_are_short(sources: dict[str, Path]) -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in sources.items()}
    assert {name: n for name, n in lines.items() if n > MODULE_LINES_MAX} == {}


def test_functions_are_short(modules: dict[str, ast.Module]) -> None:
    long = {
        f"{name}:{f.lineno} {f.name}": (f.end_lineno or 0) - f.lineno + 1
        for name, tree in modules.items()
        for f in functions(tree)
        if (f.end_lineno or 0) - f.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_functions_take_few_positional_arguments(modules: dict[str, ast.Module]) -> None:
    many = {
        f"{name}:{f.lineno} {f.name}": positional(f)
        for name, tree in modules.items()
        for f in functions(tree)
        if positional(f) > POSITIONAL_MAX
    }
    assert many == {}


def test_interfaces_ask_for_few_methods(modules: dict[str, ast.Module]) -> None:
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                abstract = [
                    f.name
                    for f in node.body
                    if isinstance(f, ast.FunctionDef)
                    and any("abstractmethod" in ast.unparse(d) for d in f.decorator_list)
                ]
                assert len(abstract) <= ABSTRACT_MAX, f"{name}:{node.lineno} {node.name}"


def test_every_module_says_what_it_promises(modules: dict[str, ast.Module]) -> None:
    assert [name for name, tree in modules.items() if not ast.get_docstring(tree)] == []


def test_no_module_has_a_name_that_says_nothing(root: Path) -> None:
    folders = ("ckptfmt", "tests", "benchmarks", "docs", "spec")
    stems = [p for folder in folders for p in (root / folder).rglob("*") if VAGUE.match(p.stem)]
    assert stems == []


def test_tests_are_no_packages(root: Path) -> None:
    """pytest imports them by path; an `__init__.py` would give one of them another name."""
    assert list((root / "tests").rglob("__init__.py")) == []


def test_vague_names_and_counts_are_seen() -> None:
    assert all(VAGUE.match(name) for name in ("utils", "_helpers", "common", "misc", "util"))
    assert not VAGUE.match("faulty_backend")
    method = next(functions(ast.parse("def f(self, a, b, /, c, *, d): ...")))
    assert positional(method) == 3
