"""docs/api.md, `ckptfmt.__all__` and the code say the same names and the same signatures."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptfmt

BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
ADAPTER = re.compile(r"# (ckptfmt\.[\w.]+)\n")
DOC = Path(__file__).resolve().parents[2] / "docs/api.md"

Node = ast.FunctionDef | ast.ClassDef
Shape = tuple[list[tuple[str, str, object, str]], str]


def documented() -> dict[tuple[str, str], Node]:
    """(module, name) -> its stub in docs/api.md."""
    found: dict[tuple[str, str], Node] = {}
    for block in BLOCK.findall(DOC.read_text()):
        home = match[1] if (match := ADAPTER.match(block)) else "ckptfmt"
        for node in ast.parse(block).body:
            assert isinstance(node, Node), f"not a signature: {ast.unparse(node)}"
            assert (home, node.name) not in found, f"{node.name} stands twice in docs/api.md"
            found[home, node.name] = node
    return found


DOCUMENTED = documented()
FUNCTIONS = [key for key, node in DOCUMENTED.items() if isinstance(node, ast.FunctionDef)]
CLASSES = [
    name
    for (home, name), node in DOCUMENTED.items()
    if isinstance(node, ast.ClassDef) and home == "ckptfmt"
]
ADAPTER_CLASSES = [
    key
    for key, node in DOCUMENTED.items()
    if isinstance(node, ast.ClassDef) and key[0] != "ckptfmt"
]


def spelled(annotation: object) -> str:
    """An annotation in one spelling: no quotes, Python's own line breaks."""
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return ast.unparse(ast.parse(text.strip("'\""), mode="eval"))


def settled(default: object) -> object:
    """A default that compares: any empty mapping is `{}`."""
    return {} if isinstance(default, Mapping) and not default else default


def doc_shape(node: ast.FunctionDef) -> Shape:
    """Parameters (name, kind, default, annotation) and the return annotation of a stub."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    defaults += args.defaults
    rows = []
    starred = [args.vararg] if args.vararg else []
    double_starred = [args.kwarg] if args.kwarg else []
    for kind, names, values in (
        ("POSITIONAL_OR_KEYWORD", plain, defaults),
        ("VAR_POSITIONAL", starred, [None] * len(starred)),
        ("KEYWORD_ONLY", args.kwonlyargs, args.kw_defaults),
        ("VAR_KEYWORD", double_starred, [None] * len(double_starred)),
    ):
        for arg, value in zip(names, values, strict=True):
            text = "" if arg.annotation is None else ast.unparse(arg.annotation)
            default = inspect.Parameter.empty if value is None else eval(ast.unparse(value), {})
            rows.append((arg.arg, kind, settled(default), text))
    return rows, "" if node.returns is None else ast.unparse(node.returns)


def live_shape(function: Any) -> Shape:
    signature = inspect.signature(function)
    rows = [
        (p.name, p.kind.name, settled(p.default), spelled(p.annotation))
        for p in signature.parameters.values()
    ]
    return rows, spelled(signature.return_annotation)


def test_all_is_what_the_docs_name() -> None:
    names = {name for home, name in DOCUMENTED if home == "ckptfmt"}
    assert names | {"__version__"} == set(ckptfmt.__all__)
    assert len(ckptfmt.__all__) == len(set(ckptfmt.__all__))


def test_every_public_name_can_be_had() -> None:
    for name in ckptfmt.__all__:
        assert getattr(ckptfmt, name) is not None
    assert set(ckptfmt.__all__) <= set(dir(ckptfmt))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Managr"):
        _ = ckptfmt.Managr


@pytest.mark.parametrize(("home", "name"), FUNCTIONS)
def test_a_function_has_the_documented_signature(home: str, name: str) -> None:
    node = DOCUMENTED[home, name]
    assert isinstance(node, ast.FunctionDef)
    assert live_shape(getattr(importlib.import_module(home), name)) == doc_shape(node)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_documented_members(name: str) -> None:
    node = DOCUMENTED["ckptfmt", name]
    assert isinstance(node, ast.ClassDef)
    cls = getattr(ckptfmt, name)
    methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
    fields = {
        a.target.id: ast.unparse(a.annotation)
        for a in node.body
        if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
    }
    for method, stub in methods.items():
        assert live_shape(getattr(cls, method)) == doc_shape(stub), f"{name}.{method}"
    if dataclasses.is_dataclass(cls) and fields:
        assert {f.name: spelled(f.type) for f in dataclasses.fields(cls)} == fields
    if methods:
        public = {
            member
            for member, value in vars(cls).items()
            if not member.startswith("_") and inspect.isfunction(value)
        }
        assert public == {method for method in methods if not method.startswith("_")}
        annotated = {a for base in cls.__mro__ for a in getattr(base, "__annotations__", {})}
        slots = {s for base in cls.__mro__ for s in getattr(base, "__slots__", ())}
        assert fields.keys() <= annotated | slots | set(dir(cls))


@pytest.mark.integration
@pytest.mark.parametrize(("home", "name"), ADAPTER_CLASSES)
def test_a_class_of_an_adapter_has_the_documented_methods(home: str, name: str) -> None:
    node = DOCUMENTED[home, name]
    assert isinstance(node, ast.ClassDef)
    cls = getattr(importlib.import_module(home), name)
    for stub in node.body:
        if isinstance(stub, ast.FunctionDef):
            assert live_shape(vars(cls)[stub.name]) == doc_shape(stub), f"{name}.{stub.name}"


@pytest.mark.parametrize("name", [n for n in CLASSES if n.endswith(("Error", "Warning"))])
def test_an_error_has_the_documented_bases(name: str) -> None:
    node = DOCUMENTED["ckptfmt", name]
    assert isinstance(node, ast.ClassDef)
    assert [base.__name__ for base in getattr(ckptfmt, name).__bases__] == [
        ast.unparse(base) for base in node.bases
    ]


@pytest.mark.integration
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_an_adapter_offers_save_load_and_restore(framework: str) -> None:
    adapter = importlib.import_module(f"ckptfmt.{framework}")
    assert adapter.save is ckptfmt.save
    assert callable(adapter.load)
    assert callable(adapter.restore)


def test_a_signature_that_differs_is_seen() -> None:
    def live(a: int, *, b: Mapping[str, int] = {}) -> str:
        return f"{a}{b}"

    for text, equal in (
        ("def f(a: int, *, b: Mapping[str, int] = {}) -> str: ...", True),
        ("def f(a: int, *, b: Mapping[str, int] = {}) -> int: ...", False),
        ("def f(a: int, *, b: Mapping[str, str] = {}) -> str: ...", False),
        ("def f(a: int, b: Mapping[str, int] = {}) -> str: ...", False),
        ("def f(a: int, *, b: Mapping[str, int] | None = None) -> str: ...", False),
        ("def f(a: int) -> str: ...", False),
    ):
        node = ast.parse(text).body[0]
        assert isinstance(node, ast.FunctionDef)
        assert (live_shape(live) == doc_shape(node)) is equal, text
