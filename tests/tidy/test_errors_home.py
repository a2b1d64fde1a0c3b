"""Exceptions: defined in `ckptfmt/errors.py`, raised with all their parts, never swallowed."""

from __future__ import annotations

import ast
import builtins

import pytest

import ckptfmt.errors

BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
OURS = {
    name
    for name, value in vars(ckptfmt.errors).items()
    if isinstance(value, type) and issubclass(value, BaseException | UserWarning)
}
# Python's own protocols, not failures of ours.
PROTOCOL = {"StopIteration", "StopAsyncIteration", "KeyboardInterrupt", "SystemExit"}
# The one module that calls the system without Python's own wrappers: an errno becomes the OSError
# that such a wrapper would raise, and storage/failures turns both into a StorageError.
ERRNO_HOME = "ckptfmt.storage.syscalls"
WIDE = {"Exception", "BaseException"}


def called(node: ast.expr | None) -> str:
    """The last part of the name that is raised: `errors.UsageError(...)` -> `UsageError`."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def stray_classes(module: str, tree: ast.Module) -> list[str]:
    """Exception classes outside errors.py."""
    return [
        f"{module}:{node.lineno}: exception {node.name} belongs in ckptfmt/errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and module != "ckptfmt.errors"
        and any(called(base) in BUILTIN | OURS for base in node.bases)
    ]


def bare_raises(module: str, tree: ast.Module) -> list[str]:
    """`raise ValueError(...)` and its like; `__getattr__` must raise AttributeError."""
    allowed = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in {"__getattr__", "__delattr__"}
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and called(node.exc) == "AttributeError"
    }
    return [
        f"{module}:{node.lineno}: raises {called(node.exc)}; take a class of ckptfmt.errors"
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and called(node.exc) in BUILTIN - PROTOCOL
        and id(node) not in allowed
        and (module, called(node.exc)) != (ERRNO_HOME, "OSError")
    ]


def swallowed(module: str, tree: ast.Module) -> list[str]:
    """Handlers that catch everything and do nothing."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            wide = node.type is None or called(node.type) in WIDE
            idle = all(
                isinstance(line, ast.Pass | ast.Continue)
                or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            )
            if wide and idle:
                found.append(f"{module}:{node.lineno}: catches everything and says nothing")
        if isinstance(node, ast.Call) and called(node) == "suppress":
            found += [
                f"{module}:{node.lineno}: suppresses everything"
                for kind in node.args
                if called(kind) in WIDE
            ]
    return found


def test_exceptions_are_defined_in_errors_only(modules: dict[str, ast.Module]) -> None:
    assert [p for m, tree in modules.items() for p in stray_classes(m, tree)] == []


def test_no_bare_builtin_is_raised(modules: dict[str, ast.Module]) -> None:
    assert [p for m, tree in modules.items() for p in bare_raises(m, tree)] == []


def test_nothing_is_swallowed(modules: dict[str, ast.Module]) -> None:
    assert [p for m, tree in modules.items() for p in swallowed(m, tree)] == []


def test_every_class_of_errors_is_public() -> None:
    assert set(ckptfmt.__all__) >= OURS


def test_every_class_has_a_prefix_of_its_own() -> None:
    classes = [getattr(ckptfmt.errors, name) for name in OURS - {"CkptWarning"}]
    assert len({cls.prefix for cls in classes}) == len(classes)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (stray_classes, "class LostError(CheckpointError): ..."),
        (stray_classes, "class Lost(errors.StorageError): ..."),
        (bare_raises, "raise ValueError('x')"),
        (bare_raises, "raise NotImplementedError"),
        (bare_raises, "def f(x):\n    raise AttributeError(x)"),
        (swallowed, "try:\n    f()\nexcept Exception:\n    pass"),
        (swallowed, "try:\n    f()\nexcept:\n    '''why not'''"),
        (swallowed, "with contextlib.suppress(Exception):\n    f()"),
    ],
)
def test_a_breach_is_seen(rule: object, text: str) -> None:
    assert callable(rule)
    assert len(rule("ckptfmt.engine.save", ast.parse(text))) == 1
